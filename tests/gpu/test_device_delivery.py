"""Batches on the GPU, and in page-locked memory: every byte right, whatever the consumer's streams do."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from support.datasets.gpu import Mixed, Movable, Numbered, movable, sparse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

MIB = 1 << 20
BATCH = 8
ROW_VALUES = (MIB // 8) // 2
"""Half a MiB a row."""


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    yield
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def loader_of(batches: int, **more: Any) -> penstock.DataLoader[Any]:
    return penstock.DataLoader(Numbered(batches * BATCH, ROW_VALUES), batch_size=BATCH, num_workers=4, **more)


def expected(number: int) -> torch.Tensor:
    return torch.arange(number * BATCH, (number + 1) * BATCH)


def busy(cycles: int = 400_000_000) -> None:
    """Keep the current stream busy for some 200 ms."""
    torch.cuda._sleep(cycles)


def rows_of(batch: torch.Tensor) -> torch.Tensor:
    """The number every row holds; -1 for a row with a wrong byte."""
    first = batch[:, 0]
    return torch.where((batch == first[:, None]).all(dim=1), first, -1)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_on_the_device_with_everything_in_its_place(workers: int) -> None:
    loader = penstock.DataLoader(Mixed(32, 100), batch_size=4, num_workers=workers, device="cuda")
    for number, batch in enumerate(loader):
        assert batch["x"].device == torch.device("cuda", torch.cuda.current_device())
        assert batch["x"][:, 7].tolist() == list(range(4 * number, 4 * number + 4))
        assert batch["text"] == [f"sample {n}" for n in range(4 * number, 4 * number + 4)]
        assert type(batch["pair"]) is list and batch["pair"][1].is_cuda
    loader.close()


def test_what_is_copied_ahead_is_right_while_the_consumer_lags_behind() -> None:
    checks = []
    with loader_of(60, device="cuda", memory="200MiB") as loader:
        for number, batch in enumerate(loader):
            if number % 20 == 0:
                busy()
            checks.append((rows_of(batch) == expected(number).cuda()).all())
            assert loader.stats().device_ahead_bytes <= 2 * BATCH * ROW_VALUES * 8
            del batch
    assert len(checks) == 60 and bool(torch.stack(checks).all())
    assert loader.stats().device_ahead_bytes == 0


def test_a_consumer_on_a_stream_of_its_own_waits_for_the_copy() -> None:
    stream = torch.cuda.Stream()
    checks = []
    with loader_of(40, device="cuda") as loader, torch.cuda.stream(stream):
        for number, batch in enumerate(loader):
            busy(20_000_000)
            checks.append((rows_of(batch) == expected(number).cuda()).all())
            del batch
        assert bool(torch.stack(checks).all())
        checks.clear()


@pytest.mark.parametrize("changes", [False, True], ids=["", "slots resized meanwhile"])
def test_pinned_slots_are_not_refilled_before_side_streams_have_read_them(changes: bool) -> None:
    """A copy queued behind a long kernel on any stream, and the batch dropped at once."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    checks = []
    with loader_of(200, pin_memory=True, memory="120MiB") as loader:
        for number, batch in enumerate(loader):
            assert batch.is_pinned()
            stream = streams[number % 3]
            with torch.cuda.stream(stream):
                if number % 40 == 0:
                    busy()
                copy = batch.to("cuda", non_blocking=True)
                del batch
                checks.append((rows_of(copy) == expected(number).to("cuda", non_blocking=True)).all())
                del copy
            if changes and number % 25 == 10:
                loader.set_memory(["90MiB", "200MiB"][number // 25 % 2])
        torch.cuda.synchronize()
        assert bool(torch.stack(checks).all())
        checks.clear()


def test_pinned_batches_are_the_arenas_own_memory() -> None:
    torch.cuda.memory._record_memory_history  # noqa: B018  (torch built with CUDA)
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    with loader_of(20, pin_memory=True) as loader:
        for batch in loader:
            assert batch.is_pinned()
            assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) <= before + MIB
        assert loader.stats().copied_bytes == 0


def test_pinned_batches_can_be_kept_and_outlive_the_loader() -> None:
    loader = loader_of(40, pin_memory=True, memory="60MiB")
    batches = list(loader)
    loader.close()
    assert all(batch.is_pinned() for batch in batches)
    on_device = [batch.to("cuda", non_blocking=True) for batch in batches]
    del batches
    for number, batch in enumerate(on_device):
        assert rows_of(batch).tolist() == expected(number).tolist()


def test_custom_types_are_pinned_and_moved_their_own_way() -> None:
    given: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "collate_fn": movable}
    for batch in penstock.DataLoader(Numbered(8, 9), pin_memory=True, **given):
        assert isinstance(batch, Movable) and batch.how == "pinned " and batch.x.is_pinned()
    for number, batch in enumerate(penstock.DataLoader(Numbered(8, 9), device="cuda", **given)):
        assert isinstance(batch, Movable) and batch.how == "moved " and batch.x.is_cuda
        assert batch.x[:, 0].tolist() == list(range(4 * number, 4 * number + 4))


