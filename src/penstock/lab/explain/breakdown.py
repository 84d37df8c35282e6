"""Timed runs of a loader whose memory is split into components.

In:  a dataset, ``LoadSettings``, what was in memory before.
Out: ``MemoryRun``: a ``Reading`` by component, and the times of the run.
Runs in: a child of the command line, and workers it starts and ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import psutil
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from penstock.lab.dataset.sample_probe import weigh
from penstock.lab.timed_run import TimedRun, Timing, endless_arguments, without_warnings
from penstock.loader.dataloader import DataLoader
from penstock.loader.stats import LoaderStats
from penstock.meter import TreeParts, Watcher, gpu_use, require_tree_parts
from penstock.planner.components import Reading

_LEAST_BATCHES = 4
_PAUSE_S, _STILL_S, _STILL_BYTES = 0.12, 0.36, 256 << 10
"""While the loop pauses: how often memory is compared, for how long it must be constant, and by how much it may
vary."""
_SLOWER = 1.5
"""How many times as long as usual a batch may take."""
_MOST_TIMES = 8
"""A run of slow batches lasts for up to this many times its length, until it has ``_LEAST_BATCHES``."""


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """The settings of both loaders; depth, budget and cache are penstock's alone."""

    batch_size: int
    workers: int
    depth: int | None = None
    """Batches ahead in all; None: the loader's own."""
    prefetch_factor: int | None = None
    memory: str | int | float = "auto"
    pin_memory: bool = False
    cache: str | int | float | None = None

    def other_batch(self) -> LoadSettings:
        """Another batch size to compare with: a smaller one, which cannot take more memory than the requested one."""
        return replace(self, batch_size=self.batch_size // 2 if self.batch_size > 1 else 2)

    def other_workers(self) -> LoadSettings:
        """Another number of workers to compare with."""
        return replace(self, workers=self.workers // 2 if self.workers > 1 else self.workers + 1)


@dataclass(frozen=True, kw_only=True)
class MemoryRun:
    """A short run of one loader with one configuration."""

    reading: Reading
    batches: int
    """Without the first one, whose time does not count either."""
    wait_s: float
    """In next()."""
    step_s: float
    """In the training step; 0 without one."""
    first_batch_s: float
    stats: LoaderStats | None = None
    """Gauges of penstock's loader at the end; None for torch's."""
    budget_bytes: int | None = None
    """The budget of penstock's loader."""
    gpu_use: float | None = None
    """Share of the time in which the GPU computed; None: without a training step, without a GPU, or not known."""

    @property
    def samples_per_s(self) -> float:
        """Samples per second delivered to a loop without a training step."""
        return self.batches * self.reading.batch_size / max(1e-9, self.wait_s)


@dataclass(frozen=True, kw_only=True)
class MemoryBench:
    """What is measured, and how."""

    dataset: Any
    collate_fn: Callable[[Any], Any] | None
    before: Mapping[str, int]
    """Part -> bytes of what was in memory before any loader."""
    seconds: float
    """Length of a run."""
    on_batch: Callable[[], None]
    """Called after every batch; an exception from it ends the measurement."""

    def ours(self, settings: LoadSettings, step: Callable[[Any], object] | None = None) -> MemoryRun:
        given: dict[str, Any] = {} if settings.cache is None else {"cache": settings.cache}
        with (
            without_warnings(),
            DataLoader(self.dataset, memory=settings.memory, **self._given(settings), **given) as loader,
        ):
            if settings.depth is not None:
                loader.resize(depth=settings.depth)
            run = self._run(loader, settings, step)
            return replace(run, stats=loader.stats(), budget_bytes=loader.memory_bytes)

    def torchs(self, settings: LoadSettings) -> MemoryRun:
        with without_warnings():
            return self._run(TorchDataLoader(self.dataset, **self._given(settings)), settings, None)

    def _given(self, settings: LoadSettings) -> dict[str, Any]:
        given: dict[str, Any] = {
            "batch_size": settings.batch_size,
            "num_workers": settings.workers,
            "collate_fn": self.collate_fn,
            "pin_memory": settings.pin_memory,
            **endless_arguments(self.dataset),
        }
        if settings.workers:
            given |= {"prefetch_factor": settings.prefetch_factor, "persistent_workers": True}
        if isinstance(self.dataset, IterableDataset):
            given["drop_last"] = False
        return given

    def _run(self, loader: Iterable[Any], settings: LoadSettings, step: Callable[[Any], object] | None) -> MemoryRun:
        files_bytes = _page_cache_bytes()
        batch_bytes = 0

        def note_size(batch: Any) -> None:
            nonlocal batch_bytes
            # The largest one counts.
            batch_bytes = max(batch_bytes, weigh(batch))
            if step is not None:
                step(batch)

        def goes_on(timing: Timing) -> bool:
            lasted_s = timing.elapsed_s + first.elapsed_s
            return lasted_s <= self.seconds or (
                timing.batches < _LEAST_BATCHES and lasted_s <= _MOST_TIMES * self.seconds
            )

        with (
            TimedRun(
                loader, require_tree_parts, measures=["total_bytes"], every_s=0.04, step=note_size,
                on_batch=self.on_batch,
            ) as run,
            ExitStack() as gpus,
        ):  # fmt: skip
            gpu = None
            if step is not None:
                gpu = gpus.enter_context(Watcher(gpu_use, measures=["fraction"], every_s=0.1))
            # The time to start does not count as waiting.
            first = run.measure(lambda timing: False)
            timing = run.measure(goes_on)
            gpus.close()
            # Each of torch's workers builds a whole batch at the same time.
            settled = self._pause(max(1, settings.workers) * timing.elapsed_s / timing.batches)
        return MemoryRun(
            reading=self._reading(run.watch, settled, settings, batch_bytes, files_bytes),
            batches=timing.batches,
            wait_s=timing.wait_s,
            step_s=timing.step_s if step is not None else 0.0,
            first_batch_s=first.first_batch_s,
            gpu_use=None if gpu is None else gpu.mean("fraction"),
        )

    def _pause(self, batch_s: float) -> TreeParts:
        """Take no batch until all batches ahead are ready, and return the memory at that moment. The loader holds as
        much while a checkpoint is written. The figure is the same in every run; while workers build batches it varies.

        ``batch_s``: about how long a worker is busy before it delivers anything.
        """
        settled, since_s, end_s = require_tree_parts(), time.monotonic(), time.monotonic() + _MOST_TIMES * self.seconds
        still_s = max(_STILL_S, _SLOWER * batch_s)
        while (now_s := time.monotonic()) < end_s and now_s - since_s < still_s:
            time.sleep(_PAUSE_S)
            self.on_batch()
            before, settled = settled, require_tree_parts()
            if abs(settled.total_bytes - before.total_bytes) > _STILL_BYTES:
                since_s = time.monotonic()
        return settled

    def _reading(
        self,
        watch: Watcher[TreeParts],
        settled: TreeParts,
        settings: LoadSettings,
        batch_bytes: int,
        files_bytes: int | None,
    ) -> Reading:
        start = watch.start
        shared = max(0, settled.shared_bytes - start.shared_bytes)
        # The part of the batch that is not in shared memory is in the heap.
        in_heap = max(0, batch_bytes - shared)
        now = _page_cache_bytes()
        return Reading(
            batch_size=settings.batch_size,
            workers=settings.workers,
            parts={
                **self.before,
                "batch": batch_bytes,
                "buffers": max(0, shared - batch_bytes),
                "workers": settled.workers_bytes,
                "other": max(0, settled.trainer_bytes - start.trainer_bytes - in_heap),
            },
            building_bytes=max(0, watch.peak("total_bytes").total_bytes - settled.total_bytes),
            page_cache_bytes=None if now is None or files_bytes is None else max(0, now - files_bytes),
        )


def _page_cache_bytes() -> int | None:
    now = psutil.virtual_memory()
    return now.cached - now.shared if hasattr(now, "cached") and hasattr(now, "shared") else None
