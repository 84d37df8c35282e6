"""The table of a store, which leads from a key's digest to the place of its value, and the free places between values.

In:  digests; under the writer's lock, entries to add and to remove, and sizes of values.
Out: entries, readable without a lock; places for values.
Runs in: trainer and worker.

The table uses open addressing with linear probing; its number of slots is a power of two. An entry's last word, its
*tag*, is written last and changes whenever the entry changes: a reader that finds the same tag before and after a copy
has a consistent copy. A tag is never used twice: tags count up over all entries and all tables of the store.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from penstock.cache.store.region import (
    ENTRY_BYTES,
    ENTRY_WORDS,
    H_CURSOR,
    H_GAP_END,
    H_ITEMS,
    H_LIMIT,
    H_TABLE,
    H_TAGS,
    H_USED_SLOTS,
    H_VALUE_BYTES,
    H_VIRTUAL,
    PAGE_BYTES,
    TABLES_AT,
    Region,
)

EMPTY, GONE, COMING, HERE = range(4)
"""The lowest two bits of a tag: never used, removed, being written, readable."""

PINNED = 1 << 63
"""The owner of an entry that no policy evicts: it stays until it is replaced or removed."""

E_HIGH, E_LOW, E_OFFSET, E_USED, E_STAMP, E_MARK, E_OWNER, E_TAG = range(ENTRY_WORDS)

_ENTRY = struct.Struct("<8Q")
_DIGEST = struct.Struct("<QQ")
_FULLEST = 0.7
"""Share of slots in use, removed ones included, above which the table is rebuilt."""
_FULLEST_REBUILT = 0.5
"""Largest share of slots in use after a rebuild."""


class Entry(NamedTuple):
    """A copy of one entry."""

    high: int
    low: int
    offset: int
    """The start of its extent in the data."""
    used_bytes: int
    """How many bytes of the extent are in use."""
    stamp: int
    """The time of the entry's last use."""
    mark: int
    """One more word for the store's policy: a position in a forecast, or a group."""
    owner: int
    """The row of the thread that is writing the value; later ``PINNED`` or 0."""
    tag: int

    @property
    def extent_bytes(self) -> int:
        return extent_for(self.used_bytes)


