"""A loader's own figures, which are always collected.

In:  counters that iterators and engines update.
Out: ``LoaderStats``.
Runs in: trainer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.formatting import counted
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.cache.stats import CacheStats
    from penstock.loader.engine.engine import EngineGauges

_CRASHES = 16


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Time per stage, summed over workers (fetch, collate) or in the training process (wait, deliver)."""

    fetch_s: float
    """Seconds spent in the dataset, including the writing of rows."""
    collate_s: float
    wait_s: float
    """Seconds that the training loop waited in next()."""
    deliver_s: float
    """Seconds spent turning ready batches into the user's data."""


@dataclass(frozen=True, kw_only=True)
class LoaderStats:
    """A loader's gauges at one moment. Counters cover the loader's whole life; rates cover its latest iteration."""

    workers: int
    depth: int
    """The number of batches that may be ahead of the user now."""
    in_flight_bytes: int
    """Bytes of the arena's segments now: those being filled, ready, lent, or kept for reuse."""
    peak_in_flight_bytes: int
    lent_bytes: int
    """Bytes of the batches that the user holds and the arena lends."""
    copied_bytes: int
    """The total bytes of batches that became the user's own, because the user kept more batches than the arena can
    lend."""
    workers_private_bytes: int
    memory_bytes: int
    """The budget."""
    batches: int
    samples: int
    samples_per_s: float
    wait_s: float
    stall_fraction: float
    """The share of the latest iteration's time that the training loop spent waiting for data."""
    worker_restarts: int
    shared_batches: bool
    """Whether rows of one batch come from several workers."""
    cache: Any
    device_ahead_bytes: int
    """Bytes of device memory in batches copied ahead of the user; 0 without ``device=``."""
    stages: StageTimes

    def __str__(self) -> str:
        """The figures that show how well a loader works, one topic per line."""
        now, most, private, budget = map(
            format_bytes,
            (self.in_flight_bytes, self.peak_in_flight_bytes, self.workers_private_bytes, self.memory_bytes),
        )
        batches, samples = counted(self.batches, "batch", "batches"), counted(self.samples, "sample")
        rows = {
            "delivered": f"{batches}, {samples}, {self.samples_per_s:,.1f} samples/s",
            "waiting": f"{self.wait_s:.1f} s for data in all; {self.stall_fraction:.0%} of the latest iteration's time",
            "memory": f"{now} in batches (at most {most} so far) and {private} in workers, of a budget of {budget}",
            "workers": f"{self.workers}, up to {counted(self.depth, 'batch', 'batches')} ahead; "
            f"{counted(self.worker_restarts, 'restart')}",
        }
        if (cache := self.cache) is not None:
            held, limit = format_bytes(cache.bytes), format_bytes(cache.limit_bytes)
            rows["cache"] = f"{held} of {limit}, {counted(cache.items, 'item')}, {cache.hit_rate:.1%} hits"
        return "\n".join(f"{name:<10}{text}" for name, text in rows.items())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the text that a notebook shows."""
        printer.text(str(self))


@dataclass
class Counters:
    """The running totals from which the stats are made. The loader owns them; its iterators and engines update them."""

    clock: Callable[[], float] = time.perf_counter
    batches: int = 0
    samples: int = 0
    wait_s: float = 0.0
    fetch_s: float = 0.0
    collate_s: float = 0.0
    deliver_s: float = 0.0
    restarts: int = 0
    peak_bytes: int = 0
    copied_bytes: int = 0
    device_ahead_bytes: int = 0
    depth: int = 0
    shared_batches: bool = False
    began_s: float | None = None
    ended_s: float | None = None
    iteration_samples: int = 0
    iteration_wait_s: float = 0.0
    waits_since_s: float | None = None
    """Since when the training loop has been waiting for a batch; None if it is not waiting."""
    restarts_by_worker: dict[int, int] = field(default_factory=dict)
    crashes: deque[str] = field(default_factory=lambda: deque(maxlen=_CRASHES))
    """How the latest replaced workers had crashed."""

    def begin_iteration(self) -> None:
        self.began_s, self.ended_s = self.clock(), None
        self.iteration_samples, self.iteration_wait_s = 0, 0.0

    def end_iteration(self) -> None:
        self.ended_s = self.clock()

    def note_batch(self, samples: int) -> None:
        self.batches += 1
        self.samples += samples
        self.iteration_samples += samples

    def note_restart(self, worker_id: int, ending: str) -> None:
        self.restarts_by_worker[worker_id] = self.restarts_by_worker.get(worker_id, 0) + 1
        self.crashes.append(f"worker {worker_id} {ending}")
        self.restarts += 1

    def stats(
        self, gauges: list[EngineGauges], *, workers: int, memory_bytes: int, cache: CacheStats | None
    ) -> LoaderStats:
        """The loader's figures now. ``gauges``: those of its engines that are not closed, oldest first."""
        newest = gauges[-1] if gauges else None
        elapsed_s = self.iteration_s
        return LoaderStats(
            workers=workers,
            depth=newest.depth if newest else self.depth,
            in_flight_bytes=sum(each.in_flight_bytes for each in gauges),
            peak_in_flight_bytes=max([self.peak_bytes, *(each.peak_in_flight_bytes for each in gauges)]),
            lent_bytes=sum(each.lent_bytes for each in gauges),
            copied_bytes=self.copied_bytes + sum(each.copied_bytes for each in gauges),
            workers_private_bytes=sum(each.workers_private_bytes for each in gauges),
            memory_bytes=memory_bytes,
            batches=self.batches,
            samples=self.samples,
            samples_per_s=self.iteration_samples / elapsed_s if elapsed_s > 0 else 0.0,
            wait_s=self.wait_s,
            stall_fraction=min(1.0, self.iteration_wait_s / elapsed_s) if elapsed_s > 0 else 0.0,
            worker_restarts=self.restarts,
            shared_batches=newest.splits_batches if newest else self.shared_batches,
            cache=cache,
            device_ahead_bytes=self.device_ahead_bytes,
            stages=StageTimes(
                fetch_s=self.fetch_s, collate_s=self.collate_s, wait_s=self.wait_s, deliver_s=self.deliver_s
            ),
        )

    def note_engine_closed(self, last: EngineGauges) -> None:
        """Keep the gauges of an engine that closes, because the stats still need them."""
        self.peak_bytes = max(self.peak_bytes, last.peak_in_flight_bytes)
        self.copied_bytes += last.copied_bytes
        self.depth, self.shared_batches = last.depth, last.splits_batches

    def note_wait(self, seconds: float) -> None:
        self.wait_s += seconds
        self.iteration_wait_s += seconds

    @property
    def iteration_s(self) -> float:
        if self.began_s is None:
            return 0.0
        return (self.ended_s or self.clock()) - self.began_s
