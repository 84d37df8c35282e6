"""A dataset of the rows of Parquet files, which are read on demand.

In:  files, and the wanted columns.
Out: a map-style dataset whose memory does not grow with the files.
Runs in: trainer and worker.
"""

from __future__ import annotations

import operator
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from penstock.data.parquet.groups import GroupsInMemory, GroupsOnDemand
from penstock.data.parquet.row_groups import ParquetFiles, readable
from penstock.data.sources import locate
from penstock.errors import ConfigError
from penstock.units import parse_bytes

if TYPE_CHECKING:
    import pyarrow as pa

MODES = ("mapped", "ultra", "memory")
SUFFIXES = (".parquet", ".pq", ".parq")
_SPREAD = 40_503
"""Multiplied by this, neighbouring process ids become numbers that are far apart."""


class ParquetDataset(Dataset[Any]):
    """Each sample is a row as a dict, or what ``transform`` makes of the dict. Lists of numbers are numpy arrays.

    ``path``: a file, a glob, a folder, a URL that fsspec supports, or a list of these. All files have the same columns.
    ``columns``: the columns to read, by default all.
    ``mode``: ``"mapped"`` keeps the row groups that were read last, up to ``keep`` bytes in each worker; ``"ultra"``
    keeps no rows between reads; ``"memory"`` reads everything once, into memory that all workers share.

    A row group larger than ``keep`` is decoded once, into a temporary file that all workers of this machine map. The
    file takes at most half of the free disk space. It is deleted when the last process that reads it ends, even if that
    process is killed.

    A batch reads each of its row groups once, so an order that stays within a few row groups at a time is fast, such as
    that of ``BlockShuffleSampler(dataset)``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[Any],
        columns: Sequence[str] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        mode: str = "mapped",
        *,
        keep: object = "32MiB",
    ) -> None:
        if mode not in MODES:
            raise ConfigError(f"mode={mode!r} is not one of {', '.join(MODES)}")
        is_list = isinstance(columns, Sequence) and not isinstance(columns, str)
        if columns is not None and not (is_list and columns and len(set(columns)) == len(columns)):
            raise ConfigError(
                f"columns={columns!r} is not valid; give a list of different names, or None for all columns"
            )
        self.transform = transform
        self.mode = mode
        self._files = ParquetFiles(locate(path, suffixes=SUFFIXES), columns)
        self._names = self._files.schema.names
        limit_bytes = parse_bytes(keep, name="keep")
        self.keep_bytes = limit_bytes if mode == "mapped" else None
        """How many bytes of row groups each process keeps; None in the modes that ignore ``keep``."""
        self._groups: GroupsOnDemand | GroupsInMemory = (
            GroupsInMemory(self._files)
            if mode == "memory"
            else GroupsOnDemand(self._files, limit_bytes, keeps=mode == "mapped")
        )

    @property
    def blocks(self) -> np.ndarray:
        """The index of the first row of each row group; the last entry is the count of all rows."""
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
        return self._sample_of(self._row(operator.index(index)))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        asked = np.asarray(indices if len(indices) else np.empty(0, np.int64))
        if asked.ndim != 1 or asked.dtype.kind not in "iu":
            raise TypeError(f"row numbers must be a list of integers, not {indices!r:.80}")
        return [self._sample_of(row) for row in self._rows(asked)]

    def made_of(self) -> tuple[Any, ...]:
        """What the samples depend on, for the fingerprint by which a cache finds samples of earlier runs."""
        return self._files, self.transform

    def _sample_of(self, row: Any) -> Any:
        return row if self.transform is None else self.transform(row)

    def _row(self, index: int) -> dict[str, Any]:
        starts = self._files.starts_view
        count = starts[-1]
        place = index + count if index < 0 else index
        if not 0 <= place < count:
            raise IndexError(f"row {index} of {count}")
        group = bisect_right(starts, place) - 1
        try:
            values = self._groups.row(group, place - starts[group])
        except Exception:
            with readable(self._files.name(group)):
                raise
        return dict(zip(self._names, values, strict=True))

    def _rows(self, asked: np.ndarray) -> list[dict[str, Any]]:
        count, starts = len(self), self._files.starts
        wrong = (asked < -count) | (asked >= count)
        if wrong.any():
            raise IndexError(f"row {asked[wrong][0]} of {count}")
        if not len(asked):
            return []
        numbers = asked.astype(np.int64)
        numbers[numbers < 0] += count
        # Rows are read in file order, so that the rows of a group, and of a piece of a group, are read together.
        order = numbers.argsort()
        numbers = numbers[order]
        groups = starts.searchsorted(numbers, "right") - 1
        changes = np.flatnonzero(groups[1:] != groups[:-1]) + 1
        if len(changes):
            # Processes begin with different groups, so that several processes decode large groups at the same time.
            cut = changes[os.getpid() * _SPREAD % len(changes)]
            order, numbers, groups = (np.concatenate((each[cut:], each[:cut])) for each in (order, numbers, groups))
            changes = np.flatnonzero(groups[1:] != groups[:-1]) + 1
        places = numbers - starts[groups]
        columns: list[list[Any]] = [[] for _ in self._names]
        for first, end in pairwise([0, *changes.tolist(), len(groups)]):
            group = int(groups[first])
            try:
                self._groups.read(group, places[first:end], columns)
            except Exception:
                # The group is named only after a failure: making a name takes as long as reading the rows.
                with readable(self._files.name(group)):
                    raise
        rows: list[dict[str, Any]] = [{} for _ in range(len(order))]
        ordered = [rows[place] for place in order.tolist()]
        for name, values in zip(self._names, columns, strict=True):
            for row, value in zip(ordered, values, strict=True):
                row[name] = value
        return rows

    def __repr__(self) -> str:
        return f"ParquetDataset({len(self):,} rows in {len(self.blocks) - 1:,} row groups, mode={self.mode!r})"
