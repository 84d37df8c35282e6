"""Reads rows of Parquet files for `penstock pack`, in file order.

In:  locations of files.
Out: rows as Arrow columns, or as dicts, by number.
Runs in: pack's workers; created in the command line.

A row group is decoded from its beginning up to the wanted rows, and the decoder keeps its position. A worker that reads
rows in order therefore decodes a group once, even if the group is cut into many shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.data.arrow.rows import row_of
from penstock.data.parquet.row_groups import ParquetFiles, arrow, readable
from penstock.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

_PIECE_ROWS, _PIECE_BYTES = 8192, 8 << 20
"""The most rows and the most bytes that are read at a time."""


class ParquetTables:
    """Rows of Parquet files as Arrow columns, by range."""

    def __init__(self, locations: list[str]) -> None:
        self.files = ParquetFiles(locations, None)
        pa = arrow()
        # An Arrow file may have one dictionary for each column; in Parquet, each row group has its own.
        fields = [
            each.with_type(each.type.value_type) if pa.types.is_dictionary(each.type) else each
            for each in self.files.schema
        ]
        self.schema: pa.Schema = pa.schema(fields)
        self._group = -1
        self._pieces: Iterator[pa.RecordBatch] = iter(())
        self._piece: pa.RecordBatch | None = None
        self._first = 0

    def __len__(self) -> int:
        return int(self.files.starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        # A copy starts without the position of the original.
        return self.__dict__ | {"_group": -1, "_pieces": iter(()), "_piece": None, "_first": 0}

    def row_bytes(self) -> float:
        return float(self.files.group_bytes.sum()) / max(1, len(self))

    def batches(self, first: int, end: int) -> Iterator[pa.RecordBatch]:
        """Rows from ``first`` up to ``end``."""
        while first < end:
            piece, at = self.find(first)
            rows = min(end - first, piece.num_rows - at)
            yield piece.slice(at, rows).cast(self.schema)
            first += rows

    def find(self, row: int) -> tuple[pa.RecordBatch, int]:
        """A piece that contains the row, and the place of the row in it."""
        group = int(np.searchsorted(self.files.starts, row, "right")) - 1
        if group != self._group or row < self._first:
            self._begin(group)
        while self._piece is None or row >= self._first + self._piece.num_rows:
            self._first += 0 if self._piece is None else self._piece.num_rows
            self._piece = next(self._pieces, None)
            self._check()
        assert self._piece is not None
        return self._piece, row - self._first

    def _begin(self, group: int) -> None:
        rows = int(self.files.starts[group + 1] - self.files.starts[group])
        at_a_time = _PIECE_BYTES * rows // max(1, int(self.files.group_bytes[group]))
        self._pieces = self.files.read_pieces(group, min(max(1, at_a_time), _PIECE_ROWS))
        self._group, self._piece, self._first = group, None, int(self.files.starts[group])

    def _check(self) -> None:
        """Raise DataError if the group has fewer or more rows than its footer says."""
        end, group = int(self.files.starts[self._group + 1]), self._group
        read = self._first + (0 if self._piece is None else self._piece.num_rows)
        is_wrong = read < end if self._piece is None else read > end
        if not is_wrong and read == end:
            is_wrong = next(self._pieces, None) is not None
        if is_wrong:
            self._group, self._piece = -1, None
            raise DataError(
                f"{self.files.name(group)} has more or fewer rows than its footer says; the file is damaged"
            )


class ParquetRows:
    """A dict per row, as in ``ParquetDataset``. Reading rows in order is fast, even in large row groups."""

    def __init__(self, tables: ParquetTables) -> None:
        self._tables = tables

    def __len__(self) -> int:
        return len(self._tables)

    def __getitem__(self, index: int) -> dict[str, Any]:
        piece, at = self._tables.find(index)
        with readable(self._tables.files.name(self._tables._group)):
            return row_of(piece, at)
