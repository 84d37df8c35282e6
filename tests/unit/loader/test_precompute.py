"""precompute(): every sample on disk, once, whatever happens on the way."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

import penstock
from penstock.loader.precompute import _ProgressLine

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memfd")


class Encoded(Dataset):
    """Latents that take their time, and fail at one sample until told not to."""

    def __init__(self, log: Path, fails_at: int | None = None) -> None:
        self.log = log
        self._fails_at = fails_at

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, object]:
        if index == self._fails_at:
            raise RuntimeError("the encoder ran out of memory")
        with self.log.open("a") as log:
            log.write(f"{index}\n")
        return {"latents": torch.full((4, 8, 8), float(index)), "prompt": f"prompt {index}"}


def computed(log: Path) -> list[int]:
    return sorted(map(int, log.read_text().split())) if log.exists() else []


@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_is_computed_once_and_training_reads_it_from_disk(tmp_path: Path, workers: int) -> None:
    log = tmp_path / "log"
    with penstock.Cache("8MB", disk=tmp_path / "disk") as cache:
        done = penstock.precompute(Encoded(log), cache, num_workers=workers)
        assert (done.computed, done.found, done.not_kept) == (30, 0, 0)
    assert computed(log) == list(range(30))
    with penstock.Cache("8MB", disk=tmp_path / "disk") as cache:
        again = penstock.precompute(Encoded(log), cache)
        assert (again.computed, again.found) == (0, 30)
        for batch in penstock.DataLoader(again.dataset, batch_size=10, num_workers=2):
            assert torch.equal(batch["latents"][:, 0, 0, 0], torch.tensor([float(p[7:]) for p in batch["prompt"]]))
        assert cache.stats().disk_hits == 30
    assert computed(log) == list(range(30)), "nothing was computed twice"


def test_after_a_failure_precompute_continues_where_it_stopped(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with penstock.Cache("8MB", disk=tmp_path / "disk") as cache:
        with pytest.raises(RuntimeError, match="out of memory"):
            penstock.precompute(Encoded(log, fails_at=17), cache, fingerprint="latents, version 1")
        assert computed(log) == list(range(17))
        done = penstock.precompute(Encoded(log), cache, fingerprint="latents, version 1")
        assert (done.computed, done.found) == (13, 17)
    assert computed(log) == list(range(30))


def test_samples_already_in_memory_are_also_written_to_disk(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with penstock.Cache("8MB", name="shared") as memory, penstock.Cache(name="shared", disk=tmp_path / "disk") as cache:
        wrapped = memory.wrap(Encoded(log))
        for index in range(30):
            _ = wrapped[index]
        done = penstock.precompute(Encoded(log), cache)
        assert (done.computed, done.not_kept) == (30, 0) and computed(log) == list(range(30))
        with pytest.raises(penstock.ConfigError, match="a cache other than the one to fill"):
            penstock.precompute(wrapped, cache)


def test_the_error_for_a_cache_without_a_disk_store_names_the_argument_to_give(tmp_path: Path) -> None:
    with penstock.Cache("8MB") as cache, pytest.raises(penstock.ConfigError, match='disk="path"'):
        penstock.precompute(Encoded(tmp_path / "log"), cache)


def test_samples_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    with penstock.Cache("8MB", disk=tmp_path / "disk", disk_limit="1MiB") as cache:
        with pytest.warns(RuntimeWarning, match="kept 4 of 20"):
            done = penstock.precompute(torch.utils.data.TensorDataset(torch.zeros(20, 50_000)), cache)
        assert done.not_kept > 0 and done.computed + done.not_kept == 20


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_line_appears_where_it_is_wanted() -> None:
    for out, wanted, lines in ((io.StringIO(), None, 0), (io.StringIO(), True, 11), (Terminal(), False, 0)):
        with _ProgressLine(100, wanted=wanted, out=out) as line:
            for done in range(101):
                line.show(done)
        assert len(out.getvalue().splitlines()) == lines
    out = Terminal()
    with _ProgressLine(100, wanted=None, out=out) as line:
        line.show(50)
        line.show(100)
    assert out.getvalue().startswith("\rprecompute: 50 of 100 (50%)") and out.getvalue().endswith("\n")
    assert "100 of 100 (100%)" in out.getvalue()


@pytest.mark.filterwarnings("ignore:.*cannot be kept on disk")
def test_precompute_stops_when_no_sample_can_be_kept(tmp_path: Path) -> None:
    class Attached(Dataset):
        computed = 0

        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> torch.Tensor:
            Attached.computed += 1
            return torch.ones(3, requires_grad=True) * index

    with penstock.Cache("8MB", disk=tmp_path / "disk") as cache:
        with pytest.warns(RuntimeWarning, match="stopped after 32"):
            done = penstock.precompute(Attached(), cache)
        assert (done.computed, done.not_kept) == (0, 1000) and Attached.computed < 100
