"""Rows of Parquet files, read on demand.

In:  files, the wanted columns.
Out: a map-style dataset whose memory does not grow with the files.
Runs in: trainer and worker.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from penstock.data.arrow.rows import RowReader
from penstock.data.parquet.decoded_groups import DecodedGroups, joined
from penstock.data.parquet.row_groups import ParquetFiles, arrow, readable
from penstock.data.shared.shared_bytes import SharedBytes
from penstock.data.sources import locate
from penstock.errors import ConfigError, DataError
from penstock.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    import pyarrow as pa

MODES = ("mapped", "ultra", "memory")
SUFFIXES = (".parquet", ".pq", ".parq")
_PIECE_BYTES = 1 << 20
"""Decoded at a time."""
_MOST_ROWS = 1 << 10
"""The same, in rows: a text that is stored once may follow in every row."""
_PROBED_ROWS = 16
_REPEATED, _REPEATED_PIECE_BYTES = 4, 8 << 20
"""From rows this many times as large as they are stored, texts are read as dictionaries, so many bytes at a time."""
_RETURN_BYTES = 3 << 20
"""After reading this much piece by piece, memory that malloc still holds is returned to the system. Returning it takes
as long as reading a small group, so it is not done after each read."""
_ALIGNED_BYTES = 64
_MOST_OPENED = 256
"""A process keeps this many views of groups in shared memory: a few kilobytes each."""


class ParquetDataset(Dataset[Any]):
    """A dict per row, or what ``transform`` makes of it. Lists of numbers are numpy arrays.

    ``path``: a file, a glob, a folder, a URL that fsspec supports, or a list of these. All files have the same columns.
    ``columns``: only these are read.
    ``mode``: ``"mapped"`` keeps the row groups it read last, up to ``keep`` bytes in each worker; ``"ultra"`` keeps no
    rows between reads; ``"memory"`` reads everything once, into memory that all workers share.
    ``copies``: a row group larger than ``keep`` is decoded once, into a temporary file that all workers of this machine
    map. The files take at most this much disk, and end with the dataset.

    A batch reads each of its row groups once, so an order that stays within a few row groups at a time is fast:
    ``BlockShuffleSampler(dataset)``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[Any],
        columns: Sequence[str] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        mode: str = "mapped",
        *,
        keep: object = "32MiB",
        copies: object = "10GB",
    ) -> None:
        if mode not in MODES:
            raise ConfigError(f"mode={mode!r} is not one of {', '.join(MODES)}")
        is_list = isinstance(columns, Sequence) and not isinstance(columns, str)
        if columns is not None and not (is_list and columns and len(set(columns)) == len(columns)):
            raise ConfigError(
                f"columns={columns!r} is not a list of different names; give such a list, or None for all"
            )
        self.transform = transform
        self.mode = mode
        self._files = ParquetFiles(locate(path, suffixes=SUFFIXES), columns)
        self._names = self._files.schema.names
        limit_bytes = parse_bytes(keep, name="keep")
        self.keep_bytes = limit_bytes if mode == "mapped" else None
        """How many bytes of row groups each process keeps; None in the modes that ignore ``keep``."""
        copies_bytes = parse_bytes(copies, name="copies")
        self._groups: _Groups | _Copy = (
            _Copy(self._files)
            if mode == "memory"
            else _Groups(self._files, limit_bytes, copies_bytes, keeps=mode == "mapped")
        )

    @property
    def blocks(self) -> np.ndarray:
        """Number of the first row of each row group; at the end, the number of all rows."""
        return self._files.starts

    @property
    def block_bytes(self) -> np.ndarray:
        """About how much memory each row group takes when it is read."""
        return self._files.group_bytes

    @property
    def schema(self) -> pa.Schema:
        return self._files.schema

    def __len__(self) -> int:
        return int(self._files.starts[-1])

    def __getitem__(self, index: int) -> Any:
        (row,) = self._rows(np.array([operator.index(index)]))
        return self._sample_of(row)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        asked = np.asarray(indices if len(indices) else np.empty(0, np.int64))
        if asked.ndim != 1 or asked.dtype.kind not in "iu":
            raise TypeError(f"row numbers are a list of integers, not {indices!r:.80}")
        return [self._sample_of(row) for row in self._rows(asked)]

    def made_of(self) -> tuple[Any, ...]:
        """What samples depend on. Caches that outlive a run compare it."""
        return self._files, self.transform

    def _sample_of(self, row: Any) -> Any:
        return row if self.transform is None else self.transform(row)

    def _rows(self, asked: np.ndarray) -> list[dict[str, Any]]:
        count, starts = len(self), self._files.starts
        wrong = (asked < -count) | (asked >= count)
        if wrong.any():
            raise IndexError(f"row {asked[wrong][0]} of {count}")
        if not len(asked):
            return []
        numbers = asked.astype(np.int64)
        numbers[numbers < 0] += count
        # In file order, so that the rows of a group, and of a piece of a group, are read together.
        order = numbers.argsort()
        numbers = numbers[order]
        groups = starts.searchsorted(numbers, "right") - 1
        places = numbers - starts[groups]
        columns: list[list[Any]] = [[] for _ in self._names]
        changes = np.flatnonzero(groups[1:] != groups[:-1]) + 1
        for first, end in pairwise([0, *changes.tolist(), len(groups)]):
            group = int(groups[first])
            try:
                self._groups.read(group, places[first:end], columns)
            except Exception:
                # The group is named only after a failure: making a name takes as long as reading the rows.
                with readable(self._files.name(group)):
                    raise
        if self.mode == "ultra":
            arrow().default_memory_pool().release_unused()
        rows: list[dict[str, Any]] = [{} for _ in range(len(order))]
        ordered = [rows[place] for place in order.tolist()]
        for name, values in zip(self._names, columns, strict=True):
            for row, value in zip(ordered, values, strict=True):
                row[name] = value
        return rows

    def __repr__(self) -> str:
        return f"ParquetDataset({len(self):,} rows in {len(self.blocks) - 1:,} row groups, mode={self.mode!r})"


