"""Turns any Python object into bytes in a segment and back: tensors and arrays are raw aligned bytes, all else is a
pickle.

In:  a batch, a sample or a list of samples; later the buffer into which it was written.
Out: ``Encoded`` (a small pickle plus the raw buffers it refers to); later the object again, which views the buffer.
Runs in: worker (encode), trainer and collating worker (decode).

The pickle travels only between a trainer and the workers that this trainer started.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch._tensor import _rebuild_from_type_v2
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

ALIGN_BYTES = 64
"""Every buffer starts on a cache line, so that any dtype may be viewed in place."""


_PROTOCOL = pickle.HIGHEST_PROTOCOL
SMALL_PICKLE_BYTES = 64 << 10
"""A pickle up to this size travels in the message; a larger pickle (long texts, raw bytes) becomes a buffer."""


class Encoded:
    """An object that is split into a pickle and the large buffers to which the pickle refers."""

    __slots__ = ("_pieces", "buffers", "offsets", "pickled", "total_bytes")

    def __init__(self, pieces: list[bytes], buffers: list[memoryview], *, small_bytes: int) -> None:
        """``pieces`` of the pickle: each long text or raw bytes object is a piece of its own and is not copied."""
        pickle_bytes = sum(map(len, pieces))
        self.pickled = b"".join(pieces) if pickle_bytes <= small_bytes else None
        self.buffers = buffers
        self._pieces = [] if self.pickled is not None else pieces
        """The pieces of a large pickle, which is written after the buffers."""
        self.offsets: list[tuple[int, int]] = []
        end = 0
        for size in [*(buffer.nbytes for buffer in buffers), *([pickle_bytes] if self._pieces else [])]:
            start = -(-end // ALIGN_BYTES) * ALIGN_BYTES
            self.offsets.append((start, size))
            end = start + size
        self.total_bytes = end

    def as_bytes(self) -> bytes:
        """The whole object as one bytes object, for objects too small to be worth a segment; ``decode_bytes`` reads
        it."""
        assert self.pickled is not None
        return pickle.dumps((self.pickled, [bytearray(buffer) for buffer in self.buffers]), protocol=_PROTOCOL)

    def placed(self) -> list[tuple[int, memoryview]]:
        """Pairs of an offset and the bytes to write there: all bytes that ``offsets`` refers to, in order."""
        placed = [(start, buffer) for (start, _), buffer in zip(self.offsets, self.buffers, strict=False)]
        end = self.offsets[-1][0] if self._pieces else 0
        for piece in self._pieces:
            placed.append((end, memoryview(piece)))
            end += len(piece)
        return placed

    def write(self, target: np.ndarray) -> None:
        """Copy the buffers into ``target``, an array of at least ``total_bytes`` bytes."""
        for start, buffer in self.placed():
            target[start : start + buffer.nbytes] = np.frombuffer(buffer, dtype=np.uint8)


def encode(value: object, *, exactly: bool = False, small_bytes: int = SMALL_PICKLE_BYTES) -> Encoded:
    """Split ``value``. Raises pickle's own exceptions for objects that cannot travel.

    ``small_bytes``: a pickle larger than this becomes a buffer.
    ``exactly``: also refuse arrays that would arrive with other strides or another byte order, because a collate
    function may depend on these.
    """
    buffers: list[memoryview] = []
    # If the callback returns None, the buffer is left out of the pickle.
    pieces = _Pieces()
    _pickle_into(pieces, value, _dispatch_table(exactly), lambda buffer: buffers.append(buffer.raw()))
    return Encoded(pieces, buffers, small_bytes=small_bytes)


def decode(pickled: bytes | None, offsets: Sequence[tuple[int, int]], source: np.ndarray) -> Any:
    """Rebuild an object whose buffers lie in ``source``; if ``pickled`` is None, the last buffer is the pickle.

    The object's tensors and arrays are views that keep ``source`` alive.
    """
    view = source.data
    buffers = [view[start : start + count] for start, count in offsets]
    return pickle.loads(buffers.pop() if pickled is None else pickled, buffers=buffers)


def decode_all(source: np.ndarray) -> Any:
    """Rebuild an object that was encoded as a pickle alone. The pickle is all of ``source``; the object does not refer
    to ``source``."""
    return pickle.loads(source.data)


def decode_bytes(data: bytes) -> Any:
    """Rebuild an object from the bytes that ``Encoded.as_bytes`` returned."""
    pickled, buffers = pickle.loads(data)
    return pickle.loads(pickled, buffers=buffers)


def encode_inline(value: object) -> bytes:
    """Encode an object as one pickle with everything inside, for messages."""
    sink = io.BytesIO()
    _pickle_into(sink, value, _dispatch_table(False), None)
    return sink.getvalue()


def decode_inline(pickled: bytes) -> Any:
    return pickle.loads(pickled)


class _Pieces(list[bytes]):
    """The pieces that a pickler writes, unchanged."""

    def write(self, piece: bytes) -> None:
        self.append(piece)


def _pickle_into(
    sink: _Pieces | io.BytesIO,
    value: object,
    reducers: dict[type, Callable[[Any], Any]],
    keep: Callable[[pickle.PickleBuffer], None] | None,
) -> None:
    # No subclass with reducer_override is used: it would be called for every object of every message.
    pickler = pickle.Pickler(sink, protocol=_PROTOCOL, buffer_callback=keep)
    pickler.dispatch_table = reducers
    pickler.dump(value)


def _reduce_exact_array(array: np.ndarray) -> Any:
    if min(array.strides, default=0) < 0:
        raise TypeError("an array with negative strides would arrive with positive strides")
    return _reduce_array(array)


def _reduce_array(array: np.ndarray) -> Any:
    # numpy puts the bytes of an array with gaps into the pickle; the bytes of an array without gaps stay outside.
    gaps = not (array.flags.c_contiguous or array.flags.f_contiguous) and not array.dtype.hasobject
    return (np.ascontiguousarray(array) if gaps else array).__reduce_ex__(_PROTOCOL)


def _reduce_exact_array_class(array: np.ndarray) -> Any:
    if not array.dtype.isnative:
        raise TypeError("an object of an array class would arrive with another byte order")
    return _as_pickle_does(array)


def _as_pickle_does(value: Any) -> Any:
    return value.__reduce_ex__(_PROTOCOL)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    if not is_plain(tensor):
        return _reduce_as_torch(tensor)
    if tensor.numel() == 0:
        return _empty_tensor, (tensor.dtype, tuple(tensor.shape))
    if tensor.is_contiguous():
        return _tensor_over, (_raw_bytes(tensor), tensor.dtype, tuple(tensor.shape))
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if span < tensor.numel():
        # The tensor is expanded or consists of overlapping windows: the bytes behind it travel once.
        flat = tensor.as_strided((span,), (1,))
        return _strided_tensor_over, (_raw_bytes(flat), tensor.dtype, tuple(tensor.shape), tensor.stride())
    # Transposed and channels-last tensors keep their strides, as they do in torch's DataLoader.
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    if not tensor.permute(order).is_contiguous():
        return _tensor_over, (_raw_bytes(tensor.contiguous()), tensor.dtype, tuple(tensor.shape))
    dense = tensor.permute(order)
    return _permuted_tensor_over, (_raw_bytes(dense), tensor.dtype, tuple(dense.shape), order)


def _reduce_as_torch(tensor: torch.Tensor) -> Any:
    """Reduce as torch does (subclasses, attributes, all that is not plain bytes), but keep the bytes of strided tensors
    outside the pickle. torch would copy the whole storage of such a tensor into the pickle."""
    reduced = tensor.__reduce_ex__(_PROTOCOL)
    if type(reduced) is not tuple or len(reduced) != 2:
        return reduced
    rebuild, args = reduced
    if rebuild is _rebuild_from_type_v2:
        inner, kind, inner_args, state = args
        return rebuild, (*_apart(inner, inner_args, kind), state)
    rebuild, _, args = _apart(rebuild, args, None)
    return rebuild, args


def _apart(rebuild: Callable[..., Any], args: tuple[Any, ...], kind: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return the same function, type and arguments, but with a plain tensor over the storage in place of the
    storage."""
    if rebuild not in _STRIDED_REBUILDS:
        return rebuild, kind, args
    storage, offset, shape, strides, *rest = args
    is_typed = isinstance(storage, torch.storage.TypedStorage)
    untyped, dtype = (storage._untyped_storage, storage.dtype) if is_typed else (storage, rest[2])
    if untyped.device.type != "cpu":
        return rebuild, kind, args
    plain = torch.empty((0,), dtype=dtype).set_(untyped, offset, shape, strides)
    return _rebuilt_over, kind, (rebuild, plain, *rest)


