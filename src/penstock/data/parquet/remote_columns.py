"""Columns of a row group that lies elsewhere, in few requests.

In:  a source, and where the wanted columns are in it.
Out: a file for pyarrow, which asks for one column after another.
Runs in: trainer and worker.

A request to a store takes as long as many megabytes do. Columns side by side come in one request, held until all of
them were read; a group too large for that is read in pieces as large as memory allows.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from penstock.data.sources import Source
from penstock.units import KIB, MIB

Range = tuple[int, int]
"""First byte, length."""

_HOLE_BYTES = 64 * KIB
"""Between two columns, less than this is read along: a request more would take longer."""
_MERGED_BYTES = 32 * MIB
_WHOLE_BYTES = 64 * MIB
"""Of a group whose columns take more, as stored, buffers of this size together are filled instead."""
_LEAST_BUFFER_BYTES = MIB


def merged(chunks: Sequence[Range]) -> list[Range]:
    """Ranges that hold all chunks, neighbours together, in order."""
    found: list[Range] = []
    for start, length in sorted(chunks):
        if found:
            first, before = found[-1]
            end = max(first + before, start + length)
            if start - (first + before) <= _HOLE_BYTES and end - first <= _MERGED_BYTES:
                found[-1] = first, end - first
                continue
        found.append((start, length))
    return found


def buffer_bytes_for(chunks: Sequence[Range]) -> int:
    """How much of each column to ask for at a time; 0: all of it."""
    if sum(length for _, length in chunks) <= _WHOLE_BYTES:
        return 0
    return max(_LEAST_BUFFER_BYTES, _WHOLE_BYTES // len(chunks))


class RemoteColumns(io.RawIOBase):
    """A source with a position. Each of ``chunks`` is asked for once, in any order, and read with its neighbours."""

    def __init__(self, source: Source, chunks: Sequence[Range]) -> None:
        self._source = source
        self._position = 0
        self._ranges = merged(chunks)
        self._left = [sum(length for start, length in chunks if _is_in((start, length), r)) for r in self._ranges]
        """Of each range, how many bytes of chunks were not asked for yet."""
        self._held: dict[int, bytes] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.size_bytes}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        length = self._source.size_bytes - self._position if size is None or size < 0 else size
        data = self._read_at(self._position, length)
        self._position += len(data)
        return data

    def _read_at(self, offset: int, length: int) -> bytes:
        place = next((at for at, around in enumerate(self._ranges) if _is_in((offset, length), around)), None)
        if place is None:
            return self._source.read(offset, length)
        start, size = self._ranges[place]
        data = self._held.get(place)
        if data is None:
            data = self._held[place] = self._source.read(start, size)
        self._left[place] -= length
        if self._left[place] <= 0:
            del self._held[place]
        return data if length == size else data[offset - start : offset - start + length]


def _is_in(inner: Range, outer: Range) -> bool:
    return outer[0] <= inner[0] and inner[0] + inner[1] <= outer[0] + outer[1]
