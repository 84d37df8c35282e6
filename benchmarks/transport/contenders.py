"""The loaders that are compared, each in the modes that could be its best for samples in memory.

In:  sources, a number of workers.
Out: an endless iterator of batches in order, and the slots and depth that the loader reports.
Runs in: the measured child.

All deliver the same contiguous float32 batches, in order, made of single samples, with the same number of workers
(threads or processes), and where the library allows it 2 batches ahead per worker, torch's default.
"""

# The other libraries are an extra (`pip install -e .[bench]`); types are checked without them.
# pyright: reportMissingImports=false
from __future__ import annotations

import functools
import importlib.util
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from transport.sources import ENDLESS, DealtRows, Rows, Sources

AHEAD = 2
"""Batches ahead per worker: torch's default prefetch_factor, for every loader that has such an argument."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A running loader."""

    batches: Iterator[Any]
    facts: Callable[[], dict[str, Any]]
    """Returns slots and depth; called after the timed pass."""


Open = Callable[[Sources, int], AbstractContextManager[Opened]]


@contextmanager
def torch_loader(sources: Sources, workers: int) -> Iterator[Opened]:
    """torch.utils.data.DataLoader with its defaults: workers collate into shared memory."""
    from torch.utils.data import DataLoader

    batches = iter(DataLoader(sources, batch_size=sources.case.rows, num_workers=workers))
    yield Opened(batches=batches, facts=lambda: {"depth": AHEAD * workers})


@contextmanager
def penstock_loader(sources: Sources, workers: int) -> Iterator[Opened]:
    """penstock.DataLoader with its defaults: its own depth, the default budget."""
    import penstock

    with penstock.DataLoader(sources, batch_size=sources.case.rows, num_workers=workers) as loader:

        def facts() -> dict[str, Any]:
            stats = loader.stats()
            return {
                "depth": stats.depth,
                "slots": round(stats.peak_in_flight_bytes / sources.case.batch_bytes, 1),
                "peak_in_flight_bytes": stats.peak_in_flight_bytes,
                "copied_bytes": stats.copied_bytes,
                "memory_bytes": stats.memory_bytes,
                "shared_batches": stats.shared_batches,
                "worker_restarts": stats.worker_restarts,
            }

        yield Opened(batches=iter(loader), facts=facts)


@contextmanager
def spdl_threads(sources: Sources, workers: int, *, numpy: bool) -> Iterator[Opened]:
    """SPDL as its guide begins: threads in the training process, without transport."""
    from spdl.pipeline import PipelineBuilder

    pipeline = (
        PipelineBuilder()
        .add_source(range(ENDLESS))
        .pipe(sources.array_batch if numpy else sources.tensor_batch, concurrency=workers, output_order="input")
        .add_sink(AHEAD * workers)
        .build(num_threads=workers)
    )
    with pipeline.auto_stop():
        yield Opened(batches=iter(pipeline), facts=lambda: {"depth": AHEAD * workers})


@contextmanager
def spdl_arena(sources: Sources, workers: int, *, processes: int) -> Iterator[Opened]:
    """SPDL's pipeline in a subprocess, batches through its pool of reused segments, viewed without a copy.

    Its guide shows one subprocess with all threads. A user with free cores would start one subprocess per worker and
    take batches from each in turn.
    """
    from spdl.pipeline import PipelineBuilder, SharedMemorySegmentPool, run_pipeline_in_subprocess

    threads = workers // processes
    slots = AHEAD * threads + 2  # Those ahead, one being written, one held by the user.
    parts: list[Any] = []
    for number in range(processes):
        config = (
            PipelineBuilder()
            .add_source(range(number, ENDLESS, processes))
            .pipe(sources.array_batch, concurrency=threads, output_order="input")
            .add_sink(1)
            .get_config()
        )
        parts.append(
            run_pipeline_in_subprocess(
                config,
                num_threads=threads,
                buffer_size=AHEAD * threads,
                # Forked like the workers of torch and penstock, so that samples are shared and not made again.
                mp_context="fork",
                arena=SharedMemorySegmentPool(sources.case.batch_bytes + 4096, slots),
            )
        )
    iterators = [iter(part) for part in parts]
    batches = (next(iterator) for iterator in itertools.cycle(iterators))
    yield Opened(batches=batches, facts=lambda: {"depth": AHEAD * workers, "slots": slots * processes})


