"""Reads the row groups of a dataset on demand, or keeps all of them in memory that all workers share.

In:  files, and how much memory their rows may take.
Out: values of rows, by row group and place in it.
Runs in: trainer and worker.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.data.arrow.rows import RowReader
from penstock.data.parquet.decoded_groups_file import DecodedGroups
from penstock.data.parquet.encoded_rows import EncodedRows, encode, joined
from penstock.data.parquet.row_groups import ParquetFiles, arrow
from penstock.data.shared.shared_bytes import SharedBytes
from penstock.errors import DataError
from penstock.units import MIB, format_bytes

if TYPE_CHECKING:
    import pyarrow as pa

_PIECE_BYTES = 1 << 20
"""Bytes that are decoded at a time."""
_MOST_ROWS = 1 << 10
"""The most rows that are decoded at a time: a text that is stored once may be repeated in every row."""
_PROBED_ROWS = 16
_REPEATED, _REPEATED_PIECE_BYTES = 4, 8 << 20
"""If decoded rows are this many times as large as stored rows, texts are read as dictionaries, in pieces of this many
bytes."""
_RETURN_BYTES = 3 << 20
"""After reading this many bytes piece by piece, memory that malloc still holds is returned to the system. Returning it
takes as long as reading a small group, so it is not done after each read."""
_LEAST_BATCH_BYTES, _MOST_BATCH_BYTES = 1 << 20, 8 << 20
"""The least and the largest size of the batches of a decoded group."""
_MAPPED_SHARE = 2
"""A process maps decoded groups of up to this many times ``keep``. All processes and the page cache share these pages.
The factor lets an ordinary file that consists of one such row group stay mapped."""
_ULTRA_MAPPED_BYTES = 8 * MIB
_NO_FILE = "no temporary file can be created"
_MOST_OPENED = 64
"""Of the groups in shared memory, a process keeps this many readers."""


class GroupPieces:
    """Decodes row groups piece by piece. The size of the pieces depends on rows that were decoded before, because the
    file stores a repeated text once."""

    def __init__(self, files: ParquetFiles) -> None:
        self.files = files
        self._row_bytes = 0
        """The mean size of a row in that piece whose rows were the largest so far."""
        self.repeats = False
        """Whether texts are repeated so often that they are read as dictionaries."""

    def of(self, group: int) -> Iterator[pa.RecordBatch]:
        """The rows of a group, about ``_PIECE_BYTES`` at a time. Once texts turn out to be repeated, the columns of
        texts in all further pieces are dictionary columns."""
        rows = self._rows_of(group)
        stored_bytes = int(self.files.group_bytes[group])
        if self.files.has_texts and not self.repeats and not self._row_bytes:
            for piece in self.files.read_pieces(group, _PROBED_ROWS):
                self._row_bytes = max(1, piece.nbytes // piece.num_rows)
                break
        if self.files.texts and self._row_bytes * rows > _REPEATED * stored_bytes + _PIECE_BYTES:
            self.repeats = True
        done = decoded_bytes = 0
        if not self.repeats:
            at_a_time = max(1, int(_PIECE_BYTES / max(stored_bytes / rows, self._row_bytes, 1)))
            if self.files.has_texts:
                at_a_time = min(at_a_time, _MOST_ROWS)
            for piece in self.files.read_pieces(group, at_a_time):
                self._row_bytes = max(self._row_bytes, piece.nbytes // max(1, piece.num_rows))
                done += piece.num_rows
                decoded_bytes += piece.nbytes
                yield piece
                if self.files.texts and decoded_bytes > _REPEATED * stored_bytes + _PIECE_BYTES:
                    self.repeats = True
                    break
            else:
                return
        # Each piece contains the whole dictionary, so there should be few pieces.
        fit = int(_REPEATED_PIECE_BYTES * rows / max(1, stored_bytes))
        first = 0
        for piece in self.files.read_pieces(group, max(_MOST_ROWS, min(rows, fit)), repeated=True):
            if first + piece.num_rows > done:
                yield piece.slice(max(0, done - first))
            first += piece.num_rows

    def all_of(self, group: int) -> Iterator[pa.RecordBatch]:
        """The pieces of a group, as from ``of``. Raises DataError if the group has fewer rows than its footer says."""
        rows = 0
        for piece in self.of(group):
            rows += piece.num_rows
            yield piece
        self.check_rows(group, rows)

    def check_rows(self, group: int, found: int) -> None:
        rows = self._rows_of(group)
        if found != rows:
            raise DataError(
                f"{self.files.name(group)} has {found} rows, but its footer says {rows}; the file is damaged"
            )

    def _rows_of(self, group: int) -> int:
        return int(self.files.starts[group + 1] - self.files.starts[group])


class GroupsOnDemand:
    """Reads groups on demand. Each process keeps the groups that it used last, up to a limit in bytes. Groups larger
    than the limit are decoded once for all processes."""

    def __init__(self, files: ParquetFiles, keep_bytes: int, *, keeps: bool) -> None:
        self._files = files
        self._pieces = GroupPieces(files)
        self._keep_bytes = keep_bytes
        self._keeps = keeps
        self._too_large: set[int] = set()
        """Groups that take more memory than the footer suggests."""
        self._kept_bytes = 0
        self._unreturned_bytes = 0
        mapped_bytes = _MAPPED_SHARE * keep_bytes if keeps else min(keep_bytes, _ULTRA_MAPPED_BYTES)
        self._decoded = DecodedGroups(_digest_of(files), files, mapped_bytes)
        self._batch_bytes = min(max(keep_bytes // 4, _LEAST_BATCH_BYTES), _MOST_BATCH_BYTES)
        large = np.flatnonzero(files.group_bytes > keep_bytes)
        # The file is created here and not in the workers, so that all workers share it, and share one warning.
        if len(large) and not self._decoded.join() and self._decoded.is_first_warning():
            self._warn(int(large[0]), _NO_FILE)
        # No lock, because a fork could inherit it locked: two threads that read the same group at once both decode it.
        self._kept: OrderedDict[int, RowReader] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": OrderedDict(), "_kept_bytes": 0}

    def read(self, group: int, places: np.ndarray, columns: list[list[Any]]) -> None:
        """Append the values at ``places`` of a group to ``columns``. ``places`` ascend."""
        reader = self._reader(group)
        if reader is not None:
            reader.read(places, columns)
            return
        rows = self._decoded.open(group, len(places)) or self._decode(group, len(places))
        if rows is not None:
            rows.read(places, columns)
        else:
            self._from_pieces(group, places, columns)

    def row(self, group: int, place: int) -> list[Any]:
        """One value per column."""
        reader = self._reader(group)
        if reader is not None:
            return reader.row(place)
        rows = self._decoded.open(group, 1) or self._decode(group, 1)
        if rows is not None:
            return rows.row(place)
        columns: list[list[Any]] = [[] for _ in self._files.schema.names]
        self._from_pieces(group, np.array([place]), columns)
        return [values[0] for values in columns]

    # -- groups that are kept ---------------------------------------------------------------------

    def _reader(self, group: int) -> RowReader | None:
        """The reader of a group that is kept; None if it takes more than may be kept."""
        reader = self._kept.get(group)
        if reader is None:
            return self._whole(group) if self._keeps and not self._is_large(group) else None
        # Another thread may have evicted the group in the meantime.
        with contextlib.suppress(KeyError):
            self._kept.move_to_end(group)
        return reader

    def _is_large(self, group: int) -> bool:
        return group in self._too_large or self._files.group_bytes[group] > self._keep_bytes

    def _whole(self, group: int) -> RowReader | None:
        self._make_room(int(self._files.group_bytes[group]))
        batch = self._within_keep(group)
        if batch is None and not self._pieces.repeats and self._files.texts:
            self._pieces.repeats = True
            batch = self._within_keep(group)
        if batch is None:
            self._too_large.add(group)
            return None
        reader = RowReader(batch)
        self._make_room(reader.nbytes)
        self._kept[group] = reader
        self._kept_bytes += reader.nbytes
        return reader

    def _within_keep(self, group: int) -> pa.RecordBatch | None:
        """All rows of a group; None if they turn out to take more than may be kept."""
        pieces, size_bytes, repeats = [], 0, self._pieces.repeats
        for piece in self._pieces.of(group):
            pieces.append(piece)
            # Dictionaries do not count here: pieces share them, and the footer says their size.
            size_bytes += sum(_bytes_without_dictionary(column) for column in piece.columns)
            if size_bytes > self._keep_bytes:
                return None
        if self._pieces.repeats != repeats:
            # The first pieces have plain columns of texts, so the group is read again with dictionary columns.
            return self._within_keep(group)
        self._pieces.check_rows(group, sum(piece.num_rows for piece in pieces))
        batch = joined(pieces)
        return batch if batch.nbytes <= self._keep_bytes else None

    def _make_room(self, need_bytes: int) -> None:
        while self._kept and self._kept_bytes + need_bytes > self._keep_bytes:
            with contextlib.suppress(KeyError):
                self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes

    # -- groups that are not kept ------------------------------------------------------------------------

    def _decode(self, group: int, rows: int) -> EncodedRows | None:
        """Decode a large group for all processes, unless another process has done so; None if there is no room for
        it."""
        if not self._keeps and not self._is_large(group):
            return None
        problem: OSError | str | None = _NO_FILE
        if self._decoded.join():
            problem = self._decoded.why_not(group)
            if problem is None:
                try:
                    self._decoded.store(group, encode(self._pieces.all_of(group), self._batch_bytes))
                    self._return_memory()
                    return self._decoded.open(group, rows)
                except DataError:
                    raise
                except OSError as error:
                    problem = error
        if problem and self._decoded.is_first_warning():
            self._warn(group, problem)
        return None

    def _from_pieces(self, group: int, places: np.ndarray, columns: list[list[Any]]) -> None:
        """Read a group piece by piece up to the last wanted row, and keep only the wanted rows."""
        first = 0
        for piece in self._pieces.of(group):
            inside = places[(places >= first) & (places < first + piece.num_rows)]
            if len(inside):
                RowReader(piece).read(inside - first, columns)
            first += piece.num_rows
            if first > places[-1]:
                break
        else:
            self._pieces.check_rows(group, first)
        self._unreturned_bytes += int(self._files.group_bytes[group])
        if self._unreturned_bytes > _RETURN_BYTES or not self._keeps:
            self._return_memory()

    def _return_memory(self) -> None:
        self._unreturned_bytes = 0
        arrow().default_memory_pool().release_unused()

    def _warn(self, group: int, problem: OSError | str) -> None:
        warnings.warn(
            f"{self._files.name(group)} takes more memory than keep={format_bytes(self._keep_bytes)}, and its rows "
            f"cannot be kept in a temporary file ({problem}), so every read decodes it again from its beginning. "
            "Rewrite the files (penstock pack, or a smaller row_group_size), read them in blocks "
            "(BlockShuffleSampler), raise keep=, or set TMPDIR to a folder on a larger disk",
            RuntimeWarning,
            stacklevel=6,
        )


class GroupsInMemory:
    """All row groups in memory that all workers share."""

    def __init__(self, files: ParquetFiles) -> None:
        pieces = GroupPieces(files)
        ends = [0]

        def encoded() -> Iterator[memoryview]:
            for group in range(len(files.starts) - 1):
                size_bytes = 0
                for part in encode(pieces.all_of(group), _MOST_BATCH_BYTES):
                    size_bytes += len(part)
                    yield part
                ends.append(ends[-1] + size_bytes)

        self._bytes = SharedBytes.of(encoded())
        self._ends = np.array(ends, np.int64)
        self._opened: dict[int, EncodedRows] = {}
        arrow().default_memory_pool().release_unused()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": {}}

    def read(self, group: int, places: np.ndarray, columns: list[list[Any]]) -> None:
        (self._opened.get(group) or self._open(group)).read(places, columns)

    def row(self, group: int, place: int) -> list[Any]:
        return (self._opened.get(group) or self._open(group)).row(place)

    def _open(self, group: int) -> EncodedRows:
        if len(self._opened) >= _MOST_OPENED:
            self._opened.clear()
        first, end = (int(place) for place in self._ends[group : group + 2])
        rows = self._opened[group] = EncodedRows(self._bytes.view()[first:end])
        return rows


def _bytes_without_dictionary(column: pa.Array) -> int:
    return column.indices.nbytes if isinstance(column, arrow().DictionaryArray) else column.nbytes


def _digest_of(files: ParquetFiles) -> str:
    text = repr((files.made_of(), arrow().__version__))
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()
