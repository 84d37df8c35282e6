"""A list that workers read without copying its pages.

In:  any iterable of texts, bytes, numbers, booleans, None, and tuples, lists and dicts of these.
Out: a read-only sequence over bytes that this process and all its workers share.
Runs in: trainer and worker.

Reading an item of a Python list writes to its reference count, which copies its page into each forked worker. A
``SharedList`` creates the object of an item only when the item is read.

The bytes contain, in this order, the contents of all items, padding, the places (where each item begins and the last
item ends), and the kind of each item. Lists of only numbers or only booleans contain no places; lists whose items have
the same kind contain no kinds.
"""

from __future__ import annotations

import io
import itertools
import pickle
import reprlib
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from types import NoneType
from typing import Any, NoReturn, SupportsIndex, TypeVar, overload

import numpy as np

from penstock.data.shared.shared_bytes import SharedBytes
from penstock.errors import ConfigError
from penstock.units import KIB, MIB, format_bytes

T_co = TypeVar("T_co", covariant=True)

_TEXT, _BYTES, _INT, _FLOAT, _BOOL, _NONE, _OTHER, _SEVERAL = range(8)
_KINDS = {str: _TEXT, bytes: _BYTES, int: _INT, float: _FLOAT, bool: _BOOL, NoneType: _NONE}
_FIXED = {_INT: ("q", 8), _FLOAT: ("d", 8), _BOOL: ("?", 1), _NONE: ("", 0)}
"""Kind -> format and size of an item, for kinds whose items all have the same size."""
_ENCODING = ("utf-8", "surrogatepass")
_INT64, _FLOAT64 = struct.Struct("q"), struct.Struct("d")
_PROTOCOL = 3
"""The oldest pickle protocol that supports bytes; later protocols add a frame to each item."""

_MOST_ITEMS, _CHUNK_BYTES = 16 * KIB, 2 * MIB
"""The most items and the most bytes that are packed at a time. While packing, a list needs a few times these bytes of
memory in addition to the result."""
_NARROW_BYTES = 1 << 32
"""If all contents together have fewer bytes than this, a place takes four bytes; otherwise it takes eight."""


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Where the parts of a list lie in the list's bytes."""

    count: int
    kind: int
    """The kind of all items, or ``_SEVERAL``."""
    places_at: int
    """Where the contents and their padding end, and the places begin."""
    wide: bool
    """Whether a place takes eight bytes instead of four."""


