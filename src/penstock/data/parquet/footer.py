"""A Parquet footer without what reading rows never asks for: statistics, page indexes, Bloom filters.

In:  the footer of a file, as Thrift's compact protocol writes it.
Out: the same, smaller; or as it was, where anything in it is not understood.
Runs in: trainer, when a dataset is made. Texts' smallest and largest values are most of a footer, and every read that
parses it would pay for them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_TRUE, _FALSE, _BYTE, _SHORT, _INT, _LONG, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_DEEPEST = 32
"""Structs and lists within each other: the format itself has 8."""
_LONGEST_VARINT_BYTES = 10

_Fields = Mapping[int, Any]
"""What becomes of a struct's fields, by number: None is left out, a mapping is for the structs inside. All others, and
new ones, stay: the schema that pyarrow keeps in the file's own pairs, what encrypted columns need."""
_COLUMN: _Fields = dict.fromkeys((12, 13, 14, 15, 16, 17))
"""Statistics, statistics of encodings, the Bloom filter's place and length, statistics of sizes and of places on
Earth."""
_CHUNK: _Fields = dict.fromkeys((4, 5, 6, 7)) | {3: _COLUMN}
"""Places and lengths of the page indexes."""
_GROUPS = 4
_FILE: _Fields = {_GROUPS: {1: _CHUNK}}
_ONE_STRUCT = bytes((1 << 4 | _STRUCT,))
"""A list of one struct begins so."""
_SIGNED = (8, 9)
"""Fields of the file that say how its footer is signed: changed, it would be refused."""


class _NotUnderstood(Exception):
    pass


def lean_metadata(written: bytes) -> bytes:
    """The file's metadata without statistics; the very same bytes where that cannot be."""
    lean = bytearray()
    try:
        if _copy_struct(written, 0, lean, _FILE, 0) != len(written):
            return written
    except (_NotUnderstood, IndexError):
        return written
    return bytes(lean) if len(lean) < len(written) else written


def cuts_of(metadata: bytes) -> list[int]:
    """Where the list of row groups begins, where each of them does, and where the last ends. Nothing, if in doubt."""
    at = number = 0
    cuts: list[int] = []
    try:
        while metadata[at]:
            kind, number, first = _field(metadata, at, number)
            at = _skip(metadata, first, kind, 0)
            if number in _SIGNED or (number == _GROUPS and (cuts or kind != _LIST)):
                return []
            if number == _GROUPS:
                element, count, place = _list(metadata, first)
                cuts = [first, place]
                for _ in range(count):
                    cuts.append(_skip(metadata, cuts[-1], element, 1))
    except (_NotUnderstood, IndexError):
        return []
    return cuts if at + 1 == len(metadata) else []


def of_one_group(metadata: memoryview, head_end: int, first: int, end: int, rest: int) -> bytes:
    """Metadata as if a file had one row group only: a few of the numbers from ``cuts_of``."""
    return b"".join((metadata[:head_end], _ONE_STRUCT, metadata[first:end], metadata[rest:]))


def reads_alike(one: Any, other: Any) -> bool:
    """Whether rows are read the same by either of two footers that pyarrow has parsed."""
    return (
        _counts(one) == _counts(other)
        and one.metadata == other.metadata
        and one.schema.equals(other.schema)
        and all(ours == theirs for ours, theirs in zip(_chunks(one), _chunks(other), strict=True))
    )


def _counts(about: Any) -> tuple[int, int, int]:
    return about.num_rows, about.num_row_groups, about.num_columns


def _chunks(about: Any) -> Iterator[tuple[Any, ...]]:
    for number in range(about.num_row_groups):
        group = about.row_group(number)
        yield group.num_rows, group.total_byte_size
        for leaf in range(about.num_columns):
            chunk = group.column(leaf)
            yield (
                chunk.data_page_offset,
                chunk.dictionary_page_offset,
                chunk.total_compressed_size,
                chunk.total_uncompressed_size,
                chunk.num_values,
                chunk.compression,
            )


