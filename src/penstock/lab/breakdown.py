"""Short runs of a loader whose memory is taken apart.

In:  a dataset, ``LoadSettings``, what was in memory before.
Out: ``Run``: a ``Reading`` by component, and what the run was like.
Runs in: trainer, and workers it starts and ends.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psutil
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from penstock.lab.dataset.endless import endless, endless_arguments
from penstock.lab.dataset.sample_probe import weigh
from penstock.loader.dataloader import DataLoader
from penstock.loader.stats import LoaderStats
from penstock.meter import TreeParts, Watcher, gpu_use, require_tree_parts
from penstock.planner.components import Reading

_LEAST_BATCHES = 4
_PAUSE_S, _STILL_S, _STILL_BYTES = 0.12, 0.36, 256 << 10
"""How often memory is compared while the loop pauses, for how long it must stand still, and what that means."""
_SLOWER = 1.5
"""How many times as long as usual a batch may take."""
_MOST_TIMES = 8
"""A run of slow batches goes on for this many times what it was given, to see ``_LEAST_BATCHES``."""


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """What both loaders are given; depth, budget and cache go to ours alone."""

    batch_size: int
    workers: int
    depth: int | None = None
    """Batches ahead in all; None: the loader's own."""
    prefetch_factor: int | None = None
    memory: str | int | float = "auto"
    pin_memory: bool = False
    cache: str | int | float | None = None

    def other_batch(self) -> LoadSettings:
        """A batch size to compare with: the smaller one, which cannot take more than was asked for."""
        return replace(self, batch_size=self.batch_size // 2 if self.batch_size > 1 else 2)

    def other_workers(self) -> LoadSettings:
        """A number of workers to compare with."""
        return replace(self, workers=self.workers // 2 if self.workers > 1 else self.workers + 1)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One loader with one configuration, for a moment."""

    reading: Reading
    batches: int
    wait_s: float
    """In next(), the first batch left out."""
    step_s: float
    """In the training step, the first batch left out."""
    first_batch_s: float
    stats: LoaderStats | None = None
    """Gauges of our loader at the end; None for torch's."""
    budget_bytes: int | None = None
    """What our loader may take."""
    gpu_use: float | None = None
    """Share of the time in which the GPU computed; None: without a training step, without a GPU, or not known."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is measured, and how."""

    dataset: Any
    collate_fn: Callable[[Any], Any] | None
    before: Mapping[str, int]
    """Part -> bytes of what was in memory before any loader."""
    seconds: float
    """Length of a run."""
    on_batch: Callable[[], None]
    """Hears of every batch; may raise to end it all."""

    def ours(self, settings: LoadSettings, step: Callable[[Any], object] | None = None) -> Run:
        given: dict[str, Any] = {} if settings.cache is None else {"cache": settings.cache}
        with _quiet(), DataLoader(self.dataset, memory=settings.memory, **self._given(settings), **given) as loader:
            if settings.depth is not None:
                loader.resize(depth=settings.depth)
            run = self._run(loader, settings, step)
            return replace(run, stats=loader.stats(), budget_bytes=loader.memory_bytes)

    def torchs(self, settings: LoadSettings) -> Run:
        with _quiet():
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

    def _run(self, loader: Iterable[Any], settings: LoadSettings, step: Callable[[Any], object] | None) -> Run:
        gc.collect()
        files_bytes = _page_cache_bytes()
        batches, batch_bytes, wait_s, step_s, first_s = 0, 0, 0.0, 0.0, 0.0
        with Watcher(require_tree_parts, measures=["total_bytes"], every_s=0.04) as watch, ExitStack() as gpus:
            gpu = None
            if step is not None:
                gpu = gpus.enter_context(Watcher(gpu_use, measures=["fraction"], every_s=0.1))
            began_s = asked_s = time.perf_counter()
            stream = endless(loader)
            for batch in stream:
                came_s = time.perf_counter()
                # The loop holds one batch while the next is built, as training loops do: the largest one counts.
                batch_bytes = max(batch_bytes, weigh(batch))
                if step is not None:
                    step(batch)
                done_s = time.perf_counter()
                if first_s:
                    batches += 1
                    wait_s += came_s - asked_s
                    step_s += done_s - came_s if step is not None else 0.0
                else:
                    # Starting is no part of waiting.
                    first_s = came_s - began_s
                self.on_batch()
                elapsed_s = done_s - began_s
                if elapsed_s > self.seconds and (batches >= _LEAST_BATCHES or elapsed_s > _MOST_TIMES * self.seconds):
                    break
                asked_s = time.perf_counter()
            gpus.close()
            # A worker of torch's builds all of a batch, and the others theirs meanwhile.
            settled = self._pause(
                max(1, settings.workers) * (time.perf_counter() - began_s - first_s) / max(1, batches)
            )
            stream.close()
        del stream
        gc.collect()
        return Run(
            reading=self._reading(watch, settled, settings, batch_bytes, files_bytes),
            batches=batches,
            wait_s=wait_s,
            step_s=step_s,
            first_batch_s=first_s,
            gpu_use=None if gpu is None else gpu.mean("fraction"),
        )

    def _pause(self, batch_s: float) -> TreeParts:
        """Take nothing until all that may be ahead is, and say what there is then: memory must do when a checkpoint is
        written, too. And it is the same every time, which no moment is in which workers build batches.

        ``batch_s``: about how long a worker is busy without giving anything.
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
        # What of the batch is not in shared memory is in the heap.
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


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's words on settings that were asked for on purpose, and on pinning without a GPU."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*pin_memory", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
        yield
