"""The cache's memory: values of all processes of a node, never more bytes than the limit.

In:  digests and packed values.
Out: the caller's own copies of values.
Runs in: trainer and worker.

A reader takes no lock. It notes the value it is about to read in its row, so that nobody gives the pages away
meanwhile, copies it, and looks whether the entry is still what it was; if not, the copy is worth nothing and it looks
again. A writer sets room aside under the writer's lock, copies without it, and takes the lock once more to say that
the value is there. Whoever dies leaves rows and coming entries that others recognise by the lock their owner no longer
holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from penstock.cache.policies import Policy
from penstock.cache.readers import Readers
from penstock.cache.region import (
    H_CHANGING,
    H_EVICTIONS,
    H_HITS,
    H_ITEMS,
    H_LIMIT,
    H_MISSES,
    H_PASSED,
    H_USED_SLOTS,
    H_VALUE_BYTES,
    R_HITS,
    R_MISSES,
    R_PASSED,
    R_READING,
    R_WRITING,
    Region,
)
from penstock.cache.space import Space, extent_for
from penstock.cache.table import COMING, E_EXTENT, E_OWNER, E_STAMP, E_TAG, EMPTY, HERE, Entry, Table, evictable
from penstock.cache.values import Packed

_COPY_UNDER_LOCK_BYTES = 64 << 10
"""Values up to this size are copied while the lock is held: taking it twice costs more."""
_LOOKS = 8
"""How often to look again for a value that changes while it is read."""
_HEADROOM_S = 0.2
"""How long one look at the machine's free memory is good for."""


