"""The members of a tar archive: header by header, without reading what is between them.

In:  an archive's bytes, by place.
Out: regular members with the place of their data; faults, with the reason; the form that ``penstock pack`` notes.
Runs in: trainer, command line.

Understood are ustar, pax and GNU archives. Nothing here trusts a header: a size is held against the file's own, an
extension against a limit, and whatever is no regular file with a relative name is a fault.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

BLOCK_BYTES = 512
_ZEROS = bytes(BLOCK_BYTES)
_LEAST_READ_BYTES, _MOST_READ_BYTES = 4 << 10, 1 << 20
_MOST_EXTENSION_BYTES = 1 << 20
"""Long names and pax records above this are no names."""
_MOST_EXTENSIONS = 16
"""Extension headers before one member."""
_FORM_KEY = b"PENSTOCK.form"

_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_NO_DATA = {b"1": "hard link", b"2": "symbolic link", b"3": "device", b"4": "device", b"6": "named pipe"}

Read = Callable[[int, int], bytes]
"""Offset and length to bytes, fewer only at the end of the file."""


class TarMember(NamedTuple):
    """A regular file in the archive."""

    name: bytes
    offset: int
    """Of its data."""
    size_bytes: int


class Fault(NamedTuple):
    """Something no sample is made of."""

    reason: str
    """One word or two, to be counted by."""
    offset: int
    """Of the header."""
    name: bytes
    """Empty if it is not known."""
    text: str
    """What is wrong, in words."""
    is_end: bool
    """Nothing after it can be found."""


class Form(NamedTuple):
    """How ``penstock pack`` says the samples are to be put together again."""

    text: str


def walk(read: Read, size_bytes: int) -> Iterator[TarMember | Fault | Form]:
    """Everything in the archive, in order, up to its end or to the first fault that hides what follows."""
    window = _Window(read)
    offset, ahead = 0, _Ahead()
    while True:
        header = window.at(offset, BLOCK_BYTES)
        if len(header) < BLOCK_BYTES:
            yield _foreign(header) if offset == 0 and size_bytes else _cut(offset, size_bytes)
            return
        if header == _ZEROS:
            if ahead.count:
                yield Fault("damaged header", offset, b"", "an extension header without a member", True)
            return
        problem = _damage(header, offset)
        if problem is not None:
            yield problem
            return
        kind = header[156:157]
        data_at = offset + BLOCK_BYTES
        stated = _number(header[124:136])
        if kind in b"gxXLK":
            if stated is None or data_at + stated > size_bytes:
                yield _lying(offset, b"", stated, size_bytes)
                return
            if stated > _MOST_EXTENSION_BYTES:
                text = f"an extension header of {stated} bytes"
                yield Fault("oversized header", offset, b"", text, True)
                return
            data = window.at(data_at, stated)
            if kind == b"g":
                form = _form_of(data)
                if form is not None:
                    yield Form(form)
            elif not ahead.take(kind, data):
                text = f"an extension header that cannot be read, or more than {_MOST_EXTENSIONS} before one member"
                yield Fault("damaged header", offset, b"", text, True)
                return
            offset = _next_block(data_at + stated)
            continue
        name = ahead.name if ahead.name is not None else _name_of(header)
        size, is_sparse = stated if ahead.size is None else ahead.size, ahead.is_sparse
        if ahead.count:
            ahead = _Ahead()
        if kind == b"5" or (kind == b"\0" and name.endswith(b"/")):
            offset = data_at
            continue
        if kind in _NO_DATA:
            yield Fault("link or device", offset, name, f"a {_NO_DATA[kind]}, not a file", False)
            offset = data_at
            continue
        if kind == b"S":
            # The map of a sparse member may go on in blocks of its own, each saying whether another follows.
            more = header[482]
            while more:
                block = window.at(data_at, BLOCK_BYTES)
                data_at += BLOCK_BYTES
                more = len(block) == BLOCK_BYTES and block[504]
        if size is None or data_at + size > size_bytes:
            yield _lying(offset, name, size, size_bytes)
            return
        if kind not in b"0\x007":
            is_sparse = is_sparse or kind == b"S"
            if not is_sparse:
                yield Fault("unknown type", offset, name, f"of type {kind!r}, not a file", False)
        if is_sparse:
            yield Fault("sparse", offset, name, "a sparse file; its holes could have any size", False)
        elif kind in b"0\x007":
            if name.startswith(b"/") or (b".." in name and b".." in name.split(b"/")):
                yield Fault("unsafe name", offset, name, "named as if it lay outside the archive", False)
            else:
                yield TarMember(name, data_at, size)
        offset = _next_block(data_at + size)


@dataclass
class _Ahead:
    """What extension headers say about the member to come; the first to say it is believed."""

    name: bytes | None = None
    size: int | None = None
    is_sparse: bool = False
    count: int = 0

    def take(self, kind: bytes, data: bytes) -> bool:
        """False: it cannot be read, or there are too many."""
        self.count += 1
        if self.count > _MOST_EXTENSIONS:
            return False
        if kind == b"K":
            return True
        if kind == b"L":
            if self.name is None:
                self.name = data.partition(b"\0")[0]
            return True
        records = _records_of(data)
        if records is None:
            return False
        self.is_sparse |= any(key.startswith(b"GNU.sparse.") for key in records)
        if self.name is None:
            self.name = records.get(b"path")
        if self.size is None and b"size" in records:
            text = records[b"size"]
            # Thousands of digits are no size, and costly to convert.
            if not text.isdigit() or len(text) > 20:
                return False
            self.size = int(text)
        return True


class _Window:
    """Reads grow while headers follow one another, and are small again after a long stretch of data."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._start, self._data = 0, b""
        self._next_bytes = _LEAST_READ_BYTES

    def at(self, offset: int, length: int) -> bytes:
        start = offset - self._start
        if start >= 0 and start + length <= len(self._data):
            return self._data[start : start + length]
        is_near = start <= len(self._data) + self._next_bytes
        self._next_bytes = min(2 * self._next_bytes, _MOST_READ_BYTES) if is_near else _LEAST_READ_BYTES
        self._start, self._data = offset, self._read(offset, max(length, self._next_bytes))
        return self._data[:length]


