"""The user's part of fetching, which every worker of a pipeline gets.

In:  the loader's dataset, collate function and arguments.
Out: ``Setup``.
Runs in: trainer and worker.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, Subset
from torch.utils.data.graph_settings import apply_random_seed

from penstock.arena.template import is_default_collate
from penstock.errors import ConfigError

CHUNK_BYTES = 1 << 20
THREADS_CHUNK_BYTES = 16 << 20
"""The same where workers are threads: after every call a thread waits for the GIL, which takes as long as copying some
hundred kilobytes."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The user's part of fetching, the same for every worker of a pipeline."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    auto_collation: bool
    """False for batch_size=None: each index is one finished batch."""
    drop_last: bool
    batch_rows: int
    """Samples per batch of an iterable dataset."""
    hold_bytes: int
    """The most that a worker holds of an iterable dataset's first batch before it asks for room for a whole one: the
    dataset may have far fewer samples."""
    keeps_generators: bool
    """Whether generators are not seeded again for each batch (seeding="worker"), so that a replacement must take over
    their states."""

    threads: int = 1
    """How many samples of a task each worker process fetches at a time, where it fetches them one by one."""

    chunk_bytes: int = CHUNK_BYTES
    """Samples are written to their rows in one call per this many bytes; larger ones one by one."""

    @property
    def fetches_in_threads(self) -> bool:
        return self.threads > 1 and not self.is_iterable and self.auto_collation and is_read_by_index(self.dataset)

    @property
    def is_iterable(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    @functools.cached_property
    def fetches_whole_lists(self) -> bool:
        return fetches_whole_lists(self.dataset)

    @property
    def writes_rows(self) -> bool:
        return self.auto_collation and is_default_collate(self.collate_fn)


def reseed_pipes(dataset: Any, shared_seed: int) -> None:
    """torch's way of giving all copies of a data pipe the same randomness."""
    generator = torch.Generator()
    generator.manual_seed(shared_seed)
    apply_random_seed(dataset, generator)


def keeps_state(dataset: Any) -> bool:
    """Whether a dataset has a state that can be saved, as torchdata defines it: ``state_dict`` without arguments and
    ``load_state_dict`` with one. Other libraries use these names for methods of their own."""
    save, load = getattr(dataset, "state_dict", None), getattr(dataset, "load_state_dict", None)
    if not callable(save) or not callable(load):
        return False
    try:
        inspect.signature(save).bind()
        inspect.signature(load).bind(None)
    except TypeError:
        return False
    except ValueError:
        pass  # a function without a signature
    return True


def fetches_whole_lists(dataset: Any) -> bool:
    """Whether ``__getitems__`` is called with all indices of a batch, since it must see them together."""
    return bool(getattr(dataset, "__getitems__", None)) and not can_split(dataset)


def is_read_by_index(dataset: Any) -> bool:
    """Whether samples can be asked for one at a time. A plain ``Subset`` has ``__getitems__`` and only passes indices
    on."""
    if type(dataset) is Subset:
        return is_read_by_index(dataset.dataset)
    return not getattr(dataset, "__getitems__", None)


def check_threads_help(threads: int, *, num_workers: int, are_workers_threads: bool, is_iterable: bool) -> None:
    """Refuse ``threads_per_worker`` where it could do nothing."""
    if are_workers_threads:
        raise ConfigError(
            f"threads_per_worker={threads}: the workers are threads, and each fetches one sample at a time; use "
            f"num_workers={max(1, num_workers) * threads} instead"
        )
    if is_iterable:
        raise ConfigError(
            f"threads_per_worker={threads}: an iterable dataset gives one sample after the other, so threads cannot "
            "help; use more workers, threads inside the dataset, or a dataset with __getitem__"
        )


def can_split(dataset: Any) -> bool:
    """Whether rows of one batch may be fetched by several workers.

    A dataset says so with ``splittable``. One that says nothing must see whole batches if it has ``__getitems__``, or
    if it wraps a dataset that says ``splittable = False``.
    """
    says = getattr(dataset, "splittable", None)
    if says is not None:
        return bool(says)
    if type(dataset) is Subset:
        return can_split(dataset.dataset)
    return not getattr(dataset, "__getitems__", None) and not _wraps_whole(dataset)


def _wraps_whole(dataset: Any) -> bool:
    """Whether a dataset wraps, as ``dataset`` or among its ``datasets``, one that says ``splittable = False``."""
    several = getattr(dataset, "datasets", ())
    inner = [getattr(dataset, "dataset", None), *(several if isinstance(several, list | tuple) else ())]
    for each in inner:
        if each is not None and each is not dataset:
            says = getattr(each, "splittable", None)
            if _wraps_whole(each) if says is None else not says:
                return True
    return False
