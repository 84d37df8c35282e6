"""The cache's table: from a key's digest to where its value lies.

In:  digests; entries to add and to take out, under the writer's lock.
Out: entries, readable without a lock.
Runs in: trainer and worker.

Open addressing with linear probing over a power of two of slots. An entry's last word, its *tag*, is written last and
changes whenever the entry does: a reader who finds the same tag before and after knows that nothing moved between.
No tag comes back: they are numbered through, over all entries and all places the table ever has.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from penstock.cache.store.region import (
    ENTRY_BYTES,
    ENTRY_WORDS,
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
"""Lowest two bits of a tag: never used, removed, being written, readable."""

PINNED = 1 << 63
"""Owner of an entry that stays until it is replaced or removed."""

E_HIGH, E_LOW, E_OFFSET, E_USED, E_STAMP, E_MARK, E_OWNER, E_TAG = range(ENTRY_WORDS)

_ENTRY = struct.Struct("<8Q")
_DIGEST = struct.Struct("<QQ")
_FULLEST = 0.7
"""Share of slots in use, removed ones included, from which on the table is made anew."""
_FULL_ANEW = 0.5
"""Share of slots in use when it was."""


class Entry(NamedTuple):
    """One entry as it was read."""

    high: int
    low: int
    offset: int
    """Where its extent begins in the data."""
    used_bytes: int
    """How much of the extent is the value."""
    stamp: int
    """When it was last used."""
    mark: int
    """What the tier's policy wants to know of it besides."""
    owner: int
    """Row of the thread that is writing it; once it is here, ``PINNED`` or 0."""
    tag: int

    @property
    def extent_bytes(self) -> int:
        return extent_for(self.used_bytes)


class Table:
    def __init__(self, region: Region) -> None:
        self._region = region

    # -- reading, without a lock --------------------------------------------------------------

    def find(self, digest: bytes) -> tuple[int, Entry] | None:
        """Where in the index the key's entry is, and the entry; None if there is none."""
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
                # Words read while the entry changed may belong to two entries.
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
        """Whether an entry is what it was when it was read."""
        return self._region.words[at // 8 + E_TAG] == tag

    def touch(self, at: int, stamp: int) -> None:
        """Note that an entry was used."""
        self._region.words[at // 8 + E_STAMP] = stamp

    def mark(self, at: int, mark: int) -> None:
        self._region.words[at // 8 + E_MARK] = mark

    # -- changing, under the writer's lock ----------------------------------------------------

    def add(self, digest: bytes, *, offset: int, used_bytes: int, stamp: int, mark: int, owner: int) -> int:
        """An entry that is coming; the key must have none. Gives where it is."""
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
        # Word by word, the tag on its own and last: packing several at once shows them as zeros for a moment.
        first = at // 8
        for word, value in enumerate((high, low, offset, used_bytes, stamp, mark, owner)):
            region.words[first + word] = value
        self._retag(at, COMING)
        header[H_ITEMS] += np.uint64(1)
        header[H_VALUE_BYTES] += np.uint64(extent_for(used_bytes))
        return at

    def arrive(self, at: int, *, pinned: bool = False) -> None:
        """The value of a coming entry is written; a pinned one is no policy's to give up."""
        self._region.words[at // 8 + E_OWNER] = PINNED if pinned else 0
        self._retag(at, HERE)

    def remove(self, at: int, entry: Entry) -> None:
        self._retag(at, GONE)
        header = self._region.header
        header[H_ITEMS] -= np.uint64(1)
        header[H_VALUE_BYTES] -= np.uint64(entry.extent_bytes)

    def forget(self, at: int) -> None:
        """Take an entry out, whatever it says: who calls this counts again."""
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
        """Slots with an entry, coming ones included."""
        tags = self._region.table()[:, E_TAG] & np.uint64(3)
        return np.flatnonzero(tags >= COMING)

    def impossible(self) -> np.ndarray:
        """Slots whose entries lie where no value can, or where another one does: leftovers of a crash."""
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
        """What the table would take more if one entry were added."""
        slots_log2 = self._needed_log2()
        if slots_log2 is None:
            return 0
        return (ENTRY_BYTES << slots_log2) - (ENTRY_BYTES << (int(self._region.header[H_TABLE]) & 63))

    def _needed_log2(self) -> int | None:
        """The size of the table to be made before one more entry is added; None if there is room in this one."""
        header = self._region.header
        slots_log2 = int(header[H_TABLE]) & 63
        if int(header[H_USED_SLOTS]) + 1 <= _FULLEST * (1 << slots_log2):
            return None
        while int(header[H_ITEMS]) + 1 > _FULL_ANEW * (1 << slots_log2):
            slots_log2 += 1
        return slots_log2

    def _rebuild(self, slots_log2: int) -> None:
        """All entries in a new table, without the removed ones; readers are directed there in one step."""
        region, header = self._region, self._region.header
        old, before = int(header[H_TABLE]), region.table()
        # The first table's place is free again once it was left, and so on: two places take turns.
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
        # The few that ran over the end go on from the beginning.
        if not fits.all():
            empty = np.flatnonzero(after[: len(entries) + 1, E_TAG] == 0)[: np.count_nonzero(~fits)]
            after[empty] = entries[~fits]
        header[H_TABLE] = where
        header[H_USED_SLOTS] = len(entries)
        region.drop_table(old)

    def _place_for(self, slots_log2: int) -> int:
        """Room in the index for a table beside the present one."""
        header = self._region.header
        present = int(header[H_TABLE])
        first = TABLES_AT
        if first + (ENTRY_BYTES << slots_log2) <= present & ~63:
            return first
        return (present & ~63) + (ENTRY_BYTES << (present & 63))


def extent_for(used_bytes: Any) -> Any:
    """What a value of so many bytes takes, or each of several: whole pages."""
    return (used_bytes + (PAGE_BYTES - 1)) // PAGE_BYTES * PAGE_BYTES


def evictable(table: np.ndarray) -> np.ndarray:
    """Slots whose values a policy may give up."""
    is_here = table[:, E_TAG] & np.uint64(3) == HERE
    return np.flatnonzero(is_here & (table[:, E_OWNER] != np.uint64(PINNED)))
