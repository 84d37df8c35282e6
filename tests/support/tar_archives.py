"""Archives for tests: whole ones by webdataset and tarfile, broken ones header by header."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

END = bytes(1024)


def header(
    name: bytes, size: int | bytes = 0, *, kind: bytes = b"0", magic: bytes = b"ustar\x0000", prefix: bytes = b""
) -> bytes:
    """One header block with a checksum that holds, whatever else does not."""
    digits = size if isinstance(size, bytes) else b"%011o\0" % size
    block = name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + digits.ljust(12, b"\0") + b"00000000000\0"
    block += b" " * 8 + kind + bytes(100) + magic + bytes(32 + 32 + 8 + 8) + prefix.ljust(155, b"\0") + bytes(12)
    assert len(block) == 512
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def member(name: bytes, data: bytes = b"", **fields: bytes) -> bytes:
    return header(name, len(data), **fields) + padded(data)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def pax(records: dict[bytes, bytes], *, kind: bytes = b"x") -> bytes:
    text = b""
    for key, value in records.items():
        rest = b" " + key + b"=" + value + b"\n"
        length = len(rest)
        while len(str(length)) + len(rest) != length:
            length = len(str(length)) + len(rest)
        text += str(length).encode() + rest
    return member(b"./PaxHeaders/x", text, kind=kind)


def write(path: Path, *parts: bytes, end: bytes = END) -> str:
    path.write_bytes(b"".join(parts) + end)
    return str(path)


def write_texts(path: Path, names: Iterable[str], *, kind: int = tarfile.GNU_FORMAT) -> str:
    """A member per name, whose text is that name."""
    with tarfile.open(path, "w", format=kind) as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(name.encode())
            archive.addfile(info, io.BytesIO(name.encode()))
    return str(path)