class RamTier:
    def __init__(self, region: Region, policy: Policy, *, headroom_bytes: Callable[[], int]) -> None:
        """``headroom_bytes`` says what the machine or container can still give."""
        self._region = region
        self.policy = policy
        self._headroom_bytes = headroom_bytes
        self._table = Table(region)
        self._space = Space(region, self._table)
        self._readers = Readers(region)
        self._room_bytes, self._room_until_s = 0, 0.0
        self.is_short = False
        """Whether the machine could not give what the limit allows."""
        region.repair = self._repair

    # -- reading ----------------------------------------------------------------------------

    def get(self, digest: bytes, *, counts: bool = True) -> np.ndarray | None:
        """A private copy of a value's bytes, or None."""
        row = self._readers.row()
        table, values = self._table, self._region.values
        for _ in range(_LOOKS):
            found = table.find(digest)
            if found is None or found[1].tag & 3 != HERE:
                break
            at, entry = found
            row[R_READING] = entry.offset + 1
            if table.is_still(at, entry.tag):
                copy = np.empty(entry.used_bytes, np.uint8)
                np.copyto(copy, values[entry.offset : entry.offset + entry.used_bytes])
                row[R_READING] = 0
                if table.is_still(at, entry.tag):
                    table.touch(at, time.monotonic_ns())
                    row[R_HITS] += counts
                    return copy
            row[R_READING] = 0
        row[R_MISSES] += counts
        return None

    def view(self, digest: bytes) -> tuple[int, np.ndarray] | None:
        """A pinned value's bytes where they lie, and a number that changes when they do; None if there is none."""
        found = self._table.find(digest)
        if found is None or found[1].tag & 3 != HERE:
            return None
        entry = found[1]
        return entry.tag, self._region.values[entry.offset : entry.offset + entry.used_bytes]

    def has(self, digest: bytes) -> bool:
        found = self._table.find(digest)
        return found is not None and found[1].tag & 3 == HERE

    # -- writing ----------------------------------------------------------------------------

    def put(self, digest: bytes, packed: Packed, *, pinned: bool = False) -> bool:
        """Keep a value, if the policy and the memory allow; a pinned one stays until it is replaced."""
        row_number, row = self._readers.number(), self._readers.row()
        extent_bytes = extent_for(packed.total_bytes)
        with self._region.changing():
            found = self._table.find(digest)
            if found is not None:
                if found[1].tag & 3 == COMING and self._readers.is_alive(found[1].owner):
                    return False
                self._remove(*found)
            offset = self._room_for(digest, extent_bytes)
            if offset is None:
                row[R_PASSED] += 1
                return False
            if packed.total_bytes > _COPY_UNDER_LOCK_BYTES:
                row[R_WRITING] = 1
            at = self._table.add(
                digest, offset=offset, extent_bytes=extent_bytes, used_bytes=packed.total_bytes,
                stamp=time.monotonic_ns(), owner=row_number,
            )  # fmt: skip
            if packed.total_bytes <= _COPY_UNDER_LOCK_BYTES:
                packed.write(self._region.values[offset : offset + extent_bytes])
                self._table.arrive(at, self._table.read(at).tag, pinned=pinned)
                return True
            tag = self._table.read(at).tag
        self._region.populate(offset, extent_bytes)
        packed.write(self._region.values[offset : offset + extent_bytes])
        with self._region.changing():
            row[R_WRITING] = 0
            # The table may have grown meanwhile, or the entry been cleared away.
            found = self._table.find(digest)
            if found is None or found[1].tag != tag or found[1].offset != offset:
                self._region.drop_values(offset, offset + extent_bytes)
                return False
            self._table.arrive(found[0], tag, pinned=pinned)
        return True

    def remove(self, digest: bytes) -> None:
        with self._region.changing():
            found = self._table.find(digest)
            if found is not None and found[1].tag & 3 == HERE:
                self._remove(*found)

    def clear(self) -> None:
        with self._region.changing():
            for slot in self._table.live():
                at = self._table.at_slot(int(slot))
                entry = self._table.read(at)
                if entry.tag & 3 == HERE:
                    self._remove(at, entry)

    def resize(self, limit_bytes: int) -> None:
        """Change the limit now; what is over it goes back to the system at once."""
        with self._region.changing() as header:
            header[H_LIMIT] = limit_bytes
            self._evict_to_limit()

    # -- gauges -----------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        header, rows = self._region.header, self._region.rows
        return {
            "items": int(header[H_ITEMS]),
            "bytes": int(header[H_VALUE_BYTES]) + self._region.index_bytes,
            "limit_bytes": int(header[H_LIMIT]),
            "hits": int(header[H_HITS]) + int(rows[:, R_HITS].sum()),
            "misses": int(header[H_MISSES]) + int(rows[:, R_MISSES].sum()),
            "passed": int(header[H_PASSED]) + int(rows[:, R_PASSED].sum()),
            "evictions": int(header[H_EVICTIONS]),
        }

    # -- inside, under the writer's lock ------------------------------------------------------

    def _room_for(self, digest: bytes, extent_bytes: int) -> int | None:
        """A place for a value, after others have made room if need be."""
        header = self._region.header
        fixed_bytes = self._region.index_bytes + self._table.grown_bytes()
        if fixed_bytes + extent_bytes > int(header[H_LIMIT]):
            return None
        if fixed_bytes + int(header[H_VALUE_BYTES]) + extent_bytes > int(header[H_LIMIT]):
            self._clear_after_the_dead()
        over = fixed_bytes + int(header[H_VALUE_BYTES]) + extent_bytes - int(header[H_LIMIT])
        if over > 0:
            return self._replace(digest, extent_bytes, over)
        if not self._machine_has(extent_bytes):
            # The machine is full before the cache is: from here on it lives on what it has.
            return self._replace(digest, extent_bytes, extent_bytes)
        return self._space.place(extent_bytes)

    def _replace(self, digest: bytes, extent_bytes: int, over_bytes: int) -> int | None:
        """Evict what is wanted least, if it is wanted less than the newcomer; gives a place for that one."""
        reusable: int | None = None
        for slot in self.policy.victims(self._region.table(), digest):
            at = self._table.at_slot(slot)
            entry = self._table.read(at)
            if entry.tag & 3 != HERE or self._readers.is_read(entry.offset):
                continue
            over_bytes -= entry.extent_bytes
            is_fit = reusable is None and entry.extent_bytes == extent_bytes
            self._remove(at, entry, keep_pages=is_fit)
            self._region.header[H_EVICTIONS] += np.uint64(1)
            if is_fit:
                reusable = entry.offset
            if over_bytes <= 0:
                return self._space.place(extent_bytes) if reusable is None else reusable
        if reusable is not None:
            self._region.drop_values(reusable, reusable + extent_bytes)
        return None

    def _evict_to_limit(self) -> None:
        """Whatever the policy: what was not used for longest goes until the rest fits."""
        header, table = self._region.header, self._region.table()
        live = evictable(table)
        for slot in live[np.argsort(table[live, E_STAMP], kind="stable")]:
            if self._region.index_bytes + int(header[H_VALUE_BYTES]) <= int(header[H_LIMIT]):
                return
            at = self._table.at_slot(int(slot))
            entry = self._table.read(at)
            if entry.tag & 3 == HERE:
                self._remove(at, entry)
                header[H_EVICTIONS] += np.uint64(1)

    def _remove(self, at: int, entry: Entry, *, keep_pages: bool = False) -> None:
        self._table.remove(at, entry)
        if not keep_pages:
            self._region.drop_values(entry.offset, entry.offset + entry.extent_bytes)

    def _machine_has(self, extent_bytes: int) -> bool:
        now_s = time.monotonic()
        if now_s > self._room_until_s or self._room_bytes < extent_bytes:
            self._room_bytes, self._room_until_s = self._headroom_bytes(), now_s + _HEADROOM_S
        self._room_bytes -= extent_bytes
        self.is_short = self.is_short or self._room_bytes < 0
        return self._room_bytes >= 0

    def _clear_after_the_dead(self) -> None:
        """Forget values whose writers died at it."""
        for number in self._readers.dead_writers():
            table = self._region.table()
            coming = table[:, E_TAG] & np.uint64(3) == COMING
            for slot in np.flatnonzero(coming & (table[:, E_OWNER] == number)):
                at = self._table.at_slot(int(slot))
                self._remove(at, self._table.read(at))
            self._region.rows[number, R_WRITING] = 0

    def _repair(self) -> None:
        """Somebody died while changing the table: count again, and give back what belongs to no entry."""
        header, table = self._region.header, self._region.table()
        live = self._table.live()
        header[H_ITEMS] = len(live)
        header[H_VALUE_BYTES] = int(table[live, E_EXTENT].sum())
        header[H_USED_SLOTS] = int(np.count_nonzero(table[:, E_TAG] & np.uint64(3) != EMPTY))
        self._space.drop_unused()
        header[H_CHANGING] = 0
