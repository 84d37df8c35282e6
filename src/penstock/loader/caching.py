"""The cache as users see it: the cache room's, told about this machine.

In:  sizes as users write them, the meter.
Out: ``Cache``, ``LRUCache``.
Runs in: trainer and worker.
"""

from __future__ import annotations

import bisect
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from penstock.cache import cache as room
from penstock.cache.cached_dataset import CachedDataset
from penstock.cache.fingerprint import fingerprint_of
from penstock.errors import ConfigError
from penstock.loader.cache_forecast import CacheOrder
from penstock.meter import headroom_bytes, limits

_LOADERS = "loader-"
"""What the names of caches begin with that loaders make of a size."""
_LEFT_TO_TRAINING = 1 / 16
"""Of the machine's or container's memory: where less is free, the cache grows no further."""


def memory_bytes() -> int:
    return limits().memory_limit_bytes


def spare_bytes() -> int:
    return headroom_bytes() - int(_LEFT_TO_TRAINING * memory_bytes())


_MACHINE = room.Machine(memory_bytes=memory_bytes, headroom_bytes=spare_bytes)


class Cache(room.Cache):
    """Values by key, shared by all workers and ranks of this node that open the same name, bounded in bytes.

    ``limit``: a size such as ``"50GB"``, a share of the machine's or container's memory such as ``0.3``; a quarter of
    it if not given. Covers values and index. Whoever opens a name first sets limit and policy.
    ``policy``: ``"static"`` fills and never evicts, ``"lru"`` evicts what was not used for longest, ``"next-use"``
    what is needed last, where the order is known, and is ``"lru"`` where it is not; ``"auto"`` chooses.
    ``name``: processes that give the same one share; without one, this process and its workers do.
    ``disk``: a folder for a second tier that survives the run, bounded by ``disk_limit`` (half of the disk's free room
    if not given). It holds tensors, arrays, numbers, texts, bytes and lists, tuples and dicts of them.
    ``fingerprint``: mixed into every key; change it when what is computed under the same keys changes.
    """

    def __init__(
        self,
        limit: object = "auto",
        policy: str = "auto",
        name: str | None = None,
        disk: str | Path | None = None,
        *,
        disk_limit: object = "auto",
        fingerprint: str = "",
    ) -> None:
        super().__init__(
            limit, policy, name, disk, disk_limit=disk_limit, fingerprint=fingerprint, machine=_MACHINE
        )  # fmt: skip


class LRUCache(Cache):
    """A cache that evicts what was not used for longest; its limit is given in GiB."""

    def __init__(self, max_memory_gb: float = 50.0, name: str | None = None) -> None:
        super().__init__(int(max_memory_gb * 2**30), "lru", name)


def attach(given: Any, dataset: Any) -> tuple[room.Cache, Any]:
    """The cache a loader was given, or is to make of that size, and the dataset through it.

    A dataset that says which keys its samples are made of (``keys(index)``) uses the cache itself, and is given it if
    its attribute ``cache`` is None; of any other, whole samples are kept.
    """
    users = [dataset] if isinstance(dataset, CachedDataset) else _users_of(dataset)
    own = next((user.cache for user in users if isinstance(getattr(user, "cache", None), room.Cache)), None)
    if isinstance(given, room.Cache):
        cache = given
        if own is not None and own.name != cache.name:
            raise ConfigError(
                f"{type(dataset).__name__} uses another cache ({own.name}) than the loader was given ({cache.name}); "
                "give the loader the dataset's own"
            )
    elif own is not None and own.name.startswith(_LOADERS):
        # An earlier loader over this dataset has made it; the size given last counts.
        cache = own
        cache.resize(given)
    elif users and (own is not None or not any(hasattr(user, "cache") for user in users)):
        raise ConfigError(
            f"{type(dataset).__name__} keeps its samples, or parts of them, in a cache itself; make a penstock.Cache, "
            "let the dataset use it, and give the loader the same"
        )
    else:
        # The same dataset's, in whatever process of the node.
        cache = Cache(given, name=f"{_LOADERS}{fingerprint_of(dataset)[:16]}")
    for user in users:
        if getattr(user, "cache", user) is None:
            user.cache = cache
    return cache, dataset if users else cache.wrap(dataset)


def _users_of(dataset: Any) -> list[Any]:
    """The datasets with keys of their own that a dataset is made of; none if it is one of whole samples."""
    if isinstance(dataset, Subset):
        return _users_of(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        parts = [_users_of(part) for part in dataset.datasets]
        return [user for part in parts for user in part] if all(parts) else []
    return [] if keys_of(dataset) is None else [dataset]


def order_of(cache: room.Cache, dataset: Any, *, batched: bool) -> CacheOrder | None:
    """What tells the cache the order of keys, where the dataset says which ones it asks for and that matters."""
    keys = keys_of(dataset)
    return None if keys is None or not cache.asks_for_plans else CacheOrder(cache, keys, batched=batched)


def keys_of(dataset: Any) -> Callable[[Any], Any] | None:
    """What says which keys an index needs, if anything does: the dataset's own ``keys``, or those of its parts."""
    if isinstance(dataset, Subset):
        inner, indices = keys_of(dataset.dataset), dataset.indices
        return None if inner is None else lambda index: inner(indices[index])
    if isinstance(dataset, ConcatDataset):
        return _keys_of_parts(dataset)
    # A dictionary's keys are of another kind, and a wrapped dataset's are not what is looked up.
    keys = getattr(type(dataset), "keys", None)
    if isinstance(dataset, CachedDataset) or not callable(keys):
        return None
    try:
        inspect.signature(keys).bind(dataset, 0)
    except (TypeError, ValueError):
        return None
    return dataset.keys


def _keys_of_parts(dataset: ConcatDataset[Any]) -> Callable[[Any], Any] | None:
    parts = [keys_of(part) for part in dataset.datasets]
    if any(part is None for part in parts):
        return None
    ends = dataset.cumulative_sizes

    def keys(index: int) -> Any:
        index = index + len(dataset) if index < 0 else index
        number = bisect.bisect_right(ends, index)
        part = parts[number]
        assert part is not None
        return part(index - (ends[number - 1] if number else 0))

    return keys