def _rebuilt_over(rebuild: Callable[..., Any], plain: torch.Tensor, *rest: Any) -> torch.Tensor:
    storage = torch.storage.TypedStorage(wrap_storage=plain.untyped_storage(), dtype=plain.dtype, _internal=True)
    return rebuild(storage, plain.storage_offset(), tuple(plain.shape), plain.stride(), *rest)


_STRIDED_REBUILDS = (_rebuild_tensor_v2, _rebuild_tensor_v3)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor consists of its bytes, dtype and shape only."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.__dict__
    )


def _raw_bytes(tensor: torch.Tensor) -> pickle.PickleBuffer:
    return pickle.PickleBuffer(bytes_of(tensor).data)


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a contiguous tensor that is not empty, without a copy."""
    # torch calls a tensor of one element contiguous whatever its stride is, but refuses to view it as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


def _empty_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _tensor_over(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    # Bytes pickled inside a message are immutable, but users may change a batch.
    if isinstance(buffer, bytes):
        buffer = bytearray(buffer)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def _permuted_tensor_over(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], order: list[int]) -> torch.Tensor:
    back = sorted(range(len(order)), key=order.__getitem__)
    return _tensor_over(buffer, dtype, shape).permute(back)


def _strided_tensor_over(
    buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    return _tensor_over(buffer, dtype, (-1,)).as_strided(shape, strides)


class _Reducers(dict[type, Callable[[Any], Any]]):
    """Reducers by type. A subclass of Tensor or of numpy's array is added at its first lookup."""

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        if issubclass(kind, torch.Tensor):
            self[kind] = _reduce_as_torch
        elif issubclass(kind, np.ndarray):
            self[kind] = _reduce_exact_array_class if self[np.ndarray] is _reduce_exact_array else _as_pickle_does
        else:
            raise KeyError(kind)
        return self[kind]


