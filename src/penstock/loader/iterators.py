"""Iterators over a DataLoader: with workers, and without.

In:  a DataLoader; its sampler's indices, drawn in the training thread only.
Out: batches.
Runs in: trainer.

Both build on torch's own base iterator, so that the base seed, the sampler, warnings and pinning are torch's.
"""

from __future__ import annotations

import functools
import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data._utils import pin_memory as torch_pinning
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _sharding_worker_init_fn,
    _SingleProcessDataLoaderIter,
)

from penstock.errors import WorkerError
from penstock.loader.batch import Batch
from penstock.loader.diagnosis import OomWatch
from penstock.loader.dispatch import Order
from penstock.loader.engine import Engine, TimedOut
from penstock.meter import headroom_bytes
from penstock.workers.pool import ProcessPool, ThreadPool
from penstock.workers.seeds import KeptGenerators, batch_seed, seed_collate, seed_stretch, stretch_rows
from penstock.workers.worker import Setup, can_split

if TYPE_CHECKING:
    from penstock.loader.dataloader import DataLoader

_LEAST_DRAWN_AHEAD = 16
"""Batches of indices drawn ahead of need, whatever the depth: it may change, the sampler's draws may not."""


class PipelineIterator(_BaseDataLoaderIter):
    """Iterates with workers."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self._loader = loader
        self._counters = loader._counters
        self._epoch = 0
        self._in_order = loader.in_order
        init_fn = loader.worker_init_fn
        if isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
            init_fn = functools.partial(_sharding_worker_init_fn, init_fn, self._world_size, self._rank)
        setup = Setup(
            dataset=self._dataset,
            collate_fn=self._collate_fn,
            auto_collation=self._auto_collation,
            drop_last=self._drop_last,
            batch_rows=(loader.batch_size or 1) if self._auto_collation else 1,
            keeps_generators=loader.seeding == "worker",
        )
        if loader._runs_threads:
            pool = ThreadPool(setup)
        else:
            pool = ProcessPool(
                setup,
                context=loader.multiprocessing_context or torch.multiprocessing.get_context(),
                base_seed=int(self._base_seed),
                shared_seed=_as_int(self._shared_seed),
                init_fn=init_fn,
            )
        bound = setup.is_iterable or loader.seeding == "worker"
        self._seed = int(self._base_seed)
        self._seeds_batches = pool.seeds_globally and not bound
        self._splittable = not bound and self._auto_collation and can_split(self._dataset)
        self._engine = Engine(
            pool=pool,
            workers=self._num_workers,
            order=Order(
                rows=setup.writes_rows,
                splittable=self._splittable,
                bound=bound,
                keeps_generators=setup.keeps_generators and not setup.is_iterable,
                in_order=loader.in_order,
                batch_rows=(loader.batch_size or 1) if self._auto_collation else 1,
            ),
            memory_bytes=loader.memory_bytes,
            headroom_bytes=headroom_bytes,
            diagnosis=OomWatch().sentence,
            tuning=loader._tuning,
            counters=self._counters,
            depth=loader._depth,
            depth_ceiling=loader._depth_ceiling,
        )
        self._finalizer = weakref.finalize(self, self._engine.close)
        self._begin_epoch()
        self._engine.start()

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self._epoch += 1
        self._engine.restart(_as_int(self._shared_seed))
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._drawn = 0
        self._sampler_done = False
        self._exhausted = False
        self._counters.begin_iteration()
        for _ in range(self._draw_ahead):
            self._draw()

    @property
    def _draw_ahead(self) -> int:
        depth = self._loader._depth or 0
        return max(_LEAST_DRAWN_AHEAD, 2 * self._num_workers, depth + 1)

    def _draw(self) -> None:
        """Draw one more batch of indices, here in the training thread: samplers may use the global generators."""
        if self._sampler_done:
            return
        indices: Any = None
        failure: BaseException | None = None
        try:
            indices = self._next_index()
        except StopIteration:
            self._sampler_done = True
            return
        except Exception as error:
            failure = error
            self._sampler_done = True
        rows = 1
        if self._auto_collation and failure is None:
            if self._splittable and not isinstance(indices, list):
                indices = list(indices)
            rows = len(indices)
        seed = None
        if self._seeds_batches:
            seed = batch_seed(self._seed, rank=self._rank, epoch=self._epoch, batch=self._drawn)
        self._engine.offer(Batch(self._drawn, indices, rows, seed, failure=failure))
        self._drawn += 1

    def __next__(self) -> Any:
        # torch's way round costs as much as a small batch; it matters to profilers and iterable datasets only.
        if torch.autograd._profiler_enabled() or self._dataset_kind == _DatasetKind.Iterable:  # type: ignore[attr-defined]
            return super().__next__()
        data = self._next_data()
        self._num_yielded += 1
        return data

    def _next_data(self) -> Any:
        if self._exhausted:
            raise StopIteration
        try:
            found = self._engine.next_batch(self._timeout)
        except TimedOut as late:
            raise WorkerError(f"DataLoader timed out after {self._timeout} seconds\n{late}".strip()) from None
        if found is None:
            self._end_epoch()
            raise StopIteration
        batch, data = found
        self._draw()
        self._counters.note_batch(batch.rows)
        if self._pin_memory:
            data = torch_pinning.pin_memory(data, self._pin_memory_device)
        return data

    def _end_epoch(self) -> None:
        self._exhausted = True
        self._counters.end_iteration()
        if self._persistent_workers:
            self._engine.release_idle()
        else:
            self.close()

    def close(self) -> None:
        """Stop the workers now."""
        self._exhausted = True
        self._finalizer()


class InlineIterator(_SingleProcessDataLoaderIter):
    """Iterates without workers. The caller's generators are left as they were, unless seeding is torch's."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self._counters = loader._counters
        self._counters.begin_iteration()
        self._seeded = loader.seeding == "batch" and loader._dataset_kind == _DatasetKind.Map
        self._batch = 0

    def _next_data(self) -> Any:
        try:
            indices = self._next_index()
        except StopIteration:
            self._counters.end_iteration()
            raise
        began = self._counters.clock()
        data = self._fetch_seeded(indices) if self._seeded else self._dataset_fetcher.fetch(indices)
        self._counters.note_wait(self._counters.clock() - began)
        self._counters.note_batch(len(indices) if self._auto_collation else 1)
        if self._pin_memory:
            data = torch_pinning.pin_memory(data, self._pin_memory_device)
        return data

    def _fetch_seeded(self, indices: Any) -> Any:
        """As a worker would: each stretch of rows, and the collate function, under its own seed."""
        seed = batch_seed(int(self._base_seed), rank=self._rank, epoch=0, batch=self._batch)
        self._batch += 1
        with KeptGenerators():
            if not self._auto_collation:
                seed_stretch(seed, 0)
                return self._collate_fn(self._dataset[indices])
            if not can_split(self._dataset):
                seed_stretch(seed, 0)
                samples = self._dataset.__getitems__(indices)  # type: ignore[attr-defined]
            else:
                samples = self._samples(seed, indices if isinstance(indices, list) else list(indices))
            seed_collate(seed)
            return self._collate_fn(samples)

    def _samples(self, seed: int, indices: list[Any]) -> list[Any]:
        samples: list[Any] = []
        by_list = getattr(self._dataset, "__getitems__", None)
        step = stretch_rows(len(indices))
        for number, start in enumerate(range(0, len(indices), step)):
            seed_stretch(seed, number)
            stretch = indices[start : start + step]
            samples += by_list(stretch) if by_list else [self._dataset[index] for index in stretch]
        return samples

    def close(self) -> None:
        """Nothing to stop."""


def depth_ceiling(workers: int, prefetch_factor: int | None) -> int | None:
    """torch's promise: at most so many batches ahead per worker."""
    return None if prefetch_factor is None else max(1, math.floor(workers * prefetch_factor))


def _as_int(seed: Any) -> int | None:
    return None if seed is None else int(seed)
