"""Turns a decoded row group into bytes, from which rows are read in place.

In:  record batches of a row group.
Out: bytes, which contain the batches one after another, each as an Arrow stream, and at the end their places.
Runs in: trainer and worker.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.data.arrow.rows import RowReader
from penstock.data.parquet.row_groups import arrow

if TYPE_CHECKING:
    import pyarrow as pa

_MAGIC = 0x70656E73746F636B
_ALIGNED_BYTES = 64
_MOST_OPENED = 256
"""A process keeps this many readers of batches for each group, each a few kilobytes."""


def encode(pieces: Iterable[pa.RecordBatch], batch_bytes: int) -> Iterator[memoryview]:
    """The bytes, in batches of about ``batch_bytes``. Large batches are faster to read than small ones, but a whole
    batch is in memory while it is encoded."""
    ends, firsts = [0], [0]
    for batch in _in_batches(pieces, batch_bytes):
        stream = _stream_of(batch)
        ends.append(ends[-1] + len(stream))
        firsts.append(firsts[-1] + batch.num_rows)
        yield stream
    numbers = np.array([*ends, *firsts, len(ends), _MAGIC], np.int64)
    yield memoryview(bytes(-numbers.nbytes % _ALIGNED_BYTES) + numbers.tobytes())


class EncodedRows:
    """The rows of one group."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        count, magic = np.frombuffer(view, np.int64)[-2:].tolist()
        if magic != _MAGIC:
            raise ValueError("the bytes are not the rows of a row group")
        numbers = np.frombuffer(view, np.int64)[-2 - 2 * count : -2]
        self._ends, self._firsts = numbers[:count].tolist(), numbers[count:].copy()
        self._first_of = self._firsts.tolist()
        self._opened: dict[int, RowReader] = {}

    def read(self, places: np.ndarray, columns: list[list[Any]]) -> None:
        """Append the values at ``places``, which ascend, to ``columns``."""
        batches = self._firsts.searchsorted(places, "right") - 1
        changes = np.flatnonzero(batches[1:] != batches[:-1]) + 1
        for first, end in pairwise([0, *changes.tolist(), len(places)]):
            batch = int(batches[first])
            self._reader(batch).read(places[first:end] - self._first_of[batch], columns)

    def row(self, place: int) -> list[Any]:
        """The row at ``place``, as one value per column."""
        batch = bisect_right(self._first_of, place) - 1
        return (self._opened.get(batch) or self._reader(batch)).row(place - self._first_of[batch])

    def _reader(self, batch: int) -> RowReader:
        reader = self._opened.get(batch)
        if reader is None:
            pa = arrow()
            stream = pa.ipc.open_stream(pa.py_buffer(self._view[self._ends[batch] : self._ends[batch + 1]]))
            reader = RowReader(stream.read_next_batch())
            if len(self._opened) >= _MOST_OPENED:
                self._opened.clear()
            self._opened[batch] = reader
        return reader


def joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch with the rows of several; a text that is in several dictionaries is in the joined dictionary once."""
    if len(batches) == 1:
        return batches[0]
    (batch,) = arrow().Table.from_batches(batches).unify_dictionaries().combine_chunks().to_batches()
    return batch


def _in_batches(pieces: Iterable[pa.RecordBatch], batch_bytes: int) -> Iterator[pa.RecordBatch]:
    waiting: list[pa.RecordBatch] = []
    waiting_bytes = 0
    for piece in pieces:
        if waiting and waiting[0].schema != piece.schema:
            # Texts are dictionary columns from here on.
            yield joined(waiting)
            waiting, waiting_bytes = [], 0
        waiting.append(piece)
        waiting_bytes += piece.nbytes
        if waiting_bytes >= batch_bytes:
            yield joined(waiting)
            waiting, waiting_bytes = [], 0
    if waiting:
        yield joined(waiting)


def _stream_of(batch: pa.RecordBatch) -> memoryview:
    pa = arrow()
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, batch.schema) as writer:
        writer.write_batch(batch)
    out.write(bytes(-out.tell() % _ALIGNED_BYTES))
    return memoryview(out.getvalue())