_registered: tuple[dict[type, Any], int] = ({}, 0)
"""The tables below were made from these reducers of copyreg, and from this number of reducers of multiprocessing."""
_tables: tuple[_Reducers, _Reducers] = (_Reducers(), _Reducers())


def _dispatch_table(exactly: bool) -> _Reducers:
    """multiprocessing's reducers, except that plain CPU tensors become raw buffers: torch's reducer would open one file
    per tensor."""
    global _registered, _tables
    between_processes: dict[type, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    # Users may register reducers at any time. This check runs for every message, and multiprocessing has many reducers,
    # so only their number is compared.
    if _registered != (copyreg.dispatch_table, len(between_processes)):
        everywhere: dict[type, Any] = dict(copyreg.dispatch_table)
        _tables = (
            _merged(everywhere, between_processes, exactly=False),
            _merged(everywhere, between_processes, exactly=True),
        )
        _registered = everywhere, len(between_processes)
    return _tables[exactly]


def _merged(everywhere: dict[type, Any], between_processes: dict[type, Any], *, exactly: bool) -> _Reducers:
    storages = (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)
    extra = {
        kind: reducer
        for kind, reducer in between_processes.items()
        if not (isinstance(kind, type) and issubclass(kind, storages))
    }
    own = {np.ndarray: _reduce_exact_array if exactly else _reduce_array, torch.Tensor: _reduce_tensor}
    return _Reducers({**everywhere, **extra, **own})
