"""DataLoader: torch's, with memory bounded in bytes.

In:  everything torch.utils.data.DataLoader takes, and a budget.
Out: an iterable of batches.
Runs in: trainer.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Self, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, Sampler

from penstock.errors import ConfigError
from penstock.loader.iterators import InlineIterator, PipelineIterator, depth_ceiling
from penstock.loader.stats import Counters, LoaderStats, StageTimes
from penstock.loader.tuning import Tuning
from penstock.meter import headroom_bytes
from penstock.units import parse_size

_T_co = TypeVar("_T_co", covariant=True)


class DataLoader(TorchDataLoader[_T_co]):
    """A drop-in for :class:`torch.utils.data.DataLoader` whose memory is bounded in bytes.

    All of torch's arguments keep their meaning and order. Further ones:

    Args:
        memory: what the batches in flight and the workers' private memory may take together: ``"8GB"``, bytes, a
            fraction of what is available, or ``"auto"`` (half of it, divided among the ranks of the node).
        seeding: ``"batch"`` makes randomness depend on seed, epoch, rank and place in the epoch only, so that
            batches are the same for any number of workers; ``"worker"`` is torch's own assignment.
        backend: ``"process"``, ``"thread"``, or None for the platform's best.
        name: what monitors call this loader.
    """

    _tuning = Tuning()

    def __init__(
        self,
        dataset: Dataset[_T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        memory: str | int | float = "auto",
        seeding: str = "batch",
        backend: str | None = None,
        name: str | None = None,
    ) -> None:
        if seeding not in ("batch", "worker"):
            raise ConfigError(f'seeding={seeding!r} is unknown; write "batch" or "worker"')
        if backend not in (None, "process", "thread"):
            raise ConfigError(f'backend={backend!r} is unknown; write "process", "thread", or leave it out')
        self._memory = parse_size(memory)
        self._depth: int | None = None
        self._depth_ceiling = depth_ceiling(num_workers, prefetch_factor)
        self._counters = Counters()
        self._live: weakref.WeakSet[PipelineIterator] = weakref.WeakSet()
        self.memory = memory
        self.seeding = seeding
        self.backend = backend
        self.name = name
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        if self._runs_threads and num_workers > 1 and isinstance(dataset, IterableDataset):
            raise ConfigError(
                f"{num_workers} threads would each read all of an iterable dataset, which cannot tell them apart; use "
                'num_workers=1 or backend="process"'
            )

    def _get_iterator(self) -> Any:
        if self.num_workers == 0:
            return InlineIterator(self)
        self.check_worker_number_rationality()
        iterator = PipelineIterator(self)
        self._live.add(iterator)
        return iterator

    @property
    def _runs_threads(self) -> bool:
        return self.backend == "thread" or (self.backend is None and sys.platform == "win32")

    @property
    def memory_bytes(self) -> int:
        """The budget in bytes on this machine, now."""
        ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
        if self._memory.fixed_bytes is not None:
            return self._memory.fixed_bytes
        return max(1, self._memory.resolve(headroom_bytes(), auto_fraction=self._tuning.auto_memory) // ranks)

    def stats(self) -> LoaderStats:
        """The loader's gauges now."""
        counters = self._counters
        engines = [i._engine for i in self._live if not i._engine.is_closed]
        peak = max([counters.peak_bytes, *(e.arena.peak_bytes for e in engines)])
        newest = engines[-1] if engines else None
        elapsed_s = counters.iteration_s
        return LoaderStats(
            workers=self.num_workers,
            depth=newest.dispatcher.depth if newest else counters.depth,
            in_flight_bytes=sum(e.arena.in_use_bytes + e.arena.free_bytes for e in engines),
            peak_in_flight_bytes=peak,
            lent_bytes=sum(e.arena.lent_bytes for e in engines),
            copied_bytes=counters.handed_over_bytes + sum(e.arena.handed_over_bytes for e in engines),
            workers_private_bytes=sum(e.private_bytes for e in engines),
            memory_bytes=newest.memory_bytes if newest else self.memory_bytes,
            batches=counters.batches,
            samples=counters.samples,
            samples_per_s=counters.iteration_samples / elapsed_s if elapsed_s > 0 else 0.0,
            wait_s=counters.wait_s,
            stall_fraction=min(1.0, counters.iteration_wait_s / elapsed_s) if elapsed_s > 0 else 0.0,
            worker_restarts=counters.restarts,
            shared_batches=newest.dispatcher.shared_batches if newest else counters.shared_batches,
            cache=None,
            stages=StageTimes(
                fetch_s=counters.fetch_s,
                collate_s=counters.collate_s,
                wait_s=counters.wait_s,
                deliver_s=counters.deliver_s,
            ),
        )

    def close(self) -> None:
        """Stop all workers and give back all memory but that of batches still held. May be called twice."""
        for iterator in list(self._live):
            iterator.close()
        self._iterator = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickles and copies are loaders of their own: nothing that runs goes with them."""
        return {**self.__dict__, "_iterator": None, "_live": None, "_counters": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _live=weakref.WeakSet(), _counters=Counters())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
