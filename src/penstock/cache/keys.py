"""Keys: anything hashable and stable, as a digest that every process of every run agrees on.

In:  strings, bytes, numbers, None, and tuples of them.
Out: 16 bytes.
Runs in: trainer and worker.
"""

from __future__ import annotations

import hashlib
from typing import Any

from penstock.errors import CacheError

DIGEST_BYTES = 16


def digest(key: Any) -> bytes:
    """The key's digest. Equal keys have equal ones (1 and True and 1.0, as in a dict), in any process."""
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
            # With its length, or ("ab", "c") and ("a", "bc") would be one.
            parts += [b"%d:" % len(spelt), spelt]
    elif hasattr(key, "item") and getattr(key, "ndim", None) == 0:
        _spell(key.item(), parts)
    elif hasattr(key, "__fspath__"):
        _spell(key.__fspath__(), parts)
    else:
        raise CacheError(
            f"{key!r:.100} cannot be a cache key: a {type(key).__name__} is not the same in every process; use "
            "strings, numbers, bytes, None, or tuples of them"
        )