class SharedList(Sequence[T_co]):
    """A read-only list in memory that all workers share: ``SharedList(paths)``.

    A slice is a view of the same memory. Each read creates a new object, equal in value and type to the original item.
    """

    __slots__ = ("__weakref__", "_bytes", "_layout", "_read", "_rows")

    def __init__(self, items: Iterable[T_co]) -> None:
        """Raises ConfigError, with the index, for an item that a ``SharedList`` cannot hold."""
        packing = _Packing()
        self._bytes = SharedBytes.of(packing.pieces(items))
        self._layout = packing.layout()
        self._rows = range(self._layout.count)
        self._read = _reader(self._bytes.view(), self._layout)

    @classmethod
    def _over(cls, shared: SharedBytes, layout: _Layout, rows: range) -> SharedList[T_co]:
        made = cls.__new__(cls)
        made._bytes, made._layout, made._rows = shared, layout, rows
        made._read = _reader(shared.view(), layout)
        return made

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: SupportsIndex) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> SharedList[T_co]: ...
    def __getitem__(self, index: Any) -> Any:
        if type(index) is slice:
            return SharedList._over(self._bytes, self._layout, self._rows[index])
        try:
            row = self._rows[index]
        except IndexError:
            raise IndexError(f"index {index} is not in a SharedList of {len(self._rows)} items") from None
        except TypeError:
            raise TypeError(f"indices of a SharedList must be integers or slices, not {index!r}") from None
        return self._read(row)

    def __iter__(self) -> Iterator[T_co]:
        return map(self._read, self._rows)

    def __reversed__(self) -> Iterator[T_co]:
        return map(self._read, reversed(self._rows))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (SharedList, list)):
            return NotImplemented
        return len(self) == len(other) and all(ours == theirs for ours, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(reprlib.repr(item) for item in self[:3]) + (", ..." if len(self) > 3 else "")
        return f"SharedList([{shown}], {len(self):,} items in {format_bytes(len(self._bytes))})"

    def made_of(self) -> tuple[Any, ...]:
        """The content, for the fingerprint by which a cache finds samples of earlier runs."""
        return self._bytes, astuple(self._layout), self._rows

    def __copy__(self) -> SharedList[T_co]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedList[T_co]:
        return self

    def __reduce__(self) -> Any:
        return SharedList._over, (self._bytes, self._layout, self._rows)

    def __setitem__(self, index: object, value: object) -> NoReturn:
        raise TypeError("a SharedList cannot be changed: change a list and create a new SharedList from it")

    def __delitem__(self, index: object) -> NoReturn:
        self.__setitem__(index, None)


def _reader(whole: memoryview, layout: _Layout) -> Callable[[int], Any]:
    """A function that takes the number of an item and returns the item."""
    kind, count = layout.kind, layout.count
    if kind == _NONE:
        return lambda row: None
    if kind in _FIXED:
        letter, width = _FIXED[kind]
        numbers: Any = whole[: width * count]
        return numbers.cast(letter).__getitem__
    places_end = layout.places_at + (8 if layout.wide else 4) * (count + 1)
    places = whole[layout.places_at : places_end].cast("Q" if layout.wide else "I")
    loads = pickle.loads

    def read_text(row: int) -> str:
        return str(whole[places[row] : places[row + 1]], "utf-8", "surrogatepass")

    def read_bytes(row: int) -> bytes:
        return bytes(whole[places[row] : places[row + 1]])

    def read_other(row: int) -> Any:
        return loads(whole[places[row] : places[row + 1]])

    if kind == _SEVERAL:
        kinds = whole[places_end:]
        by_kind: dict[int, Callable[[int], Any]] = {
            _TEXT: read_text,
            _BYTES: read_bytes,
            _INT: lambda row: _INT64.unpack_from(whole, places[row])[0],
            _FLOAT: lambda row: _FLOAT64.unpack_from(whole, places[row])[0],
            _BOOL: lambda row: whole[places[row]] == 1,
            _NONE: lambda row: None,
            _OTHER: read_other,
        }
        return lambda row: by_kind[kinds[row]](row)
    return {_TEXT: read_text, _BYTES: read_bytes, _OTHER: read_other}[kind]


class _Packing:
    """Packs items chunk by chunk. The layout is complete only after the last chunk, because it depends on all
    chunks."""

    def __init__(self) -> None:
        self._count = self._content_bytes = 0
        self._chunks: list[tuple[int, int | bytes, int | np.ndarray]] = []
        """For each chunk: the number of items, their kinds and their lengths. A single kind or length is that of every
        item."""

    def pieces(self, items: Iterable[Any]) -> Iterator[bytes | np.ndarray]:
        """The bytes of the list, in order."""
        for chunk in self._cut(items):
            yield self._pack(chunk)
        yield bytes(-self._content_bytes % 8)
        layout = self.layout()
        if layout.kind in _FIXED:
            return
        dtype, end = np.uint64 if layout.wide else np.uint32, 0
        yield np.zeros(1, dtype)
        for count, _, lengths in self._chunks:
            each = np.full(count, lengths, np.uint64) if isinstance(lengths, int) else lengths
            ends = end + np.cumsum(each, dtype=np.uint64)
            end = int(ends[-1])
            yield ends.astype(dtype)
        if layout.kind == _SEVERAL:
            yield from (bytes([kind]) * count if isinstance(kind, int) else kind for count, kind, _ in self._chunks)

    def layout(self) -> _Layout:
        kinds = {kind if isinstance(kind, int) else _SEVERAL for _, kind, _ in self._chunks}
        return _Layout(
            count=self._count,
            kind=_TEXT if not kinds else kinds.pop() if len(kinds) == 1 else _SEVERAL,
            places_at=self._content_bytes + -self._content_bytes % 8,
            wide=self._content_bytes >= _NARROW_BYTES,
        )

    def _cut(self, items: Iterable[Any]) -> Iterator[list[Any]]:
        if isinstance(items, np.ndarray):
            if items.dtype.kind in "mM":
                # Arrays of times are refused, because tolist() returns plain numbers or dates, depending on the unit.
                raise ConfigError(
                    f"a SharedList cannot hold an array of {items.dtype}; give "
                    f'items.view("int64") and convert each number back to {items.dtype} when you read it'
                )
            slices = range(0, len(items), _MOST_ITEMS)
            coming = itertools.chain.from_iterable(items[at : at + _MOST_ITEMS].tolist() for at in slices)
        else:
            coming = iter(items)
        size = 1
        while chunk := list(itertools.islice(coming, size)):
            before = self._content_bytes
            yield chunk
            # Large items need small chunks. A chunk is at most twice as long as the one before, because large items may
            # follow small ones.
            fitting = _CHUNK_BYTES * len(chunk) // max(1, self._content_bytes - before)
            size = max(1, min(fitting, 2 * size, _MOST_ITEMS))

    def _pack(self, chunk: list[Any]) -> bytes | np.ndarray:
        types = set(map(type, chunk))
        kind: int | bytes = _KINDS.get(types.pop(), _OTHER) if len(types) == 1 else _SEVERAL
        raw: bytes | np.ndarray
        lengths: int | np.ndarray
        if kind == _INT:
            try:
                raw, lengths = np.fromiter(chunk, np.int64, len(chunk)), 8
            except OverflowError:
                kind, raw, lengths = self._pack_each(chunk)
        elif kind == _FLOAT:
            raw, lengths = np.fromiter(chunk, np.float64, len(chunk)), 8
        elif kind == _BOOL:
            raw, lengths = bytes(chunk), 1
        elif kind == _NONE:
            raw, lengths = b"", 0
        elif kind == _BYTES:
            raw, lengths = b"".join(chunk), _lengths(chunk)
        elif kind == _TEXT:
            joined = "".join(chunk)
            raw = joined.encode(*_ENCODING)
            same = len(raw) == len(joined)
            lengths = _lengths(chunk if same else [text.encode(*_ENCODING) for text in chunk])
        else:
            kind, raw, lengths = self._pack_each(chunk)
        self._chunks.append((len(chunk), kind, lengths))
        self._count += len(chunk)
        self._content_bytes += raw.nbytes if isinstance(raw, np.ndarray) else len(raw)
        return raw

    def _pack_each(self, chunk: list[Any]) -> tuple[int | bytes, bytes, np.ndarray]:
        kinds, ends = bytearray(), [0]
        written = io.BytesIO()
        pickler = pickle.Pickler(written, _PROTOCOL)
        # Without "fast", the pickler would number every text for later references, which do not occur here.
        pickler.fast = True
        for at, item in enumerate(chunk):
            kind = _KINDS.get(type(item), _OTHER)
            if kind == _INT and not -(1 << 63) <= item < 1 << 63:
                kind = _OTHER
            if kind == _TEXT:
                written.write(item.encode(*_ENCODING))
            elif kind == _BYTES:
                written.write(item)
            elif kind == _INT:
                written.write(_INT64.pack(item))
            elif kind == _FLOAT:
                written.write(_FLOAT64.pack(item))
            elif kind == _BOOL:
                written.write(b"\1" if item else b"\0")
            elif kind == _OTHER:
                _check(item, self._count + at)
                try:
                    pickler.dump(item)
                except RecursionError:
                    raise _too_deep(item, self._count + at) from None
            kinds.append(kind)
            ends.append(written.tell())
        only = kinds[0] if len(set(kinds)) == 1 else bytes(kinds)
        return only, written.getvalue(), np.diff(np.array(ends, np.uint64))


def _lengths(chunk: list[Any]) -> np.ndarray:
    return np.fromiter(map(len, chunk), np.uint32 if max(map(len, chunk)) < 1 << 32 else np.uint64, len(chunk))


def _check(item: Any, index: int) -> None:
    """Raise ConfigError if the item contains a type that a SharedList cannot hold."""
    try:
        odd = _odd_type(item)
    except RecursionError:
        raise _too_deep(item, index) from None
    if odd is None:
        return
    name = f"{odd.__module__}.{odd.__qualname__}".removeprefix("builtins.")
    hint = (
        "convert it with .tolist()"
        if hasattr(odd, "tolist")
        else "convert it to one of these types, or keep it outside the SharedList"
    )
    if odd in (np.datetime64, np.timedelta64):
        hint = 'convert it with int(x.astype("int64"))'
    raise ConfigError(
        f"item {index} {'is' if type(item) is odd else 'holds'} a {name}; a SharedList holds texts, bytes, numbers, "
        f"booleans, None, and tuples, lists and dicts of these: {hint}"
    )


def _too_deep(item: Any, index: int) -> ConfigError:
    depth = _depth_of(item)
    if depth is None:
        return ConfigError(f"item {index} contains itself; a SharedList cannot hold it")
    return ConfigError(
        f"item {index} is nested too deep: {depth} containers lie inside each other, which is more than Python's "
        f"limit of {sys.getrecursionlimit()} nested calls allows; store its parts as separate items"
    )


def _depth_of(item: Any) -> int | None:
    """How many containers lie inside each other; None if a container contains itself."""
    deepest, way, inside = 0, [item], {id(item)}
    coming = [_parts_of(item)]
    while coming:
        deepest = max(deepest, len(coming))
        part = next((part for part in coming[-1] if type(part) in (dict, tuple, list)), None)
        if part is None:
            coming.pop()
            inside.discard(id(way.pop()))
        elif id(part) in inside:
            return None
        else:
            way.append(part)
            inside.add(id(part))
            coming.append(_parts_of(part))
    return deepest


def _parts_of(item: Any) -> Iterator[Any]:
    return itertools.chain(item, item.values()) if type(item) is dict else iter(item)


def _odd_type(item: Any) -> type | None:
    kind = type(item)
    if kind in _KINDS:
        return None
    if kind not in (dict, tuple, list):
        return kind
    for part in _parts_of(item):
        odd = None if type(part) in _KINDS else _odd_type(part)
        if odd is not None:
            return odd
    return None
