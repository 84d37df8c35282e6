"""A loader and its cache: the cache that the loader is given or creates, and the dataset that reads through this cache.

In:  the argument ``cache`` of a loader; the loader's dataset.
Out: the cache; the dataset, which is wrapped unless it uses the cache itself.
Runs in: trainer.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import ConcatDataset, Subset

from penstock.cache.cache import Cache
from penstock.cache.cached_dataset import CachedDataset
from penstock.cache.fingerprint import fingerprint_of
from penstock.cache.keys import keys_of
from penstock.errors import ConfigError

_PREFIX = "loader-"
"""The beginning of the names of caches that loaders create."""


def attach(given: Any, dataset: Any) -> tuple[Cache, Any]:
    """The cache of a loader, created if ``given`` is a size, and the dataset that reads through this cache.

    A dataset with a method ``keys(index)`` uses the cache itself; if its attribute ``cache`` is None, this function
    sets it. For any other dataset, the cache keeps whole samples.
    """
    users = _users_of(dataset)
    own = _first_cache(users)
    if isinstance(given, Cache):
        cache = given
        if own is not None and own.name != cache.name:
            raise ConfigError(
                f"{type(dataset).__name__} uses the cache {own.name}, but cache= of the loader is {cache.name}. Pass "
                "the dataset's cache to the loader."
            )
    elif own is not None and own.name.startswith(_PREFIX):
        # An earlier loader of this dataset created the cache; the latest size applies.
        cache = own
        cache.resize(given)
    elif users and (own is not None or not any(hasattr(user, "cache") for user in users)):
        raise ConfigError(
            f"{type(dataset).__name__} itself keeps samples or parts of samples in a cache. Create a penstock.Cache, "
            "use it in the dataset, and pass the same cache to the loader."
        )
    else:
        # Loaders of the same dataset in other processes of the node use the same name.
        cache = Cache(given, name=f"{_PREFIX}{fingerprint_of(dataset)[:16]}")
    for user in users:
        if getattr(user, "cache", user) is None:
            user.cache = cache
    return cache, dataset if users else cache.wrap(dataset)


def cache_inside(dataset: Any) -> Cache | None:
    """The cache through which a dataset reads by itself, such as a dataset that ``Cache.wrap`` returned."""
    return _first_cache(_users_of(dataset))


def _first_cache(users: list[Any]) -> Cache | None:
    return next((user.cache for user in users if isinstance(getattr(user, "cache", None), Cache)), None)


def _users_of(dataset: Any) -> list[Any]:
    """The parts of a dataset that use a cache themselves; empty unless all parts of the dataset use a cache."""
    if isinstance(dataset, Subset):
        return _users_of(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        parts = [_users_of(part) for part in dataset.datasets]
        return [user for part in parts for user in part] if all(parts) else []
    return [dataset] if isinstance(dataset, CachedDataset) or keys_of(dataset) is not None else []