def _damage(header: bytes, offset: int) -> Fault | None:
    stated = _number(header[148:156])
    # The low half of an adler32 is the sum of up to 257 bytes plus one: many times faster than adding them here.
    blanked = header[:148] + b"        " + header[156:256]
    total = (zlib.adler32(blanked) & 0xFFFF) + (zlib.adler32(header[256:]) & 0xFFFF) - 2
    if stated == total:
        return None
    # Some old writers added bytes as signed ones.
    if stated is not None and stated == total - 256 * sum(byte > 127 for byte in blanked + header[256:]):
        return None
    if offset == 0:
        return _foreign(header)
    return Fault("damaged header", offset, b"", "a header whose checksum does not hold", True)


def _foreign(header: bytes) -> Fault:
    for magic, name in _COMPRESSED.items():
        if header.startswith(magic):
            text = f"compressed with {name}; nothing in it can be reached without reading all before it"
            return Fault("compressed", 0, b"", text + ": decompress it, or re-pack it with `penstock pack`", True)
    return Fault("not a tar archive", 0, b"", "no tar header at its beginning", True)


def _cut(offset: int, size_bytes: int) -> Fault:
    if size_bytes == 0:
        return Fault("truncated", 0, b"", "an empty file", True)
    text = f"no end mark: its {size_bytes} bytes end where a header or that mark should begin"
    return Fault("truncated", offset, b"", text + "; it was cut short or never finished", True)


def _lying(offset: int, name: bytes, stated: int | None, size_bytes: int) -> Fault:
    if stated is None:
        return Fault("impossible size", offset, name, "a size that is no size", True)
    text = f"{stated} bytes are said to follow, the file has {max(0, size_bytes - offset - BLOCK_BYTES)} more"
    return Fault("truncated", offset, name, text, True)


def _number(digits: bytes) -> int | None:
    """Octal text, or base 256 where the first bit says so; None: neither, or negative."""
    if digits[0] >= 0x80:
        return int.from_bytes(digits[1:], "big") if digits[0] == 0x80 else None
    text = digits.partition(b"\0")[0].strip(b" ")
    if not text:
        return 0
    try:
        return int(text, 8) if text.isdigit() else None
    except ValueError:
        return None


def _name_of(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    # GNU archives keep other things where ustar keeps the first part of a long name.
    if header[345] and header[257:263] == b"ustar\0":
        return header[345:500].partition(b"\0")[0] + b"/" + name
    return name


def _records_of(data: bytes) -> dict[bytes, bytes] | None:
    """Records of a pax header: length, space, key=value, newline."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(data) and data[at]:
        space = data.find(b" ", at, at + 20)
        if space < 0 or not data[at:space].isdigit():
            return None
        end = at + int(data[at:space])
        # One that ended before it began would be read for ever.
        if not space < end <= len(data) or data[end - 1] != 0x0A:
            return None
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if not equals:
            return None
        records[key] = value
        at = end
    return records


def _form_of(data: bytes) -> str | None:
    form = (_records_of(data) or {}).get(_FORM_KEY)
    return None if form is None else form.decode("utf-8", "replace")


def _next_block(offset: int) -> int:
    return -(-offset // BLOCK_BYTES) * BLOCK_BYTES