def test_tensors_that_are_not_plain_go_torchs_way() -> None:
    for number, batch in enumerate(
        penstock.DataLoader(Numbered(8, 9), batch_size=4, num_workers=2, collate_fn=sparse, device="cuda")
    ):
        assert batch.is_sparse and batch.is_cuda
        assert batch.to_dense()[:, 0].tolist() == list(range(4 * number, 4 * number + 4))


def test_an_error_is_raised_in_its_turn_and_iteration_continues() -> None:
    class Broken(Numbered):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 9:
                raise KeyError("nine")
            return super().__getitem__(index)

    iterator = iter(penstock.DataLoader(Broken(24, 9), batch_size=4, num_workers=2, device="cuda"))
    assert [int(next(iterator)[0, 0]) for _ in range(2)] == [0, 4]
    with pytest.raises(KeyError, match="nine"):
        next(iterator)
    assert [int(batch[0, 0]) for batch in iterator] == [12, 16, 20]


def test_a_state_counts_what_the_user_got_and_not_what_was_copied_ahead() -> None:
    loader = loader_of(12, device="cuda")
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.state_dict()
    loader.close()
    del iterator
    other = loader_of(12, device="cuda")
    other.load_state_dict(state)
    assert [int(rows_of(batch)[0]) for batch in other] == [number * BATCH for number in range(5, 12)]
    other.close()


def test_a_graph_captured_while_the_loader_works_is_not_spoilt() -> None:
    x = torch.zeros(1000, device="cuda")
    with loader_of(60, pin_memory=True, memory="60MiB") as loader:
        iterator = iter(loader)
        held = [next(iterator) for _ in range(3)]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held.clear()
            for _ in range(50):
                x += 1
        graph.replay()
        assert int(x[0]) == 50
        assert sum(1 for _ in iterator) == 57
        del graph


def test_a_graph_captured_while_batches_are_being_copied_is_not_spoilt() -> None:
    x = torch.zeros(1000, device="cuda")
    with loader_of(300, device="cuda", memory="80MiB") as loader:
        for number, batch in enumerate(loader):
            assert rows_of(batch).tolist() == expected(number).tolist()
            del batch
            if number % 10:
                continue
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(50):
                    x += 1
                # Long enough for the loader's own thread to look whether copies are done.
                time.sleep(0.01)
            graph.replay()
            del graph
        assert int(x[0]) == 50 * 30


def test_a_loop_that_never_waits_does_not_fill_the_device() -> None:
    batch_bytes = BATCH * ROW_VALUES * 8
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sink = torch.zeros((), dtype=torch.int64, device="cuda")
    with loader_of(60, device="cuda") as loader:
        for batch in loader:
            busy(4_000_000)
            sink += batch[0, 0]
            del batch
    # The ones ahead, those the device has not come to yet, the one in hand.
    assert torch.cuda.max_memory_allocated() - before <= (2 + 4 + 2) * batch_bytes


def test_a_budget_of_three_batches_is_enough_and_nothing_becomes_the_users_own() -> None:
    batch_bytes = BATCH * ROW_VALUES * 8
    checks = []
    with loader_of(100, device="cuda", memory=3 * batch_bytes + 70 * MIB) as loader:
        for number, batch in enumerate(loader):
            checks.append((rows_of(batch) == expected(number).cuda()).all())
            del batch
        assert bool(torch.stack(checks).all())
        assert loader.stats().copied_bytes == 0
        assert loader.stats().peak_in_flight_bytes <= loader.memory_bytes
    checks.clear()


