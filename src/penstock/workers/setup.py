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


def fetches_lists(dataset: Any) -> bool:
    """Whether ``__getitems__`` is more than a loop over single samples, as a Subset's may be."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))


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
