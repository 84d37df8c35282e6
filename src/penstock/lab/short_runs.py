"""A loader that runs for a moment, and what it takes meanwhile.

In:  a loader, a few seconds.
Out: ``Run``, one for each stretch.
Runs in: trainer.
"""

from __future__ import annotations

import contextlib
import gc
import time
from types import TracebackType
from typing import Any, Self

import psutil

from penstock.lab.dataset.endless import endless
from penstock.loader.dataloader import DataLoader
from penstock.loader.stats import StageTimes
from penstock.loader.workers_now import workers_now
from penstock.meter import Watcher, tree_parts
from penstock.planner.costs import Run

_WARM_SHARE, _MOST_WARM_SHARE = 0.2, 0.6
"""Of a stretch's time, what goes by before the clock runs; more, while workers are still coming up."""


class ShortRuns:
    """One iteration of a loader, in stretches; what changes between them is changed from outside."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._rows = getattr(loader, "batch_size", 1) or 1
        self._me = psutil.Process()

    def __enter__(self) -> Self:
        gc.collect()
        self._watch = Watcher(tree_parts, measures=["shared_bytes", "heap_bytes"], every_s=0.03).__enter__()
        self._stream = endless(self._loader)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.__exit__(kind, error, trace)
        self._stream.close()
        # Workers that persist go with their loader: the next run must find none.
        del self._stream, self._loader

    def go(self, seconds: float) -> Run:
        """Take batches for about so long. The clock runs from when workers have come up: starting takes as much of the
        processor as many samples do."""
        watch = self._watch
        watch.forget_peaks()
        began_s = time.perf_counter()
        next(self._stream)
        first_s = time.perf_counter() - began_s
        while (warm_s := time.perf_counter() - began_s) < _WARM_SHARE * seconds or (
            warm_s < _MOST_WARM_SHARE * seconds and not self._are_all_at_work()
        ):
            next(self._stream)
        then_s, before_s, cpu_s = time.perf_counter(), self._workers_cpu_s(), time.process_time() - watch.cpu_s
        before = self._stages()
        heaps: list[tuple[int, int]] = []
        while not heaps or time.perf_counter() - then_s < (1 - _WARM_SHARE) * seconds:
            next(self._stream)
            heaps.append((len(heaps), watch.growth("heap_bytes") or 0))
        after = self._stages()
        return Run(
            workers=self._workers(),
            rows=self._rows,
            batches=len(heaps),
            seconds=time.perf_counter() - then_s,
            first_batch_s=first_s,
            workers_cpu_s=sum(cpu_s - before_s.get(pid, 0.0) for pid, cpu_s in self._workers_cpu_s().items()),
            trainer_cpu_s=max(0.0, time.process_time() - watch.cpu_s - cpu_s),
            deliver_s=after.deliver_s - before.deliver_s if before and after else None,
            collate_s=after.collate_s - before.collate_s if before and after else 0.0,
            shared_bytes=watch.peak_growth("shared_bytes") or 0,
            own_bytes=watch.peak_growth("heap_bytes") or 0,
            heaps=tuple(heaps),
        )

    def _are_all_at_work(self) -> bool:
        if not isinstance(self._loader, DataLoader):
            return True
        at_work = sum(worker.samples > 0 and not worker.leaving for worker in workers_now(self._loader))
        return at_work >= self._workers()

    def _workers(self) -> int:
        return int(self._loader.stats().workers if isinstance(self._loader, DataLoader) else self._loader.num_workers)

    def _stages(self) -> StageTimes | None:
        return self._loader.stats().stages if isinstance(self._loader, DataLoader) else None

    def _workers_cpu_s(self) -> dict[int, float]:
        """Of each that is there."""
        found = {}
        for child in self._me.children():
            with contextlib.suppress(psutil.Error):
                times = child.cpu_times()
                found[child.pid] = times.user + times.system
        return found
