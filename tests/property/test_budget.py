"""The budget holds: by the loader's own account, and by what the kernel says the process tree takes."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
import warnings
from collections import deque
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from support.datasets import sized as data

pytestmark = [
    pytest.mark.soak,  # PSS is sampled process by process: needs the machine to itself
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.skipif(penstock.memory().pss_bytes is None, reason="no PSS here"),
]

KIB, MIB = 1 << 10, 1 << 20


@dataclasses.dataclass(frozen=True)
class Use:
    """One way of using a loader."""

    batch_bytes: tuple[int, ...]
    workers: int
    memory: int
    consume_s: float
    keep: int
    """How many of the last batches the user goes on holding."""
    dataset: type = data.Sized
    collate: Any = None


@dataclasses.dataclass
class Seen:
    """The most that was seen while a loader ran."""

    accounted_bytes: int = 0
    account: str = ""
    over_bytes: int = -(1 << 60)
    """Growth of the tree's PSS beyond what the user keeps, less the budget."""
    samples: int = 0


class Watch(threading.Thread):
    """Samples stats and PSS, as fast as the kernel answers, until told to stop."""

    def __init__(self, loader: penstock.DataLoader[Any], use: Use, kept: deque[Any]) -> None:
        super().__init__(daemon=True)
        self.seen = Seen()
        self._loader, self._use, self._kept = loader, use, kept
        self._over = threading.Event()
        gc.collect()
        self._base = penstock.memory().pss_bytes or 0

    def run(self) -> None:
        while not self._over.is_set():
            self._account()
            before = self._kept_bytes()
            pss = penstock.memory().pss_bytes or 0
            self._account()
            # Batches come and go while the kernel counts: what was kept before or after does not count as growth.
            kept = max(before, self._kept_bytes())
            over = pss - self._base - kept - self._use.memory
            self.seen.over_bytes = max(self.seen.over_bytes, over)
            self.seen.samples += 1
            time.sleep(0.002)

    def _account(self) -> None:
        stats = self._loader.stats()
        accounted = stats.in_flight_bytes + stats.workers_private_bytes
        if accounted > self.seen.accounted_bytes:
            self.seen.accounted_bytes = accounted
            self.seen.account = f"{stats.in_flight_bytes >> 20} in flight, {stats.workers_private_bytes >> 20} private"

    def _kept_bytes(self) -> int:
        """What the user keeps beyond the last batch, which the budget covers as lent."""
        return sum(weight(batch) for batch in list(self._kept)[:-1])

    def stop(self) -> Seen:
        self._over.set()
        self.join()
        return self.seen


def weight(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    return sum(len(one) if isinstance(one, bytes) else one.nbytes for one in batch)


def check(number: int, use: Use, batch: Any) -> None:
    """Every byte is the batch's own."""
    rows = [torch.frombuffer(one, dtype=torch.uint8) if isinstance(one, bytes) else one for one in batch]
    assert len(rows) == data.BATCH_ROWS
    for row in rows:
        assert len(row) == max(1, use.batch_bytes[number] // data.BATCH_ROWS)
        assert int(row.min()) == int(row.max()) == data.value_of(number), f"batch {number} is damaged"


def run(use: Use) -> Seen:
    loader = penstock.DataLoader(
        use.dataset(list(use.batch_bytes)),
        batch_size=data.BATCH_ROWS,
        num_workers=use.workers,
        collate_fn=use.collate,
        memory=use.memory,
        multiprocessing_context="fork",
        timeout=60,
    )
    kept: deque[Any] = deque(maxlen=use.keep + 1)
    watch = Watch(loader, use, kept)
    watch.start()
    try:
        with warnings.catch_warnings(), loader:
            # A budget chosen so that every batch fits must never need the exception for giants.
            warnings.filterwarnings("error", message="a batch needs")
            number = -1
            for number, batch in enumerate(loader):
                kept.append(batch)
                time.sleep(use.consume_s)
                for back, held in enumerate(reversed(kept)):
                    check(number - back, use, held)
                    del held
                del batch
            assert number == len(use.batch_bytes) - 1
            assert loader.stats().peak_in_flight_bytes <= use.memory
    finally:
        seen = watch.stop()
    return seen


def hold_to(seen: Seen, use: Use) -> None:
    assert seen.accounted_bytes <= use.memory, (
        f"accounted {seen.accounted_bytes >> 20} MiB ({seen.account}) of {use.memory >> 20} MiB"
    )
    slack = 0.03 * use.memory
    assert seen.over_bytes <= slack, (
        f"the tree's PSS grew {seen.over_bytes / MIB:.1f} MiB over the budget of {use.memory >> 20} MiB"
    )


@pytest.fixture(scope="module", autouse=True)
def _warmed_up() -> None:
    """Code and allocators that any first loader brings in are not what a budget is about."""
    run(Use((KIB, 30 * MIB, KIB), 2, 400 * MIB, 0.0, 1))
    run(Use((KIB, 3 * MIB), 1, 400 * MIB, 0.0, 1, data.Sized, data.stacked))


sizes = st.lists(
    st.sampled_from([KIB, 50 * KIB, MIB, 7 * MIB, 20 * MIB, 36 * MIB]).flatmap(
        lambda top: st.integers(max(1, top // 2), top)
    ),
    min_size=4,
    max_size=30,
).map(tuple)
uses = st.builds(
    Use,
    batch_bytes=sizes,
    workers=st.integers(1, 4),
    memory=st.sampled_from([220 * MIB, 320 * MIB]),
    consume_s=st.sampled_from([0.0, 0.002, 0.03]),
    keep=st.sampled_from([0, 0, 1, 3, 100]),
)


@settings(max_examples=14)
@given(uses)
def test_the_budget_holds_for_random_sizes_workers_speeds_and_held_batches(use: Use) -> None:
    hold_to(run(use), use)


@settings(max_examples=8)
@given(uses, st.sampled_from([data.stacked, data.listed]))
def test_the_budget_holds_with_a_custom_collate_function(use: Use, collate: Any) -> None:
    use = dataclasses.replace(use, collate=collate)
    hold_to(run(use), use)


@settings(max_examples=5)
@given(uses)
def test_the_budget_holds_where_one_worker_builds_whole_batches(use: Use) -> None:
    use = dataclasses.replace(use, dataset=data.SizedWhole, memory=400 * MIB)
    hold_to(run(use), use)


@settings(max_examples=5)
@given(uses)
def test_the_budget_holds_for_streams(use: Use) -> None:
    use = dataclasses.replace(use, dataset=data.SizedStream, workers=1)
    hold_to(run(use), use)


def test_huge_samples_between_tiny_ones_leave_no_memory_behind() -> None:
    use = Use(tuple([KIB] * 20 + [60 * MIB] + [KIB] * 20) * 3, 2, 200 * MIB, 0.0, 0)
    hold_to(run(use), use)


def test_slow_workers_do_not_keep_pages_that_the_arena_released() -> None:
    """Segments are closed while workers are busy elsewhere; their pages must go at once, not when workers look."""
    use = Use(tuple([30 * MIB, 41 * MIB, 52 * MIB, 63 * MIB, 20 * MIB] * 4), 4, 260 * MIB, 0.0, 0)
    hold_to(run(use), use)
