"""Turns a value into bytes for the disk, and back. The bytes contain no code, so it is safe to read any file.

In:  tensors, arrays, numbers, texts, bytes, None, and lists, tuples and dicts of these.
Out: ``Portable``, which writes the bytes in one place; later the value again, made from a private copy of these bytes.
Runs in: trainer and worker.

Layout: the length of a JSON text, the text, then the buffers that the text refers to, each aligned to a cache line.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import torch

from penstock.arena.codec import ALIGN_BYTES, bytes_of, is_plain
from penstock.errors import CacheError

_LENGTH = struct.Struct("<Q")
_ENCODING = ("utf-8", "surrogatepass")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
        torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
        torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip
_ARRAY_KINDS = "biufcMmSU"


class Portable:
    """A value as bytes, ready to be written."""

    def __init__(self, value: Any) -> None:
        """Raises CacheError for values that cannot be stored as such bytes."""
        self._buffers: list[tuple[int, np.ndarray]] = []
        self._end = 0
        # "surrogatepass" accepts the lone surrogates that occur in file names.
        try:
            text = json.dumps(self._spell(value), separators=(",", ":"), ensure_ascii=False).encode(*_ENCODING)
        except RecursionError:
            raise CacheError("A value that contains itself, or is nested too deeply, cannot be kept on disk.") from None
        self._head = _LENGTH.pack(len(text)) + text
        self._start = _aligned(len(self._head))
        self.total_bytes = self._start + self._end

    def write(self, target: np.ndarray) -> None:
        """Write the bytes to ``target``, which has ``total_bytes`` bytes."""
        target[: len(self._head)] = np.frombuffer(self._head, np.uint8)
        for at, raw in self._buffers:
            target[self._start + at : self._start + at + len(raw)] = raw

    def _spell(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind in (list, tuple):
            return [kind.__name__, [self._spell(item) for item in value]]
        if kind is dict:
            return ["dict", [[self._spell(key), self._spell(item)] for key, item in value.items()]]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind is bytes:
            return ["bytes", *self._keep(np.frombuffer(value, np.uint8))]
        if kind is np.ndarray and value.dtype.kind in _ARRAY_KINDS:
            return ["array", value.dtype.str, list(value.shape), *self._keep(value)]
        if issubclass(kind, np.generic) and value.dtype.kind in _ARRAY_KINDS:
            return ["scalar", value.dtype.str, *self._keep(np.atleast_1d(value))]
        if kind is torch.Tensor and is_plain(value) and value.dtype in _DTYPES.values():
            raw = bytes_of(value.contiguous()) if value.numel() else _NOTHING
            return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), *self._keep(raw)]
        raise CacheError(f"{_name(value)} cannot be kept on disk. {_HINT}")

    def _keep(self, array: np.ndarray) -> tuple[int, int]:
        """Add a buffer; returns its offset and length."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at = _aligned(self._end)
        self._buffers.append((at, raw))
        self._end = at + len(raw)
        return at, len(raw)


_NOTHING = np.empty(0, np.uint8)
_HINT = "Values must be CPU tensors, arrays, numbers, texts, bytes, None, and lists, tuples and dicts of these."


def _name(value: Any) -> str:
    if type(value) is torch.Tensor:
        kinds = (value.device.type != "cpu" and value.device.type, value.requires_grad and "requires_grad")
        return "A tensor (" + ", ".join(str(kind) for kind in (*kinds, value.layout, value.dtype) if kind) + ")"
    return f"A {type(value).__module__}.{type(value).__qualname__}"


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def read_portable(source: np.ndarray) -> Any:
    """The value whose bytes are ``source``; tensors and arrays are views that keep it alive.

    Raises ValueError if they were not written by ``Portable``.
    """
    try:
        (length,) = _LENGTH.unpack_from(source.data)
        head_bytes = _LENGTH.size + length
        text = bytes(source[_LENGTH.size : head_bytes]).decode(*_ENCODING)
        return _rebuild(json.loads(text), source[_aligned(head_bytes) :])
    except (ValueError, TypeError, LookupError, ArithmeticError, struct.error, RuntimeError, MemoryError) as problem:
        raise ValueError(f"the bytes are not a value: {problem}") from problem


def _rebuild(spelt: Any, buffers: np.ndarray) -> Any:
    if not isinstance(spelt, list):
        return spelt
    kind, *rest = spelt
    if kind in ("list", "tuple"):
        items = [_rebuild(item, buffers) for item in rest[0]]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {_rebuild(key, buffers): _rebuild(item, buffers) for key, item in rest[0]}
    if kind == "complex":
        return complex(*rest)
    at, length = rest[-2:]
    raw = buffers[at : at + length]
    if at < 0 or len(raw) != length:
        raise ValueError(f"a buffer claims {length} bytes at {at}, but all buffers have {len(buffers)} bytes")
    if kind == "bytes":
        return raw.tobytes()
    if kind == "tensor":
        dtype, shape = _DTYPES[rest[0]], rest[1]
        if length != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"a tensor {shape} of {dtype} cannot have {length} bytes")
        return torch.from_numpy(raw).view(dtype).reshape(shape) if length else torch.empty(shape, dtype=dtype)
    dtype = np.dtype(rest[0])
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"an array cannot have values of type {dtype}")
    if kind == "array":
        if length != math.prod(rest[1]) * dtype.itemsize:
            raise ValueError(f"an array {rest[1]} of {dtype} cannot have {length} bytes")
        return raw.view(dtype).reshape(rest[1]) if length else np.empty(rest[1], dtype)
    if kind == "scalar":
        return raw.view(dtype)[0]
    raise ValueError(f"a {kind!r}")