@contextmanager
def torchdata_nodes(sources: Sources, workers: int, *, method: Any) -> Iterator[Opened]:
    """torchdata.nodes: ParallelMapper over batch numbers, stacking inside the worker."""
    from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

    node = ParallelMapper(
        IterableWrapper(range(ENDLESS)),
        sources.tensor_batch,
        num_workers=workers,
        method=method,
        multiprocessing_context="fork" if method == "process" else None,
        snapshot_frequency=1 << 20,
    )
    yield Opened(batches=iter(Loader(node)), facts=lambda: {"depth": AHEAD * workers})


@contextmanager
def grain_threads(sources: Sources, workers: int) -> Iterator[Opened]:
    """Grain's reading threads, which also batch."""
    import grain

    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=AHEAD * workers)
    dataset = grain.MapDataset.source(Rows(sources)).batch(sources.case.rows).to_iter_dataset(options)
    yield Opened(batches=iter(dataset), facts=lambda: {"depth": AHEAD * workers})


@contextmanager
def grain_processes(sources: Sources, workers: int) -> Iterator[Opened]:
    """Grain's worker processes, batching straight into a fresh shared-memory block per batch.

    There are no reading threads inside a worker, as Grain recommends for data in memory. Only batching that follows
    ``to_iter_dataset`` writes to shared memory; Grain then distributes single samples among the workers, so
    the samples are ordered such that the batches are the same as those of the other loaders.
    """
    import grain

    dataset = (
        grain.MapDataset.source(DealtRows(sources, workers))
        .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        .batch(sources.case.rows)
        .mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=AHEAD))
    )
    batches = iter(dataset)
    try:
        yield Opened(batches=batches, facts=lambda: {"depth": AHEAD * workers})
    finally:
        # Grain removes unread blocks from /dev/shm only if it is closed.
        batches.close()


@contextmanager
def copy_ceiling(sources: Sources, workers: int) -> Iterator[Opened]:
    """Not a loader: threads copy samples into a few reused buffers, as fast as this machine's memory allows.

    Its buffers are not shared with another process, and a user could not hold them.
    """
    ahead = AHEAD * workers
    buffers = [np.zeros((sources.case.rows, *sources.case.shape), np.float32) for _ in range(ahead + 2)]

    def fill(batch: int) -> np.ndarray:
        buffer = buffers[batch % len(buffers)]
        for row, index in enumerate(sources.indices(batch)):
            buffer[row] = sources.array[index % len(sources.array)]
        return buffer

    def filled(pool: ThreadPoolExecutor) -> Iterator[np.ndarray]:
        under_way = deque(pool.submit(fill, batch) for batch in range(ahead))
        for batch in itertools.count(ahead):
            buffer = under_way.popleft().result()
            under_way.append(pool.submit(fill, batch))
            yield buffer

    with ThreadPoolExecutor(workers) as pool:
        yield Opened(batches=filled(pool), facts=lambda: {"depth": ahead, "slots": len(buffers)})


CEILING = "(copy ceiling)"
CONTENDERS: dict[str, dict[str, Open]] = {
    "penstock": {"processes": penstock_loader},
    "torch": {"processes": torch_loader},
    CEILING: {"threads": copy_ceiling},
    "SPDL": {
        "threads, np.stack": functools.partial(spdl_threads, numpy=True),
        "threads, torch.stack": functools.partial(spdl_threads, numpy=False),
        "subprocess + arena": functools.partial(spdl_arena, processes=1),
        "2 subprocesses + arenas": functools.partial(spdl_arena, processes=2),
    },
    "torchdata.nodes": {
        "threads": functools.partial(torchdata_nodes, method="thread"),
        "processes": functools.partial(torchdata_nodes, method="process"),
    },
    "Grain": {
        "threads": grain_threads,
        "processes": grain_processes,
    },
}
"""Library -> its modes. The report uses the mode with the best median."""

_PACKAGES = {"SPDL": "spdl", "torchdata.nodes": "torchdata", "Grain": "grain"}


def missing() -> list[str]:
    """The libraries that are not installed here."""
    return [name for name, package in _PACKAGES.items() if importlib.util.find_spec(package) is None]


def isolates_python(mode: str) -> bool:
    """Whether the mode's samples are made outside the training process, away from its interpreter lock."""
    return not mode.startswith("threads")
