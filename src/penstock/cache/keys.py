"""Digests of keys, the same in every process and run, and the keys that a dataset names for its indices.

In:  strings, bytes, numbers, None, and tuples of them; a dataset.
Out: 16 bytes; a function from an index to its keys.
Runs in: trainer and worker.
"""

from __future__ import annotations

import bisect
import hashlib
import inspect
from collections.abc import Callable
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from penstock.errors import CacheError

DIGEST_BYTES = 16


def digest(key: Any) -> bytes:
    """The key's digest. Keys that are equal, such as 1, True and 1.0, have the same digest, as in a dict."""
    if type(key) is str:
        text = b"s" + key.encode("utf-8", "surrogatepass")
    elif type(key) is int:
        text = b"i%d" % key
    else:
        parts: list[bytes] = []
        _spell(key, parts)
        text = b"".join(parts)
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()


def _spell(key: Any, parts: list[bytes]) -> None:
    if isinstance(key, str):
        parts += [b"s", key.encode("utf-8", "surrogatepass")]
    elif isinstance(key, (bool, int)):
        parts.append(b"i%d" % int(key))
    elif isinstance(key, float):
        parts.append(b"i%d" % int(key) if key.is_integer() else b"f" + repr(float(key)).encode())
    elif isinstance(key, bytes):
        parts += [b"b", key]
    elif key is None:
        parts.append(b"n")
    elif isinstance(key, tuple):
        parts.append(b"t%d:" % len(key))
        for item in key:
            inner: list[bytes] = []
            _spell(item, inner)
            spelt = b"".join(inner)
            # The length precedes each part, because otherwise ("ab", "c") and ("a", "bc") would have the same digest.
            parts += [b"%d:" % len(spelt), spelt]
    elif hasattr(key, "item") and getattr(key, "ndim", None) == 0:
        _spell(key.item(), parts)
    elif hasattr(key, "__fspath__"):
        _spell(key.__fspath__(), parts)
    else:
        raise CacheError(
            f"{key!r:.100} cannot be a cache key, because a {type(key).__name__} is not the same in every process. Use "
            "strings, numbers, bytes, None, or tuples of them."
        )


def keys_of(dataset: Any) -> Callable[[Any], Any] | None:
    """A function from an index to the keys that its sample needs: the method ``keys`` of the dataset, or of the
    datasets that it consists of. None if there is no such method."""
    if isinstance(dataset, Subset):
        inner, indices = keys_of(dataset.dataset), dataset.indices
        return None if inner is None else lambda index: inner(indices[index])
    if isinstance(dataset, ConcatDataset):
        return _keys_of_parts(dataset)
    # Attributes of the object do not count: a wrapper passes on those of the wrapped dataset, whose keys are not looked
    # up.
    keys = getattr(type(dataset), "keys", None)
    if not callable(keys):
        return None
    try:
        # The keys() of a dictionary takes no index.
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
