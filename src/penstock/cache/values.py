"""One value as bytes in the cache, and back as the caller's own.

In:  anything the arena's codec carries.
Out: ``Packed``, to be written in one place; later the value again, over a private copy of those bytes.
Runs in: trainer and worker.

Layout: number of buffers and length of the pickle, place and length of every buffer, the pickle, then the buffers,
each on a cache line.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from penstock.arena.codec import ALIGN_BYTES, decode, encode

_COUNTS = struct.Struct("<II")
_INSIDE = 0xFFFFFFFF
"""Length of a pickle that is itself the last buffer."""


class Packed:
    """A value ready to be written."""

    __slots__ = ("_encoded", "_head", "_start", "total_bytes")

    def __init__(self, value: Any) -> None:
        """Raises what pickle raises for objects that cannot travel."""
        encoded = self._encoded = encode(value)
        pickled = b"" if encoded.pickled is None else encoded.pickled
        head_bytes = _COUNTS.size + 16 * len(encoded.offsets) + len(pickled)
        self._start = -(-head_bytes // ALIGN_BYTES) * ALIGN_BYTES if encoded.offsets else head_bytes
        places = [place for start, count in encoded.offsets for place in (self._start + start, count)]
        self._head = b"".join(
            (
                _COUNTS.pack(len(encoded.offsets), _INSIDE if encoded.pickled is None else len(pickled)),
                struct.pack(f"<{len(places)}Q", *places),
                pickled,
            )
        )
        self.total_bytes = self._start + encoded.total_bytes

    def write(self, target: np.ndarray) -> None:
        """Into at least ``total_bytes`` bytes."""
        target[: len(self._head)] = np.frombuffer(self._head, np.uint8)
        self._encoded.write(target[self._start :])


def unpack(source: np.ndarray) -> Any:
    """The value whose bytes are ``source``; tensors and arrays are views that keep it alive."""
    view = source.data
    count, pickled_bytes = _COUNTS.unpack_from(view)
    at = _COUNTS.size
    places = struct.unpack_from(f"<{2 * count}Q", view, at)
    at += 16 * count
    pickled = None if pickled_bytes == _INSIDE else view[at : at + pickled_bytes]
    return decode(pickled, list(zip(places[::2], places[1::2], strict=True)), source)  # type: ignore[arg-type]
