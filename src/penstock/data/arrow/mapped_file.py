"""One mapped Arrow file of this machine, whose record batches are read in place.

In:  a file in Arrow's file format, or in its stream format, which Hugging Face datasets writes.
Out: record batches by number; values of rows, which belong to the caller.
Runs in: trainer and worker. A mapped file needs no descriptor. No file is trusted: every offset is checked against the
mapping before it is used. But a file that is cut short while it is mapped kills the process that reads it (SIGBUS). So
penstock writes a new file and renames it, instead of changing a file.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.data.arrow.columns import OUTLINE_COLUMN, Layout, value_reader
from penstock.data.arrow.rows import row_of
from penstock.data.parquet.row_groups import arrow
from penstock.data.sample_forms import put_together
from penstock.data.shared.file_mapping import identity_of, map_private, shortage
from penstock.errors import DataError
from penstock.units import format_bytes

if TYPE_CHECKING:
    import pyarrow as pa

_MAGIC = b"ARROW1"
_MOST_ROWS = 1 << 50
_MAPPED_FROM_BYTES = 1 << 20
"""Smaller values are copied, which is faster than creating a mapping for each value and taking its page faults."""
_READY = 64
"""Readers of record batches that are kept for each file; fewer for compressed batches."""
READY_COMPRESSED = 2


class ArrowFile:
    """A mapped file. Any thread may read it."""

    def __init__(self, location: str, *, in_place: bool = False) -> None:
        """``in_place``: values of every size are views of one mapping, and what is written to them stays in it."""
        pa = arrow()
        self.location = location
        self._views: np.ndarray | None = None
        self._lock = threading.Lock()
        self._ready: OrderedDict[tuple[int, tuple[str, ...] | None], Callable[[int], Any]] = OrderedDict()
        self._checked: set[int] = set()
        with self._naming():
            fd = os.open(location, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self.identity = identity_of(fd)
                self.size_bytes = self.identity[2]
                if self.size_bytes < 8:
                    raise ValueError(f"it has only {self.size_bytes} bytes")
                if in_place:
                    self._views = map_private(fd, 0, self.size_bytes)
                if self._views is not None:
                    self._whole: pa.Buffer = pa.py_buffer(self._views)
                else:
                    with pa.memory_map(os.fsencode(location)) as mapped:
                        self._whole = mapped.read_buffer()
                if identity_of(fd) != self.identity or self._whole.size != self.size_bytes:
                    raise ValueError("it changed while it was opened")
            finally:
                os.close(fd)
            is_file = self._whole[: len(_MAGIC)].to_pybytes() == _MAGIC
            self._batches = _FileBatches(self._whole) if is_file else _StreamBatches(self._whole)
            self.schema = self._batches.schema
            if len(set(self.schema.names)) < len(self.schema.names):
                raise ValueError("it has several columns of the same name")
            self.layout = Layout.of_schema(self.schema)
            counted = [self._counted(number) for number in range(self._batches.count)]
        self.batch_rows = np.array([rows for rows, _, _ in counted], np.int64)
        self.batch_bytes = np.array([size for _, size, _ in counted], np.int64)
        self.compressed = np.array([not is_mapped for _, _, is_mapped in counted], np.bool_)
        """Whether each batch is compressed: a process that reads one row of it holds the whole batch in memory."""

    def reader(self, number: int, columns: tuple[str, ...] | None) -> Callable[[int], Any]:
        """A function that reads one row of a record batch; if samples are dicts, the function reads only the wanted
        columns."""
        known = (number, columns)
        with self._lock:
            read = self._ready.get(known)
            if read is not None:
                self._ready.move_to_end(known)
                return read
        with self._naming(number):
            batch = self._batch(number)
            if self.layout is None:
                read = self._plain_reader(number, batch, columns)
            else:
                read = self._sample_reader(number, batch, columns)
        with self._lock:
            self._ready[known] = read
            while len(self._ready) > (_READY if self._is_mapped(batch) else READY_COMPRESSED):
                self._ready.popitem(last=False)
        return read

    @contextlib.contextmanager
    def _naming(self, number: int | None = None) -> Iterator[None]:
        pa = arrow()
        where = self.location if number is None else f"record batch {number} of {self.location}"
        try:
            yield
        except DataError:
            raise
        except OSError as problem:
            raise DataError(f"{where} cannot be read: {problem.strerror or problem}") from problem
        except MemoryError as problem:
            raise DataError(f"{where} cannot be read, because memory ran out: {_cause_of(problem)}") from problem
        except (pa.ArrowException, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as problem:
            raise DataError(f"{where} is damaged or not an Arrow file: {problem}") from problem

    def _counted(self, number: int) -> tuple[int, int, bool]:
        """The rows and bytes of a record batch, and whether it can be used from the mapping without decompression."""
        batch = self._batches.get(number)
        if not 0 <= batch.num_rows < _MOST_ROWS:
            raise ValueError(f"record batch {number} claims {batch.num_rows} rows")
        return batch.num_rows, batch.get_total_buffer_size(), self._is_mapped(batch)

    def _batch(self, number: int) -> pa.RecordBatch:
        batch = self._batches.get(number)
        batch.validate()
        if batch.num_rows != self.batch_rows[number]:
            raise ValueError(
                f"it has {batch.num_rows} rows, but had {self.batch_rows[number]} when the dataset was made; "
                "the file was changed"
            )
        return batch

    def _plain_reader(self, number: int, batch: pa.RecordBatch, wanted: tuple[str, ...] | None) -> Callable[[int], Any]:
        """The reader for files of other programs, whose columns have Arrow's own types."""
        if number not in self._checked:
            # pyarrow does not check offsets again when it creates a value, and nested columns have many offsets.
            batch.validate(full=True)
            self._checked.add(number)

        chosen = batch if wanted is None else batch.select(list(wanted))

        def read(row: int) -> Any:
            with self._naming(number):
                return row_of(chosen, row)

        return read

    def _sample_reader(
        self, number: int, batch: pa.RecordBatch, wanted: tuple[str, ...] | None
    ) -> Callable[[int], Any]:
        layout = self.layout
        assert layout is not None
        rows = batch.num_rows
        readers = {
            name: value_reader(kept, batch.column(at), rows, self._take)
            for at, (name, kept) in enumerate(layout.columns.items())
            if wanted is None or name in wanted
        }
        outlines = layout.outlines
        places = None
        if len(outlines) > 1:
            places = batch.column(OUTLINE_COLUMN)
            data = places.buffers()[1]
            if places.type != arrow().int32() or data is None or data.size < 4 * rows:
                raise ValueError(f"its column {OUTLINE_COLUMN} is not valid")
            places = np.frombuffer(data, np.int32, rows)

        def read(row: int) -> Any:
            with self._naming(number):
                place = 0 if places is None else int(places[row])
                if not 0 <= place < len(outlines):
                    raise ValueError(
                        f"row {row} has outline number {place}, but there are only {len(outlines)} outlines"
                    )
                outline = outlines[place]
                if wanted is not None:
                    return {name: readers[name](row) for name in outline.names if name in readers}
                return put_together(outline, [readers[name](row) for name in outline.names])

        return read

    def _is_mapped(self, batch: pa.RecordBatch) -> bool:
        return all(self._place(buffer) is not None for column in batch.columns for buffer in column.buffers() if buffer)

    def _place(self, buffer: pa.Buffer) -> int | None:
        """Where in the file a buffer begins; None for a decompressed buffer, which is not part of the file."""
        start = buffer.address - self._whole.address
        return start if start >= 0 and start + buffer.size <= self.size_bytes else None

    def _take(self, buffer: pa.Buffer | None, start: int, length: int) -> np.ndarray:
        """Bytes of a buffer, which the caller may write to. The caller has checked them against the buffer's size."""
        if buffer is None or not length:
            return np.empty(0, np.uint8)
        at = self._place(buffer)
        if at is not None and self._views is not None:
            return self._views[at + start : at + start + length]
        if at is not None and length >= _MAPPED_FROM_BYTES:
            fd = os.open(self.location, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if identity_of(fd) != self.identity:
                    raise DataError(f"{self.location} has changed since the dataset was made; make the dataset again")
                found = map_private(fd, at + start, length)
            finally:
                os.close(fd)
            if found is not None:
                return found
        return np.frombuffer(buffer, np.uint8, length, start).copy()


def _cause_of(problem: MemoryError) -> str:
    too_many = shortage()
    if too_many is None:
        return str(problem) or "there is no memory left"
    return (
        f"{too_many}. Each value of {format_bytes(_MAPPED_FROM_BYTES)} or more needs a mapping for as long as it "
        "exists: hold fewer samples at a time, keep copies (.copy(), .clone()), or use ArrowDataset(..., "
        "in_place=True), which maps each file once"
    )


class _FileBatches:
    def __init__(self, whole: pa.Buffer) -> None:
        self._reader = arrow().ipc.open_file(whole)
        self.schema: pa.Schema = self._reader.schema
        self.count: int = self._reader.num_record_batches
        self._lock = threading.Lock()

    def get(self, number: int) -> pa.RecordBatch:
        with self._lock:
            return self._reader.get_batch(number)


class _StreamBatches:
    """The record batches of a stream; the place of each batch is found once."""

    def __init__(self, whole: pa.Buffer) -> None:
        ipc = arrow().ipc
        self._whole = whole
        self.schema: pa.Schema = ipc.open_stream(whole).schema
        self._places: list[int] = []
        source = arrow().BufferReader(whole)
        while True:
            place = source.tell()
            try:
                message = ipc.read_message(source)
            except EOFError:
                break
            if message.type == "record batch":
                self._places.append(place)
            elif message.type != "schema":
                raise ValueError(
                    f"the stream contains a {message.type}; dictionary columns can only be read in the file format"
                )
        self.count = len(self._places)

    def get(self, number: int) -> pa.RecordBatch:
        ipc = arrow().ipc
        message = ipc.read_message(arrow().BufferReader(self._whole.slice(self._places[number])))
        return ipc.read_record_batch(message, self.schema)