def _copy_struct(data: bytes, at: int, lean: bytearray, fields: _Fields, depth: int) -> int:
    """Append the struct that begins at ``at``, less what ``fields`` leaves out; where it ends."""
    number = kept_number = 0
    copied = at
    while data[at]:
        start, before = at, number
        kind, number, at = _field(data, at, before)
        if fields is _FILE and number in _SIGNED:
            raise _NotUnderstood
        if number in fields and fields[number] is None:
            lean += data[copied:start]
            copied = at = _skip(data, at, kind, depth)
            continue
        if kept_number != before:
            # Headers count from the field before, and that one is gone.
            lean += _header(kind, number - kept_number, number)
            copied = at
        kept_number = number
        if number in fields:
            lean += data[copied:at]
            copied = at = _copy_structs(data, at, kind, lean, fields[number], depth + 1)
        else:
            at = _skip(data, at, kind, depth)
    lean += data[copied : at + 1]
    return at + 1


def _copy_structs(data: bytes, at: int, kind: int, lean: bytearray, fields: _Fields, depth: int) -> int:
    """The same for a field that is a struct or a list of them."""
    if kind == _STRUCT:
        return _copy_struct(data, at, lean, fields, depth)
    element, count, first = _list(data, at)
    if kind != _LIST or (count and element != _STRUCT):
        raise _NotUnderstood
    lean += data[at:first]
    at = first
    for _ in range(count):
        at = _copy_struct(data, at, lean, fields, depth)
    return at


def _skip(data: bytes, at: int, kind: int, depth: int) -> int:
    """Where a field's value ends. Each element of a list has a byte at least, so no more is looked at than is there."""
    if _BYTE < kind <= _LONG:
        while data[at] > 127:
            at += 1
        return at + 1
    if kind == _BINARY:
        length, at = _varint(data, at)
        return at + length
    if kind in (_TRUE, _FALSE):
        return at  # The header has said it.
    if kind in (_BYTE, _DOUBLE):
        return at + (1 if kind == _BYTE else 8)
    if depth >= _DEEPEST:
        raise _NotUnderstood
    if kind == _STRUCT:
        while header := data[at]:
            at = at + 1 if header > 15 else _varint(data, at + 1)[1]
            at = _skip(data, at, header & 15, depth + 1)
        return at + 1
    if kind in (_LIST, _SET):
        element, count, at = _list(data, at)
        return _skip_elements(data, at, (element,), count, depth + 1)
    if kind == _MAP:
        count, at = _varint(data, at)
        if not count:
            return at
        return _skip_elements(data, at + 1, (data[at] >> 4, data[at] & 15), count, depth + 1)
    raise _NotUnderstood


def _skip_elements(data: bytes, at: int, kinds: tuple[int, ...], count: int, depth: int) -> int:
    for _ in range(count):
        for kind in kinds:
            # In a list a truth has a byte of its own.
            at = at + 1 if kind in (_TRUE, _FALSE) else _skip(data, at, kind, depth)
            if at > len(data):
                raise _NotUnderstood
    return at


def _field(data: bytes, at: int, before: int) -> tuple[int, int, int]:
    """Of the field whose header begins at ``at``: its type, its number, and where its value is."""
    header = data[at]
    if header > 15:
        return header & 15, before + (header >> 4), at + 1
    number, at = _varint(data, at + 1)
    return header, (number >> 1) ^ -(number & 1), at


def _header(kind: int, step: int, number: int) -> bytes:
    if 0 < step <= 15:
        return bytes((step << 4 | kind,))
    coded = bytearray((kind,))
    rest = number << 1 if number >= 0 else ~(number << 1)
    while rest > 127:
        coded.append(rest & 127 | 128)
        rest >>= 7
    coded.append(rest)
    return bytes(coded)


def _list(data: bytes, at: int) -> tuple[int, int, int]:
    """Of a list: its elements' type, how many, and where the first is."""
    count, at = data[at] >> 4, at + 1
    element = data[at - 1] & 15
    if count == 15:
        count, at = _varint(data, at)
    return element, count, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    if value < 128:
        return value, at + 1
    value &= 127
    for place in range(1, _LONGEST_VARINT_BYTES):
        byte = data[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise _NotUnderstood
