"""Timed runs of a loader whose memory is split into components.

In:  a dataset, ``LoadSettings``, and the memory that was in use before any loader.
Out: ``MemoryRun``: a ``Reading`` by component, and the times of the run.
Runs in: a child of the command line, and workers that this child starts and ends.
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
"""Three figures for a pause of the training loop: how often memory is read, how long it must stay constant, and by how
much it may vary in that time."""
_SLOWER = 1.5
"""A batch may take this many times its usual time."""
_MOST_TIMES = 8
"""A run of slow batches lasts up to this many times the planned time, until it has ``_LEAST_BATCHES`` batches."""


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """The settings of both loaders; depth, budget and cache are for penstock's loader only."""

    batch_size: int
    workers: int
    depth: int | None = None
    """The total number of batches ahead; None if the loader chooses it."""
    prefetch_factor: int | None = None
    memory: str | int | float = "auto"
    pin_memory: bool = False
    cache: str | int | float | None = None

    def other_batch(self) -> LoadSettings:
        """The settings with another batch size to compare with. It is smaller, so that it takes no more memory than the
        requested batch size."""
        return replace(self, batch_size=self.batch_size // 2 if self.batch_size > 1 else 2)

    def other_workers(self) -> LoadSettings:
        """The settings with another number of workers to compare with."""
        return replace(self, workers=self.workers // 2 if self.workers > 1 else self.workers + 1)


@dataclass(frozen=True, kw_only=True)
class MemoryRun:
    """The result of a short run of one loader with one configuration."""

    reading: Reading
    batches: int
    """The number of batches without the first batch, whose time does not count either."""
    wait_s: float
    """In next()."""
    step_s: float
    """The time in the training step; 0 without a step."""
    first_batch_s: float
    stats: LoaderStats | None = None
    """The statistics of penstock's loader at the end of the run; None for torch's loader."""
    budget_bytes: int | None = None
    """The budget of penstock's loader."""
    gpu_use: float | None = None
    """The share of the time in which the GPU computed; None without a training step or a GPU, or if it is unknown."""

    @property
    def samples_per_s(self) -> float:
        """The samples per second that the loader delivers to a loop without a training step."""
        return self.batches * self.reading.batch_size / max(1e-9, self.wait_s)


@dataclass(frozen=True, kw_only=True)
class MemoryBench:
    """The dataset to measure, and the way to measure it."""

    dataset: Any
    collate_fn: Callable[[Any], Any] | None
    before: Mapping[str, int]
    """Part -> bytes that were in memory before any loader."""
    seconds: float
    """The seconds that a run takes."""
    on_batch: Callable[[], None]
    """A function that is called after every batch. An exception from this function ends the measurement."""

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
            # Only the largest batch counts.
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
            # The time until the first batch does not count as waiting.
            first = run.measure(lambda timing: False)
            timing = run.measure(goes_on)
            gpus.close()
            # torch's workers each build a whole batch at the same time.
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
        """Take no batch until all batches ahead are ready, and return the memory at that moment. The loader holds this
        much memory while a checkpoint is written, for example. The figure is the same in every run, unlike the memory
        while workers build batches.

        ``batch_s`` is about the time that a worker is busy before it delivers anything.
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
        # Bytes of the batch that are not in shared memory are in the heap.
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