class Table:
    def __init__(self, region: Region) -> None:
        self._region = region

    # -- reading, without a lock --------------------------------------------------------------

    def find(self, digest: bytes) -> tuple[int, Entry] | None:
        """The offset of the key's entry in the index, and the entry; None if the key has no entry."""
        region = self._region
        where = int(region.header[H_TABLE])
        start, mask = where & ~63, (1 << (where & 63)) - 1
        high, low = _DIGEST.unpack(digest)
        slot = low & mask
        meta = region.meta
        for _ in range(mask + 1):
            at = start + slot * ENTRY_BYTES
            tag = -1
            words = _ENTRY.unpack_from(meta, at)
            while words[E_TAG] != tag:
                # Words read while the entry changes may belong to two entries.
                tag = words[E_TAG]
                words = _ENTRY.unpack_from(meta, at)
            state = tag & 3
            if state == EMPTY:
                return None
            if state != GONE and words[E_LOW] == low and words[E_HIGH] == high:
                return at, Entry._make(words)
            slot = (slot + 1) & mask
        return None

    def is_still(self, at: int, tag: int) -> bool:
        """Whether an entry is unchanged since it was read."""
        return self._region.words[at // 8 + E_TAG] == tag

    def touch(self, at: int, stamp: int) -> None:
        """Note the time of an entry's use."""
        self._region.words[at // 8 + E_STAMP] = stamp

    def mark(self, at: int, mark: int) -> None:
        self._region.words[at // 8 + E_MARK] = mark

    # -- changing, under the writer's lock ----------------------------------------------------

    def add(self, digest: bytes, *, offset: int, used_bytes: int, stamp: int, mark: int, owner: int) -> int:
        """Add an entry in state COMING for a key that has none; returns its offset."""
        self._make_room()
        region = self._region
        where = int(region.header[H_TABLE])
        start, mask = where & ~63, (1 << (where & 63)) - 1
        high, low = _DIGEST.unpack(digest)
        slot = low & mask
        while True:
            at = start + slot * ENTRY_BYTES
            tag = region.words[at // 8 + E_TAG]
            if tag & 3 in (EMPTY, GONE):
                break
            slot = (slot + 1) & mask
        header = region.header
        if tag & 3 == EMPTY:
            header[H_USED_SLOTS] += np.uint64(1)
        # The words are written one by one, and the tag last: struct.pack_into would show readers zeros for a moment.
        first = at // 8
        for word, value in enumerate((high, low, offset, used_bytes, stamp, mark, owner)):
            region.words[first + word] = value
        self._retag(at, COMING)
        header[H_ITEMS] += np.uint64(1)
        header[H_VALUE_BYTES] += np.uint64(extent_for(used_bytes))
        return at

    def arrive(self, at: int, *, pinned: bool = False) -> None:
        """Note that the entry's value is written. No policy evicts a pinned entry."""
        self._region.words[at // 8 + E_OWNER] = PINNED if pinned else 0
        self._retag(at, HERE)

    def remove(self, at: int, entry: Entry) -> None:
        self._retag(at, GONE)
        header = self._region.header
        header[H_ITEMS] -= np.uint64(1)
        header[H_VALUE_BYTES] -= np.uint64(entry.extent_bytes)

    def forget(self, at: int) -> None:
        """Remove an entry without updating the counts, which the caller then computes anew."""
        self._retag(at, GONE)

    def read(self, at: int) -> Entry:
        return Entry._make(_ENTRY.unpack_from(self._region.meta, at))

    def at_slot(self, slot: int) -> int:
        return (int(self._region.header[H_TABLE]) & ~63) + slot * ENTRY_BYTES

    def _retag(self, at: int, state: int) -> None:
        header = self._region.header
        header[H_TAGS] += np.uint64(1)
        self._region.words[at // 8 + E_TAG] = int(header[H_TAGS]) << 2 | state

    def live(self) -> np.ndarray:
        """Slots with an entry, including those in state COMING."""
        tags = self._region.table()[:, E_TAG] & np.uint64(3)
        return np.flatnonzero(tags >= COMING)

    def impossible(self) -> np.ndarray:
        """Slots whose entries point outside the data or overlap another entry, as a crash may leave them."""
        live = self.live()
        entries = self._region.table()[live]
        offset, used = entries[:, E_OFFSET], entries[:, E_USED]
        virtual_bytes, limit_bytes = self._region.header[H_VIRTUAL], self._region.header[H_LIMIT]
        wrong = (used == 0) | (used > limit_bytes) | (offset > virtual_bytes) | (offset % np.uint64(PAGE_BYTES) != 0)
        extent = extent_for(np.where(wrong, np.uint64(0), used))
        wrong |= offset + extent > virtual_bytes
        order = np.flatnonzero(~wrong)[np.argsort(offset[~wrong], kind="stable")]
        ends = np.maximum.accumulate((offset + extent)[order])
        overlaps = offset[order][1:] < ends[:-1]
        return np.concatenate((live[wrong], live[order[1:][overlaps]]))

    # -- growing --------------------------------------------------------------------------------

    def _make_room(self) -> None:
        slots_log2 = self._needed_log2()
        if slots_log2 is not None:
            self._rebuild(slots_log2)

    def grown_bytes(self) -> int:
        """By how many bytes the table would grow if one entry were added."""
        slots_log2 = self._needed_log2()
        if slots_log2 is None:
            return 0
        return (ENTRY_BYTES << slots_log2) - (ENTRY_BYTES << (int(self._region.header[H_TABLE]) & 63))

    def _needed_log2(self) -> int | None:
        """The size of the table needed for one more entry; None if this table has room."""
        header = self._region.header
        slots_log2 = int(header[H_TABLE]) & 63
        if int(header[H_USED_SLOTS]) + 1 <= _FULLEST * (1 << slots_log2):
            return None
        while int(header[H_ITEMS]) + 1 > _FULLEST_REBUILT * (1 << slots_log2):
            slots_log2 += 1
        return slots_log2

    def _rebuild(self, slots_log2: int) -> None:
        """Copy all entries to a new table, and point readers to it in one step."""
        region, header = self._region, self._region.header
        old, before = int(header[H_TABLE]), region.table()
        # Tables use two places in turn: the place of the table before this one is free again.
        place = self._place_for(slots_log2)
        where = place | slots_log2
        entries = before[self.live()].copy()
        slots = 1 << slots_log2
        home = (entries[:, E_LOW] & np.uint64(slots - 1)).astype(np.int64)
        order = np.argsort(home, kind="stable")
        entries, home = entries[order], home[order]
        count = np.arange(len(home))
        put = count + np.maximum.accumulate(home - count) if len(home) else home
        region.reserve_table(where)
        after = region.table_at(where)
        after[:] = 0
        fits = put < slots
        after[put[fits]] = entries[fits]
        # The few entries beyond the end of the table continue at its beginning.
        if not fits.all():
            empty = np.flatnonzero(after[: len(entries) + 1, E_TAG] == 0)[: np.count_nonzero(~fits)]
            after[empty] = entries[~fits]
        header[H_TABLE] = where
        header[H_USED_SLOTS] = len(entries)
        region.drop_table(old)

    def _place_for(self, slots_log2: int) -> int:
        """A place in the index for a new table that does not overlap the current one."""
        header = self._region.header
        present = int(header[H_TABLE])
        first = TABLES_AT
        if first + (ENTRY_BYTES << slots_log2) <= present & ~63:
            return first
        return (present & ~63) + (ENTRY_BYTES << (present & 63))


class Space:
    """The places of values in a file that is much larger than all values together.

    Removed values leave no pages, so holes cost nothing and no value is ever moved: places are assigned one after the
    other, from the beginning again after the end, and skip what is in use.
    """

    def __init__(self, region: Region, table: Table) -> None:
        self._region = region
        self._table = table

    def find(self, extent_bytes: int) -> int | None:
        """The offset of a free extent of that size; None if no free extent is that large."""
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
        """Release every page outside all entries. A process may have crashed before it released the pages of values
        that it removed."""
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


def extent_for(used_bytes: Any) -> Any:
    """The size of a value's extent, in whole pages; of several values, if given an array."""
    return (used_bytes + (PAGE_BYTES - 1)) // PAGE_BYTES * PAGE_BYTES


def evictable(table: np.ndarray) -> np.ndarray:
    """Slots whose values a policy may evict."""
    is_here = table[:, E_TAG] & np.uint64(3) == HERE
    return np.flatnonzero(is_here & (table[:, E_OWNER] != np.uint64(PINNED)))
