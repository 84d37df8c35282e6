"""Puts an engine together from a loader's arguments.

In:  a DataLoader; the objects that its iterator has drawn or shares with the loader.
Out: an engine that is not started.
Runs in: trainer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import _DatasetKind, _sharding_worker_init_fn

from penstock.device.page_locks import PageLocks
from penstock.loader.engine.batch import Batch
from penstock.loader.engine.crashes import OomWatch
from penstock.loader.engine.engine import Engine
from penstock.loader.rules import Order
from penstock.loader.sources.inline_fetcher import InlineFetcher
from penstock.meter import headroom_bytes, spare_files
from penstock.workers.process_worker import ProcessStarter
from penstock.workers.protocol import Resume
from penstock.workers.setup import CHUNK_BYTES, THREADS_CHUNK_BYTES, Setup, can_split
from penstock.workers.thread_worker import ThreadStarter

if TYPE_CHECKING:
    from penstock.loader.dataloader import DataLoader


def build_engine(
    loader: DataLoader[Any],
    *,
    dataset: Any,
    base_seed: int,
    shared_seed: int | None,
    place: tuple[int, int],
    fetcher: InlineFetcher,
    resume: dict[int, Resume],
    page_locks: PageLocks | None,
) -> Engine:
    """``dataset``: the loader's dataset, with its seed applied if it is a data pipe. ``place``: world size and rank.
    ``fetcher`` fetches in the training thread when there are no workers. ``resume``: where each worker with batches of
    its own continues."""
    is_stream = loader._dataset_kind == _DatasetKind.Iterable
    setup = Setup(
        dataset=dataset,
        collate_fn=loader.collate_fn,
        init_fn=_init_fn(loader, dataset, place),
        auto_collation=loader._auto_collation,
        drop_last=loader.drop_last,
        batch_rows=(loader.batch_size or 1) if loader._auto_collation else 1,
        hold_bytes=loader.memory_bytes // (8 * max(1, loader.num_workers)) if is_stream else 0,
        keeps_generators=loader.seeding == "worker",
        threads=loader.threads_per_worker,
        chunk_bytes=THREADS_CHUNK_BYTES if loader._runs_threads else CHUNK_BYTES,
    )
    bound = setup.is_iterable or loader.seeding == "worker"
    return Engine(
        starter=_starter(loader, setup, base_seed, shared_seed),
        workers=loader.num_workers,
        order=Order(
            rows=setup.writes_rows,
            splittable=not bound and setup.auto_collation and can_split(dataset),
            bound=bound,
            keeps_generators=setup.keeps_generators and not setup.is_iterable,
            in_order=loader.in_order,
            batch_rows=setup.batch_rows,
            threads=setup.threads if setup.fetches_in_threads else 1,
            chunk_bytes=setup.chunk_bytes if loader._runs_threads else 0,
        ),
        memory_bytes=loader.memory_bytes,
        headroom_bytes=headroom_bytes,
        spare_files=spare_files(),
        diagnosis=OomWatch().sentence,
        rules=loader._rules,
        counters=loader._counters,
        depth=loader._depth,
        depth_ceiling=loader._depth_ceiling,
        fetch_here=functools.partial(_fetch_here, fetcher),
        resume=resume,
        page_locks=page_locks,
    )


def _init_fn(loader: DataLoader[Any], dataset: Any, place: tuple[int, int]) -> Callable[[int], Any] | None:
    init_fn = loader.worker_init_fn
    if isinstance(dataset, (IterDataPipe, MapDataPipe)):
        return functools.partial(_sharding_worker_init_fn, init_fn, *place)
    return init_fn


def _starter(
    loader: DataLoader[Any], setup: Setup, base_seed: int, shared_seed: int | None
) -> ThreadStarter | ProcessStarter:
    if loader._runs_threads:
        return ThreadStarter(setup)
    return ProcessStarter(
        setup,
        context=loader.multiprocessing_context or torch.multiprocessing.get_context(),
        base_seed=base_seed,
        shared_seed=shared_seed,
    )


def _fetch_here(fetcher: InlineFetcher, batch: Batch) -> Any:
    seed = batch.seed
    seed_of = None if seed is None else lambda _: seed
    return fetcher.fetch(batch.indices, seed_of, batch.number, batch.forecast_position)
