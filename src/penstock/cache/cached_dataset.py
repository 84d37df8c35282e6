"""A dataset whose samples are kept in a cache.

In:  a dataset with indices, a cache.
Out: the same samples, each loaded once.
Runs in: trainer and worker.
"""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from penstock.errors import ConfigError
from penstock.workers.rng import get_generators, is_beside_others

if TYPE_CHECKING:
    from penstock.cache.cache import Cache

_CHECKED_LOADS = 16
"""How many loads per process are checked for random numbers."""


class CachedDataset(Dataset):
    """The result of ``Cache.wrap``. An attribute that it does not have is looked up in the wrapped dataset."""

    def __init__(self, dataset: Any, cache: Cache, fingerprint: str) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"A {type(dataset).__name__} has no indices to use as keys. Call cache.get_or_load(key, load) inside "
                "the dataset instead."
            )
        self.dataset = dataset
        self.cache = cache
        self.fingerprint = fingerprint
        self._checked = 0

    def __getitem__(self, index: Any) -> Any:
        return self.cache.get_or_load(index, lambda: self._load(index), group=self.fingerprint)

    def get_self_seeded(self, index: Any) -> Any:
        """A sample, for callers that seed the global random generators before they use them again."""
        return self.cache.get_or_load(index, lambda: self._load(index), group=self.fingerprint, keeps_generators=False)

    def __len__(self) -> int:
        return len(self.dataset)

    def is_on_disk(self, index: Any) -> bool:
        """Whether a sample is in the cache on disk."""
        return self.cache.is_on_disk(index, group=self.fingerprint)

    def keep_on_disk(self, index: Any) -> bool:
        """Load a sample and keep it on disk; False if it cannot be kept there."""
        sample = self[index]
        return self.is_on_disk(index) or self.cache.put_on_disk(index, sample, group=self.fingerprint)

    def print_cache_stats(self) -> None:
        self.cache.print_stats(type(self.dataset).__name__)

    def _load(self, index: Any) -> Any:
        # Reading the generators' states counts as use of them.
        if self._checked >= _CHECKED_LOADS or is_beside_others():
            return self.dataset[index]
        self._checked += 1
        before = get_generators()
        _here.whole = self.cache.name
        try:
            sample = self.dataset[index]
        finally:
            _here.whole = None
        if not _are_same(before, get_generators()):
            self._checked = _CHECKED_LOADS
            warnings.warn(
                f"{type(self.dataset).__name__} draws random numbers, so the cache repeats the same random samples in "
                "every epoch. Cache only the part of a sample before the random part (cache.get_or_load inside "
                "__getitem__).",
                RuntimeWarning,
                stacklevel=2,
            )
        return sample

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class _LoadingHere(threading.local):
    whole: str | None = None
    """The name of the cache for which this thread loads a whole sample."""


_here = _LoadingHere()


def is_loading_whole_for(name: str) -> bool:
    """Whether this thread loads a whole sample for the cache of that name."""
    return _here.whole == name


def _are_same(one: tuple[Any, Any, Any], other: tuple[Any, Any, Any]) -> bool:
    return (
        one[0] == other[0]
        and one[1][2] == other[1][2]
        and np.array_equal(one[1][1], other[1][1])
        and torch.equal(one[2], other[2])
    )
