"""Where values lie: extents of whole pages in a file that is much larger than what it may hold.

In:  sizes.
Out: places for values; pages given back to the system.
Runs in: trainer and worker, under the writer's lock.

Removed values leave no pages, so holes cost nothing and nothing is ever moved: places are handed out one after the
other, round and round, and skip what is still there.
"""

from __future__ import annotations

import numpy as np

from penstock.cache.store.region import H_CURSOR, H_GAP_END, H_VIRTUAL, Region
from penstock.cache.store.table import E_OFFSET, E_USED, Table, extent_for


class Space:
    def __init__(self, region: Region, table: Table) -> None:
        self._region = region
        self._table = table

    def place(self, extent_bytes: int) -> int | None:
        """Room for one more extent; None if there is no hole of that size."""
        header = self._region.header
        cursor, end = int(header[H_CURSOR]), int(header[H_GAP_END])
        if cursor + extent_bytes > end:
            hole = self._next_hole(cursor, extent_bytes)
            if hole is None:
                return None
            cursor, end = hole
            header[H_GAP_END] = end
        header[H_CURSOR] = cursor + extent_bytes
        return cursor

    def drop_unused(self) -> None:
        """Give back every page that belongs to no entry, after a process died between removing and giving back."""
        for start, end in zip(*self._holes(), strict=True):
            self._region.drop_values(int(start), int(end))
        self._region.header[H_CURSOR] = self._region.header[H_GAP_END] = 0

    def _next_hole(self, cursor: int, extent_bytes: int) -> tuple[int, int] | None:
        starts, ends = self._holes()
        wide = np.flatnonzero(ends - starts >= extent_bytes)
        if not len(wide):
            return None
        after = wide[starts[wide] >= cursor]
        chosen = after[0] if len(after) else wide[0]
        return int(starts[chosen]), int(ends[chosen])

    def _holes(self) -> tuple[np.ndarray, np.ndarray]:
        entries = self._region.table()[self._table.live()]
        offsets = entries[:, E_OFFSET].astype(np.int64)
        order = np.argsort(offsets)
        starts = np.concatenate(([0], (offsets + extent_for(entries[:, E_USED].astype(np.int64)))[order]))
        ends = np.concatenate((offsets[order], [int(self._region.header[H_VIRTUAL])]))
        holes = ends > starts
        return starts[holes], ends[holes]
