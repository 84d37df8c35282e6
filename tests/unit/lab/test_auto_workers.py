"""``num_workers="auto"``: the number of workers comes from a short probe, whatever the dataset is like."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, SequentialSampler

import penstock
from penstock.errors import ConfigError
from penstock.lab import auto_workers
from penstock.lab.dataset.sample_probe import ProbeResult
from penstock.meter import limits
from penstock.planner.profile import SeenSample

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

CORES = max(1, min(32, int(limits().cpu_usable)))


class Rows(Dataset[torch.Tensor]):
    """Samples that wait or compute, and a file that says in how many processes they were read."""

    def __init__(self, *, wait_s: float = 0.0, spin_s: float = 0.0, count: int = 500, log: Path | None = None) -> None:
        self.wait_s, self.spin_s, self.count, self.log, self.seen = wait_s, spin_s, count, log, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        self.seen += 1
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{os.getpid()}\n")
        time.sleep(self.wait_s)
        end_s = time.thread_time() + self.spin_s
        while time.thread_time() < end_s:
            pass
        return torch.full((100,), index)


class Failing(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise KeyError("no such frame")


class Stuck(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(1000)
        raise AssertionError


class Deadly(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        os._exit(3)


class Lengthless(Rows):
    __len__ = None  # type: ignore[assignment]


class Stream(IterableDataset[int]):
    def __init__(self) -> None:
        self.left = iter(range(10))

    def __iter__(self) -> Iterator[int]:
        return self.left


def auto(dataset: Any, **given: Any) -> penstock.DataLoader[Any]:
    return penstock.DataLoader(dataset, num_workers="auto", **given)


def read_without_load(dataset: Rows, *_: Any, **__: Any) -> ProbeResult:
    """What the probe finds on a machine that does nothing else: there, a sample that computes does not wait."""
    sample = SeenSample(size_bytes=800, wait_s=dataset.wait_s, cpu_s=dataset.spin_s)
    return ProbeResult(samples=(sample,) * 8, collate_s=0.0, tensors=1, is_collated=True, holds_gil=None)


def test_samples_that_wait_get_more_workers_than_samples_that_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_workers, "probe", read_without_load)
    waits, computes = auto(Rows(wait_s=0.02), batch_size=16), auto(Rows(spin_s=0.01), batch_size=16)
    assert waits.num_workers > computes.num_workers >= 1
    assert type(waits.num_workers) is int and waits.prefetch_factor == 2 and waits.autotune is True


def test_the_loader_starts_as_many_workers_as_num_workers_says_without_torchs_warning() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="This DataLoader will create")
        with auto(Rows(wait_s=0.005, count=64), batch_size=4) as loader:
            batches = list(loader)
            assert loader.stats().workers == loader.num_workers > 1
    assert torch.equal(torch.cat(batches)[:, 0], torch.arange(64))
    with pytest.warns(UserWarning, match="This DataLoader will create"):
        # torch may warn of a number that the user has set.
        loader.num_workers = 500
        loader.check_worker_number_rationality()


def test_a_small_budget_means_few_workers() -> None:
    assert auto(Rows(wait_s=0.01), batch_size=16, memory="24MB").num_workers == 1


def test_the_probe_changes_no_state_of_the_trainer(tmp_path: Path) -> None:
    log = tmp_path / "log"
    dataset = Rows(log=log)
    states = (random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state())
    before = {child.pid for child in psutil.Process().children()}
    loader = auto(dataset, batch_size=4, shuffle=True)
    assert random.getstate() == states[0]
    assert pickle.dumps(np.random.get_state()) == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert dataset.seen == 0
    assert str(os.getpid()) not in log.read_text().split()
    assert {child.pid for child in psutil.Process().children()} <= before
    assert loader.dataset is dataset


@pytest.mark.parametrize("kind", [Failing, Deadly])
def test_a_failing_dataset_raises_the_same_error_as_with_a_given_number_of_workers(kind: type[Rows]) -> None:
    planned, given = auto(kind(), batch_size=4), penstock.DataLoader(kind(), batch_size=4, num_workers=CORES)
    assert planned.num_workers == CORES
    with pytest.raises(Exception) as theirs:
        next(iter(given))
    with pytest.raises(type(theirs.value)) as ours:
        next(iter(planned))
    assert str(ours.value).splitlines()[-1][:40] == str(theirs.value).splitlines()[-1][:40]


def test_a_dataset_that_hangs_does_not_hang_its_loader() -> None:
    # A sample takes 1000 s: that this returns at all shows that the probe was ended.
    assert auto(Stuck()).num_workers == CORES


@pytest.mark.parametrize(("count", "workers"), [(0, {CORES}), (1, {1}), (2, {1, 2})])
def test_tiny_datasets_get_no_more_workers_than_samples(count: int, workers: set[int]) -> None:
    loader = auto(Rows(wait_s=0.01, count=count), batch_size=8)
    assert loader.num_workers in workers
    with loader:
        assert sum(len(batch) for batch in loader) == count


def test_a_stream_gets_one_worker_and_loses_no_sample() -> None:
    with auto(Stream(), batch_size=None) as loader:
        assert loader.num_workers == 1
        assert list(loader) == list(range(10))


def test_with_worker_seeding_the_number_of_workers_does_not_depend_on_a_measurement() -> None:
    assert auto(Rows(wait_s=0.02), seeding="worker").num_workers == CORES


@pytest.mark.parametrize(
    "given",
    [
        {"batch_size": None},
        {"batch_size": None, "collate_fn": lambda sample: sample[:3]},
        {"batch_sampler": BatchSampler(SequentialSampler(range(40)), 8, False)},
        {"batch_sampler": [[0, 1], [2]]},
        {"batch_size": 4, "collate_fn": len},
        {"batch_size": 4, "backend": "thread"},
        {"batch_size": 4, "cache": "8MB"},
        {"batch_size": 4, "prefetch_factor": 3, "persistent_workers": True, "timeout": 60},
    ],
    ids=lambda given: " ".join(given),
)
def test_every_way_to_make_batches_gets_a_plan(given: dict[str, Any]) -> None:
    with auto(Rows(count=40), **given) as loader:
        assert loader.num_workers >= 1
        assert len(list(loader)) == len(loader)
        if loader.cache is not None:
            stats = loader.stats().cache
            # The probe did not read through the cache.
            assert stats is not None and stats.hits == 0
            loader.cache.close()


def test_datasets_with_keys_of_their_own_or_without_a_length_can_be_loaded() -> None:
    with auto({"a": 1, "b": 2}, sampler=["a", "b"]) as loader, auto(Lengthless(), sampler=[3, 1]) as other:
        assert [int(batch) for batch in loader] == [1, 2]
        assert [int(batch[0, 0]) for batch in other] == [3, 1]


def test_a_wrong_argument_is_refused_before_any_sample_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for wrong in ({"batch_size": 0}, {"timeout": -1}, {"sampler": [0], "shuffle": True}):
        with pytest.raises(ValueError):
            auto(Rows(log=log), **wrong)
    assert not log.exists()


def test_a_loader_inside_a_worker_plans_nothing_and_loads_without_workers(tmp_path: Path) -> None:
    log = tmp_path / "log"
    context: Any = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    worker = context.Process(target=_load_in_worker, args=(queue, log), daemon=True)
    worker.start()
    workers, total, readers = queue.get()
    worker.join()
    assert (workers, total, readers) == (0, sum(range(8)), 1)


def _load_in_worker(queue: Any, log: Path) -> None:
    with auto(Rows(count=8, log=log), batch_size=4, prefetch_factor=2, persistent_workers=True) as loader:
        total = sum(int(batch[:, 0].sum()) for batch in loader)
        queue.put((loader.num_workers, total, len(set(log.read_text().split()))))


def test_each_of_several_ranks_plans_for_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(CORES))
    # Its share is one core; a plan for all cores would have four workers for each of them.
    assert auto(Rows(wait_s=0.02), batch_size=8).num_workers <= 4


def test_autotune_is_a_plain_argument() -> None:
    assert penstock.DataLoader(Rows()).autotune is False
    assert penstock.DataLoader(Rows(), autotune=True).autotune is True
    with pytest.raises(ConfigError, match="autotune='yes'"):
        penstock.DataLoader(Rows(), autotune="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_workers": "many"}, "num_workers='many' is neither a number nor"),
        ({"backend": "ray"}, 'backend="ray" is not available yet'),
    ],
)
def test_unknown_values_are_refused_with_an_error_that_names_them(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        penstock.DataLoader(Rows(), **given)


def test_a_settings_file_may_say_auto(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[train]\nbatch_size = 4\nnum_workers = "auto"\nprefetch_factor = 2\n')
    loader = penstock.DataLoader.from_settings(Rows(), path)
    assert loader.autotune and loader.num_workers >= 1 and loader.prefetch_factor == 2


UNGUARDED = """
import os
from pathlib import Path
import torch
import penstock

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        with Path("log").open("a") as file:
            file.write(f"{os.getpid()}\\n")
        return index

loader = penstock.DataLoader(Rows(), batch_size=4, num_workers="auto", multiprocessing_context="spawn")
if __name__ == "__main__":
    with Path("log").open("w"):
        pass
    loader.resize(workers=1)
    with loader:
        assert sum(int(batch.sum()) for batch in loader) == 28
"""


def test_a_program_that_its_workers_import_again_plans_only_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNGUARDED)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    # Only the worker: it started no process of its own to read samples.
    assert len(set((tmp_path / "log").read_text().split())) == 1