def test_an_iterator_that_is_dropped_on_the_way_leaves_nothing_on_the_device() -> None:
    before = torch.cuda.memory_allocated()
    loader = loader_of(60, device="cuda")
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    gc.disable()
    try:
        del iterator, loader
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_loader_delivers_on_its_own_gpu() -> None:
    with loader_of(10, device="cuda:0") as first, loader_of(10, device="cuda:1") as second:
        for number, (one, other) in enumerate(zip(first, second, strict=True)):
            assert (one.device.index, other.device.index) == (0, 1)
            assert rows_of(one).tolist() == rows_of(other).tolist() == expected(number).tolist()
            del one, other


def test_a_gpu_can_be_named_by_number() -> None:
    with loader_of(4, device="cuda:0") as loader:
        assert [int(rows_of(batch)[0]) for batch in loader] == [number * BATCH for number in range(4)]


FRESH = """
import sys, torch
import penstock
from support.datasets.gpu import Numbered
loader = penstock.DataLoader(Numbered(32, 1000), batch_size=8, num_workers=2, {how})
iterator = iter(loader)
assert not torch.cuda.is_initialized()
for number, batch in enumerate(iterator):
    assert batch.cuda()[:, 0].tolist() == list(range(8 * number, 8 * number + 8))
loader.close()
print("fine")
"""


@pytest.mark.parametrize("how", ["device='cuda'", "pin_memory=True"])
def test_cuda_may_start_after_the_loader(how: str) -> None:
    code = FRESH.format(how=how)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "fine", done.stderr


def test_the_bench_shows_the_link_and_both_loaders(tmp_path: Path) -> None:
    pytest.importorskip("click")
    (tmp_path / "own_images.py").write_text(
        "import torch\nimages = [torch.zeros(3, 224, 224, dtype=torch.uint8)] * 4096\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "bench", f"{tmp_path}/own_images.py:images", "--device", "cuda",
         "--batch-size", "64", "--workers", "4", "--seconds", "1", "--rounds", "1", "--json"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["link_bytes_per_s"] > answer["loaders"]["penstock"]["bytes_per_s"] > 0
    assert answer["loaders"]["torch"]["bytes_per_s"] > 0


def test_a_compiled_consumer_sees_the_right_batches() -> None:
    step = torch.compile(lambda batch: batch.float().sum(dim=1), dynamic=False)
    with loader_of(10, device="cuda") as loader:
        for number, batch in enumerate(loader):
            assert torch.equal(step(batch).cpu(), expected(number).float() * ROW_VALUES)
            del batch
    torch._dynamo.reset()


def test_two_loaders_at_once_each_with_batches_of_their_own() -> None:
    with loader_of(20, device="cuda") as first, loader_of(20, pin_memory=True) as second:
        for number, (one, other) in enumerate(zip(first, second, strict=True)):
            assert rows_of(one).tolist() == rows_of(other).tolist() == expected(number).tolist()
            del one, other


def test_nothing_is_page_locked_after_closing() -> None:
    loader = loader_of(6, device="cuda")
    iterator = iter(loader)
    next(iterator)
    engine = iterator.engine
    assert engine.gauges().page_locked_bytes > 0
    del iterator
    loader.close()
    assert engine.gauges().page_locked_bytes == 0


def test_a_refused_page_lock_is_one_warning_and_torchs_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.device.page_locks import PageLocks
    from penstock.loader import iterator as loader_iterator

    refusing = PageLocks(lambda address, size: "out of memory", lambda address: None)
    monkeypatch.setattr(loader_iterator, "PageLocks", lambda: refusing)
    loader = loader_of(6, pin_memory=True)
    iterator = iter(loader)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, batch in enumerate(iterator):
            assert batch.is_pinned() and rows_of(batch).tolist() == expected(number).tolist()
    told = [str(warning.message) for warning in caught if "page-locked" in str(warning.message)]
    assert len(told) == 1 and "ulimit -l" in told[0]
    loader.close()