class _Groups:
    """Reads row groups on demand. Each process keeps those it used last, up to a limit; larger ones are decoded once,
    into a file that all processes map."""

    def __init__(self, files: ParquetFiles, keep_bytes: int, copies_bytes: int, *, keeps: bool) -> None:
        self._files = files
        self._keep_bytes = keep_bytes
        self._keeps = keeps
        self._too_large: set[int] = set()
        """Groups that take more memory than the footer suggests."""
        self._row_bytes = 0
        """The largest mean size of the rows of a piece, of all pieces that were read."""
        self._repeats = False
        """Whether texts are repeated so often that they are read as dictionaries."""
        self._kept_bytes = 0
        self._has_warned = False
        self._unreturned_bytes = 0
        self._decoded = DecodedGroups(_digest_of(files), copies_bytes, keep_bytes)
        if copies_bytes and bool((files.group_bytes > keep_bytes).any()):
            self._decoded.join()
        # No lock, because a fork could inherit it locked: two threads that read the same group at once both decode it.
        self._kept: OrderedDict[int, RowReader] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": OrderedDict(), "_kept_bytes": 0}

    def read(self, group: int, places: np.ndarray, columns: list[list[Any]]) -> None:
        """Append the values at ``places`` of a group to ``columns``. ``places`` are in ascending order."""
        if self._is_large(group):
            if not self._from_decoded(group, places, columns):
                self._from_pieces(group, places, columns)
            return
        reader = self._whole(group) if self._keeps else None
        if reader is None:
            self._from_pieces(group, places, columns)
        else:
            reader.read(places, columns)

    def _is_large(self, group: int) -> bool:
        return self._files.group_bytes[group] > self._keep_bytes

    # -- groups that are kept ---------------------------------------------------------------------

    def _whole(self, group: int) -> RowReader | None:
        """The reader of a group; None if the group takes more than may be kept."""
        reader = self._kept.get(group)
        if reader is not None:
            # Another thread may have evicted it in the meantime.
            with contextlib.suppress(KeyError):
                self._kept.move_to_end(group)
            return reader
        if group in self._too_large:
            return None
        self._make_room(int(self._files.group_bytes[group]))
        batch = self._within_keep(group)
        if batch is None and not self._repeats and self._files.has_texts:
            self._repeats = True
            batch = self._within_keep(group)
        if batch is None:
            self._too_large.add(group)
            self._warn(group)
            return None
        reader = RowReader(batch)
        self._make_room(reader.nbytes)
        self._kept[group] = reader
        self._kept_bytes += reader.nbytes
        return reader

    def _within_keep(self, group: int) -> pa.RecordBatch | None:
        """All rows of a group, unless they turn out to take more than may be kept."""
        pieces, size_bytes = [], 0
        for piece in self._pieces(group):
            pieces.append(piece)
            # Pieces share their dictionaries, whose size the footer says.
            size_bytes += sum(_bytes_without_dictionary(column) for column in piece.columns)
            if size_bytes > self._keep_bytes:
                return None
        self._check_rows(group, sum(piece.num_rows for piece in pieces))
        batch = joined(pieces)
        return batch if batch.nbytes <= self._keep_bytes else None

    def _make_room(self, need_bytes: int) -> None:
        while self._kept and self._kept_bytes + need_bytes > self._keep_bytes:
            with contextlib.suppress(KeyError):
                self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes

    # -- groups that are not ------------------------------------------------------------------------

    def _from_decoded(self, group: int, places: np.ndarray, columns: list[list[Any]]) -> bool:
        """Read a large group from its file, which this process writes if no other one has; False if there is none."""
        if not self._decoded.join():
            self._warn(group)
            return False
        if self._decoded.read(group, places, columns, keep=self._keeps):
            return True
        try:
            self._decoded.decode(group, self._all_pieces(group))
        except OSError as problem:
            if isinstance(problem, DataError):
                raise
            self._warn(group, problem)
            return False
        self._return_memory()
        return self._decoded.read(group, places, columns, keep=self._keeps)

    def _all_pieces(self, group: int) -> Iterator[pa.RecordBatch]:
        rows = 0
        for piece in self._pieces(group):
            rows += piece.num_rows
            yield piece
        self._check_rows(group, rows)

    def _from_pieces(self, group: int, places: np.ndarray, columns: list[list[Any]]) -> None:
        """Read a group piece by piece up to the last wanted row, and keep only the wanted rows."""
        first = 0
        for piece in self._pieces(group):
            inside = places[(places >= first) & (places < first + piece.num_rows)]
            if len(inside):
                RowReader(piece).read(inside - first, columns)
            first += piece.num_rows
            if first > places[-1]:
                break
        else:
            self._check_rows(group, first)
        self._unreturned_bytes += int(self._files.group_bytes[group])
        if self._unreturned_bytes > _RETURN_BYTES:
            self._return_memory()

    def _pieces(self, group: int) -> Iterator[pa.RecordBatch]:
        """The rows of a group, about ``_PIECE_BYTES`` at a time."""
        rows = int(self._files.starts[group + 1] - self._files.starts[group])
        row_bytes = int(self._files.group_bytes[group]) / rows
        if self._files.has_texts and not self._repeats:
            if not self._row_bytes:
                for piece in self._files.read_pieces(group, _PROBED_ROWS):
                    self._row_bytes = max(1, piece.nbytes // piece.num_rows)
                    break
            if self._row_bytes > _REPEATED * row_bytes + _PIECE_BYTES / rows:
                self._repeats = True
        if self._repeats:
            # Each piece has the whole dictionary, so pieces are few.
            fit = int(_REPEATED_PIECE_BYTES / row_bytes)
            yield from self._files.read_pieces(group, max(_MOST_ROWS, min(rows, fit)), repeated=True)
            return
        at_a_time = max(1, int(_PIECE_BYTES / max(row_bytes, self._row_bytes, 1)))
        for piece in self._files.read_pieces(group, min(at_a_time, _MOST_ROWS) if self._files.has_texts else at_a_time):
            self._row_bytes = max(self._row_bytes, piece.nbytes // max(1, piece.num_rows))
            yield piece

    def _check_rows(self, group: int, found: int) -> None:
        rows = int(self._files.starts[group + 1] - self._files.starts[group])
        if found != rows:
            raise DataError(f"{self._files.name(group)} has {found} rows, its footer says {rows}; the file is damaged")

    def _return_memory(self) -> None:
        self._unreturned_bytes = 0
        arrow().default_memory_pool().release_unused()

    def _warn(self, group: int, problem: OSError | None = None) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        why = f" and its rows cannot be kept in a file ({problem})" if problem is not None else ""
        warnings.warn(
            f"{self._files.name(group)} takes more memory than keep={format_bytes(self._keep_bytes)}{why}: every read "
            "decodes it again from its beginning. Rewrite the files (penstock pack, or a smaller row_group_size), or "
            "raise keep= or copies=",
            RuntimeWarning,
            stacklevel=6,
        )


def _bytes_without_dictionary(column: pa.Array) -> int:
    return column.indices.nbytes if isinstance(column, arrow().DictionaryArray) else column.nbytes


def _digest_of(files: ParquetFiles) -> str:
    text = repr((files.made_of(), arrow().__version__))
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()


class _Copy:
    """All row groups in memory that all workers share, each as an Arrow stream."""

    def __init__(self, files: ParquetFiles) -> None:
        ends = [0]

        def streams() -> Iterator[Any]:
            for group in range(len(files.starts) - 1):
                stream = _stream_of(files.read(group))
                padding = -len(stream) % _ALIGNED_BYTES
                ends.append(ends[-1] + len(stream) + padding)
                yield stream
                yield bytes(padding)

        self._streams = SharedBytes.of(streams())
        self._ends = np.array(ends, np.int64)
        self._opened: dict[int, RowReader] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": {}}

    def read(self, group: int, places: np.ndarray, columns: list[list[Any]]) -> None:
        self._reader(group).read(places, columns)

    def _reader(self, group: int) -> RowReader:
        reader = self._opened.get(group)
        if reader is None:
            pa = arrow()
            first, end = (int(place) for place in self._ends[group : group + 2])
            stream = pa.ipc.open_stream(pa.py_buffer(self._streams.view()[first:end]))
            reader = RowReader(stream.read_next_batch())
            if len(self._opened) >= _MOST_OPENED:
                self._opened.clear()
            self._opened[group] = reader
        return reader


def _stream_of(batch: pa.RecordBatch) -> memoryview:
    pa = arrow()
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(out.getvalue())
