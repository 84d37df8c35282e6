"""Finds the members of a tar archive header by header, without reading the data between the headers.

In:  the bytes of an archive, by offset.
Out: regular members with the places of their data; faults with their reasons; the form that ``penstock pack`` wrote.
Runs in: trainer, command line.

Reads ustar, pax and GNU archives. No header is trusted: each size is compared with the size of the file, extension
headers have limits, and everything that is not a regular file with a relative name is a fault.
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
"""The most bytes of a long name or of pax records."""
_MOST_EXTENSIONS = 16
"""The most extension headers before one member."""
_FORM_KEY = b"PENSTOCK.form"

_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_NO_DATA = {b"1": "hard link", b"2": "symbolic link", b"3": "device", b"4": "device", b"6": "named pipe"}

Read = Callable[[int, int], bytes]
"""(offset, length) -> bytes; fewer than ``length`` only at the end of the file."""


class TarMember(NamedTuple):
    """A regular file in the archive."""

    name: bytes
    offset: int
    """Where the data of the member begin."""
    size_bytes: int


class Fault(NamedTuple):
    """A part of the archive that cannot be used in a sample."""

    reason: str
    """One or two words, by which faults are counted."""
    offset: int
    """Where the header of the part begins."""
    name: bytes
    """The name of the member; empty if it is unknown."""
    text: str
    """What is wrong, in words."""
    is_end: bool
    """Whether nothing after this part can be found."""


class Form(NamedTuple):
    """A text that says how to rebuild the samples, as ``penstock pack`` wrote it."""

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
                yield Fault("damaged header", offset, b"", "an extension header has no member after it", True)
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
                text = f"an extension header claims {stated} bytes, more than the limit of {_MOST_EXTENSION_BYTES}"
                yield Fault("oversized header", offset, b"", text, True)
                return
            data = window.at(data_at, stated)
            if kind == b"g":
                form = _form_of(data)
                if form is not None:
                    yield Form(form)
            elif not ahead.take(kind, data):
                text = f"an extension header cannot be read, or more than {_MOST_EXTENSIONS} are before one member"
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
            yield Fault("link or device", offset, name, f"it is a {_NO_DATA[kind]}, not a file", False)
            offset = data_at
            continue
        if kind == b"S":
            # The map of a sparse member may continue in further blocks; each says whether another one follows.
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
                yield Fault("unknown type", offset, name, f"it is of type {kind!r}, not a file", False)
        if is_sparse:
            yield Fault("sparse", offset, name, "it is a sparse file, whose holes could have any size", False)
        elif kind in b"0\x007":
            if name.startswith(b"/") or (b".." in name and b".." in name.split(b"/")):
                yield Fault("unsafe name", offset, name, "its name leads outside the archive", False)
            else:
                yield TarMember(name, data_at, size)
        offset = _next_block(data_at + size)


@dataclass
class _Ahead:
    """What extension headers say about the next member. If two headers disagree, the first one counts."""

    name: bytes | None = None
    size: int | None = None
    is_sparse: bool = False
    count: int = 0

    def take(self, kind: bytes, data: bytes) -> bool:
        """False if the header cannot be read, or if there are too many headers."""
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
            # A number of thousands of digits takes long to convert and cannot be a size.
            if not text.isdigit() or len(text) > 20:
                return False
            self.size = int(text)
        return True


class _Window:
    """Reads through a buffer, which is large while headers follow one another closely, and small after a long gap."""

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
    # The low half of an adler32 is the sum of up to 257 bytes plus one, and many times faster to compute than a sum in
    # Python.
    blanked = header[:148] + b"        " + header[156:256]
    total = (zlib.adler32(blanked) & 0xFFFF) + (zlib.adler32(header[256:]) & 0xFFFF) - 2
    if stated == total:
        return None
    # Some old writers summed the bytes as signed numbers.
    if stated is not None and stated == total - 256 * sum(byte > 127 for byte in blanked + header[256:]):
        return None
    if offset == 0:
        return _foreign(header)
    return Fault("damaged header", offset, b"", "its header has a wrong checksum", True)


def _foreign(header: bytes) -> Fault:
    for magic, name in _COMPRESSED.items():
        if header.startswith(magic):
            text = f"it is compressed with {name}, so no sample can be read without decompressing everything before it"
            return Fault("compressed", 0, b"", text + ": decompress it, or re-pack it with `penstock pack`", True)
    return Fault("not a tar archive", 0, b"", "there is no tar header at its beginning", True)


def _cut(offset: int, size_bytes: int) -> Fault:
    if size_bytes == 0:
        return Fault("truncated", 0, b"", "the file is empty", True)
    text = f"the end mark is missing: the {size_bytes} bytes end where a header or the end mark should begin"
    return Fault("truncated", offset, b"", text + "; the file was cut short or never finished", True)


def _lying(offset: int, name: bytes, stated: int | None, size_bytes: int) -> Fault:
    if stated is None:
        return Fault("impossible size", offset, name, "its header has a size that is not a number", True)
    text = f"its header says {stated} bytes, but the file has {max(0, size_bytes - offset - BLOCK_BYTES)} more"
    return Fault("truncated", offset, name, text, True)


def _number(digits: bytes) -> int | None:
    """The number in octal text, or in base 256 if the first bit is set; None if it is neither, or negative."""
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
    # GNU archives keep other fields where ustar keeps the first part of a long name.
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
        # With a record that ends before it begins, this loop would never end.
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
