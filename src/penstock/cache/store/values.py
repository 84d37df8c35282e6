"""Turns a value into the bytes that a store in memory keeps, and back.

In:  anything the arena's codec can encode.
Out: ``PackedValue``, which writes the bytes in one place; later the value again, made from a private copy of these
     bytes.
Runs in: trainer and worker.

Layout: number of buffers and length of the pickle, offset and length of every buffer, the pickle, then the buffers,
each aligned to a cache line. A plain tensor, without other attributes, needs no pickle: its dtype and shape take the
pickle's place.
"""

from __future__ import annotations

import itertools
import struct
from typing import Any

import numpy as np
import torch

from penstock.arena.codec import ALIGN_BYTES, bytes_of, decode, encode, is_plain

_COUNTS = struct.Struct("<II")
_INSIDE = 0xFFFFFFFF
"""This number in place of a length says that the pickle is the last buffer."""
_TENSOR = 0xFFFFFFFE
"""This number in place of a length says that the value is one tensor."""
_DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.bool,
]  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_MOST_PARTS = 64
"""How many parts of a container ``least_bytes`` looks at."""
_PADDING = bytes(ALIGN_BYTES)


class PackedValue:
    """A value as bytes, ready to be written."""

    __slots__ = ("_head", "_placed", "_start", "total_bytes")

    def __init__(self, value: Any) -> None:
        """Raises what pickle raises for objects it cannot pickle."""
        if type(value) is torch.Tensor and value.dtype in _CODES and value.is_contiguous() and is_plain(value):
            flat = bytes_of(value).data if value.numel() else memoryview(b"")
            self._placed, offsets = [(0, flat)], [(0, flat.nbytes)]
            total_bytes, kind = flat.nbytes, _TENSOR
            rest = struct.pack(f"<{2 + value.dim()}Q", _CODES[value.dtype], value.dim(), *value.shape)
        else:
            encoded = encode(value)
            self._placed, offsets, total_bytes = encoded.placed(), encoded.offsets, encoded.total_bytes
            rest = b"" if encoded.pickled is None else encoded.pickled
            kind = _INSIDE if encoded.pickled is None else len(rest)
        head_bytes = _COUNTS.size + 16 * len(offsets) + len(rest)
        self._start = -(-head_bytes // ALIGN_BYTES) * ALIGN_BYTES if offsets else head_bytes
        places = [place for start, count in offsets for place in (self._start + start, count)]
        counts = _COUNTS.pack(len(offsets), kind)
        self._head = b"".join((counts, struct.pack(f"<{len(places)}Q", *places), rest))
        self.total_bytes = self._start + total_bytes

    def write(self, target: np.ndarray) -> None:
        """Write the bytes to ``target``, which has at least ``total_bytes`` bytes."""
        target[: len(self._head)] = np.frombuffer(self._head, np.uint8)
        for start, buffer in self._placed:
            start += self._start
            target[start : start + buffer.nbytes] = np.frombuffer(buffer, np.uint8) if buffer.nbytes else 0

    def pieces(self) -> list[Any]:
        """The bytes of the value as a sequence of pieces."""
        pieces: list[Any] = [self._head]
        end = len(self._head)
        for start, buffer in self._placed:
            pieces += [_PADDING[: self._start + start - end], buffer]
            end = self._start + start + buffer.nbytes
        return pieces


def least_bytes(value: Any) -> int:
    """A quick lower bound of a value's size."""
    parts = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
    # The largest part and not the sum: parts may share memory, which is stored once.
    return max((_plain_bytes(part) for part in itertools.islice(parts, _MOST_PARTS)), default=0)


def _plain_bytes(value: Any) -> int:
    if type(value) is torch.Tensor:
        return value.nbytes if value.dtype in _CODES and is_plain(value) and value.is_contiguous() else 0
    return value.nbytes if type(value) is np.ndarray and value.flags.c_contiguous else 0


def unpack(source: np.ndarray) -> Any:
    """The value whose bytes are ``source``; tensors and arrays are views that keep it alive."""
    view = source.data
    count, kind = _COUNTS.unpack_from(view)
    at = _COUNTS.size
    if kind == _TENSOR:
        start, length, code, dims = struct.unpack_from("<4Q", view, at)
        shape = struct.unpack_from(f"<{dims}Q", view, at + 32)
        if not length:
            return torch.empty(shape, dtype=_DTYPES[code])
        return torch.frombuffer(source, dtype=_DTYPES[code], offset=start).view(shape)
    places = struct.unpack_from(f"<{2 * count}Q", view, at)
    at += 16 * count
    pickled = None if kind == _INSIDE else view[at : at + kind]
    return decode(pickled, list(zip(places[::2], places[1::2], strict=True)), source)  # type: ignore[arg-type]
