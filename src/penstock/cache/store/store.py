"""One store of the cache, in memory or on disk. It holds values of all processes of a node, up to a limit in bytes.

In:  digests and packed values.
Out: the caller's own copies of values.
Runs in: trainer, worker, command line.

A reader takes no lock. It notes in its row which value it reads, so that no process releases the pages of the value
meanwhile. Then it copies the value, and checks that the entry is unchanged; if the entry has changed, the reader
discards the copy and tries again. A writer reserves space under the writer's lock, copies without the lock, and takes
the lock once more to make the entry readable. A crashed process leaves a row and entries in state COMING; other
processes recognise these because their owner's lock is free. A thread that was interrupted while writing removes its
own unfinished entry at its next write.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.cache.policy.policies import STATIC
from penstock.cache.store.locks import KeyLocks
from penstock.cache.store.readers import Readers
from penstock.cache.store.region import (
    H_CHANGING,
    H_CORRUPT,
    H_EVICTIONS,
    H_GROUPS,
    H_HITS,
    H_ITEMS,
    H_LIMIT,
    H_MISSES,
    H_PASSED,
    H_POLICY,
    H_READY,
    H_TAGS,
    H_USED_SLOTS,
    H_VALUE_BYTES,
    L_KEYS,
    MOST_GROUPS,
    R_CORRUPT,
    R_HITS,
    R_MISSES,
    R_PASSED,
    R_READING,
    R_WRITING,
    Extent,
    Payload,
    Region,
)
from penstock.cache.store.table import (
    COMING,
    E_OWNER,
    E_STAMP,
    E_TAG,
    E_USED,
    EMPTY,
    HERE,
    PINNED,
    Entry,
    Space,
    Table,
    evictable,
    extent_for,
)

_COPY_UNDER_LOCK_BYTES = 64 << 10
"""Values up to this size are copied while the lock is held: taking the lock twice costs more than the copy."""
_KEY_LOCKS = 1 << 30
_READ_TRIES = 8
"""How often to try to read a value that changes while it is read."""
_HEADROOM_S = 0.2
"""How long a figure of the machine's free memory is used before it is read again."""
_READ_WITHIN_S = 0.5
"""How long to wait for a reader before the pages it reads are released."""
READS_IN_ORDER = platform.machine() in ("x86_64", "AMD64")
"""Whether all processes see the writes of a process in the order in which that process makes them. On other processors,
readers take the writer's lock."""


class Store:
    def __init__(
        self,
        region: Region,
        policies: dict[int, Any],
        *,
        headroom_bytes: Callable[[], int],
        position: Callable[[], int] | None = None,
    ) -> None:
        """``policies``: the policies by their numbers in the header. ``headroom_bytes``: returns how many bytes
        machine, container or disk have left. ``position``: returns the position, in a forecast, of the batch that is
        being fetched, which is noted on values."""
        self._position = position
        self.region = region
        self.policies = policies
        self._headroom_bytes = headroom_bytes
        self._table = Table(region)
        self._space = Space(region, self._table)
        self._readers = Readers(region)
        self._headroom_left_bytes, self._headroom_until_s = 0, 0.0
        self._tags_at_rest = -1
        """The number of tags at the last check that found no writer."""
        self.is_short = False
        """Whether the machine once had too little memory left for the cache to grow to its limit."""
        region.repair = self._repair
        self.loading = KeyLocks(region.lock_fd, L_KEYS, _KEY_LOCKS)
        """One lock per key, held while its value is loaded."""

    # -- reading ----------------------------------------------------------------------------

    def get(self, digest: bytes, *, counts: bool = True) -> np.ndarray | None:
        """A private copy of a value's bytes, or None."""
        row = self._readers.row()
        if READS_IN_ORDER:
            is_found, copy = self._read(digest, row)
        else:
            with self.region.changing():
                is_found, copy = self._read(digest, row)
        if copy is not None:
            row[R_HITS] += counts
            return copy
        if is_found:
            self.remove_corrupt(digest)
        row[R_MISSES] += counts
        return None

    def _read(self, digest: bytes, row: np.ndarray) -> tuple[bool, np.ndarray | None]:
        """Whether the key has a value, and a copy of it; None instead of a copy if the value is damaged."""
        table = self._table
        for _ in range(_READ_TRIES):
            found = table.find(digest)
            if found is None or found[1].tag & 3 != HERE:
                break
            at, entry = found
            row[R_READING] = entry.offset + 1
            copy = None
            try:
                if is_still := table.is_still(at, entry.tag):
                    copy = self.region.read(digest, entry.offset, entry.used_bytes)
                    is_still = table.is_still(at, entry.tag)
            finally:
                row[R_READING] = 0
            if is_still:
                table.touch(at, time.time_ns())
                if self._position is not None:
                    table.mark(at, self._position())
                return True, copy
        return False, None

    def view(self, digest: bytes) -> tuple[int, np.ndarray] | None:
        """A pinned value's tag, which changes with the value, and its bytes in place; None if there is none."""
        found = self._table.find(digest)
        if found is None or found[1].tag & 3 != HERE:
            return None
        entry = found[1]
        return entry.tag, self.region.values[entry.offset : entry.offset + entry.used_bytes]

    def has(self, digest: bytes) -> bool:
        """Whether the key has a value. This counts as a use of the value."""
        found = self._table.find(digest)
        if found is None or found[1].tag & 3 != HERE:
            return False
        self._table.touch(found[0], time.time_ns())
        return True

    # -- writing ----------------------------------------------------------------------------

    def put(
        self, digest: bytes, packed: Payload, *, pinned: bool = False, replaces: bool = True, group: int = 0
    ) -> bool:
        """Keep a value if policy and limit allow it; a ``pinned`` one stays until it is replaced. Raises OSError.

        Without ``replaces``, an existing value stays. ``group`` is noted on the value if the store notes no positions.
        """
        row, number = self._readers.row(), self._readers.number()
        used_bytes = self.region.record_bytes + packed.total_bytes
        with self.region.changing():
            if row[R_WRITING]:
                self._clear_after(number)
            if not replaces and self.has(digest):
                return False
            place = self._place(digest, extent_for(used_bytes), must=pinned)
            if place is None:
                row[R_PASSED] += 1
                return False
            # The row is marked before the entry exists, because unfinished entries are searched only for marked rows.
            row[R_WRITING] = 1
            at = self._table.add(
                digest, offset=place.offset, used_bytes=used_bytes, stamp=time.time_ns(),
                mark=group if self._position is None else self._position(), owner=number,
            )  # fmt: skip
            if packed.total_bytes <= _COPY_UNDER_LOCK_BYTES:
                self.region.write(digest, place, packed)
                self._table.arrive(at, pinned=pinned)
                row[R_WRITING] = 0
                return True
            tag = self._table.read(at).tag
        self.region.write(digest, place, packed)
        with self.region.changing():
            # The table may have been rebuilt meanwhile, with the entry in another slot.
            found = self._table.find(digest)
            is_ours = found is not None and found[1].tag == tag
            if found is not None and is_ours:
                self._table.arrive(found[0], pinned=pinned)
                # The limit may have been lowered meanwhile, when this entry was not readable yet and so could not be
                # evicted.
                self._evict_to_limit()
            row[R_WRITING] = 0
        return is_ours

    def refuses(self, digest: bytes, least_bytes: int) -> bool:
        """Whether ``put`` is certain to refuse a new value of at least that size. Takes no lock.

        In a full cache that never evicts, every miss would otherwise pack its value in vain and hold the writer's lock.
        """
        header = self.region.header
        if int(header[H_POLICY]) != STATIC or self._is_being_written():
            return False
        taken_bytes = self.region.index_bytes + int(header[H_VALUE_BYTES])
        if taken_bytes + extent_for(least_bytes + 1) <= int(header[H_LIMIT]) or self._table.find(digest) is not None:
            return False
        self._readers.row()[R_PASSED] += 1
        return True

    def _is_being_written(self) -> bool:
        """Whether a thread is writing a value, or crashed while doing so."""
        # Every new entry takes a new tag, so checking this word suffices; reading the rows would touch one cache line
        # per thread.
        tags = int(self.region.header[H_TAGS])
        if tags != self._tags_at_rest:
            if self.region.rows[:, R_WRITING].any():
                return True
            self._tags_at_rest = tags
        return False

    def remove(self, digest: bytes) -> None:
        with self.region.changing():
            self.remove_locked(digest)

    def remove_locked(self, digest: bytes) -> None:
        """``remove`` for callers that hold the writer's lock."""
        found = self._table.find(digest)
        if found is not None and found[1].tag & 3 == HERE:
            self._remove(*found)

    def remove_corrupt(self, digest: bytes) -> None:
        self._readers.row()[R_CORRUPT] += 1
        self.remove(digest)

    def clear(self) -> None:
        """Remove every value except pinned ones, which are of use for later values."""
        with self.region.changing():
            for slot in evictable(self.region.table()):
                at = self._table.at_slot(int(slot))
                entry = self._table.read(at)
                if entry.tag & 3 == HERE:
                    self._remove(at, entry)

    def resize(self, limit_bytes: int) -> None:
        """Change the limit now, and release the memory beyond it."""
        with self.region.changing() as header:
            header[H_LIMIT] = limit_bytes
            self._evict_to_limit()

    def close(self) -> None:
        """Close this process's view."""
        self.policies.clear()
        self.region.close()

    def begin(self) -> None:
        """Start after an earlier run: clear its rows and counts. No other process may have the store open."""
        header = self.region.header
        # Rows are cleared first, because the code below acts on what rows say.
        self.region.rows[:] = 0
        for word in (H_HITS, H_MISSES, H_PASSED, H_CORRUPT, H_EVICTIONS):
            header[word] = 0
        header[H_GROUPS : H_GROUPS + MOST_GROUPS] = 0
        header[H_CHANGING] = 1
        with self.region.changing():
            self._evict_to_limit()
        header[H_READY] = 1

    def note_group(self, group: int) -> None:
        """Note that values of this group are in use from now on."""
        with self.region.changing() as header:
            groups = header[H_GROUPS : H_GROUPS + MOST_GROUPS]
            free = np.flatnonzero(groups == 0)
            # Groups beyond the room in the header count as leftovers.
            if group not in groups and len(free):
                groups[free[0]] = group

    # -- inside, under the writer's lock ------------------------------------------------------

    def _place(self, digest: bytes, extent_bytes: int, *, must: bool) -> Extent | None:
        """A place for a value; None if the value is not to be kept, or another thread is writing it. A value that
        ``must`` be kept is kept against the policy if the limit allows it at all."""
        found = self._table.find(digest)
        if found is None:
            return self._room_for(None if must else digest, extent_bytes)
        entry = found[1]
        if entry.tag & 3 == COMING and self._readers.is_alive(entry.owner):
            return None
        is_fit = entry.extent_bytes == extent_bytes and not self._readers.is_read(entry.offset)
        self._remove(*found, keep_pages=is_fit)
        if not is_fit:
            return self._room_for(None if must else digest, extent_bytes)
        # A writer that crashed may not have allocated the pages.
        return Extent(entry.offset, entry.tag & 3 == HERE)

    def _room_for(self, digest: bytes | None, extent_bytes: int) -> Extent | None:
        """A place for a value, after evicting others if necessary."""
        header = self.region.header
        fixed_bytes = self.region.index_bytes + self._table.grown_bytes()
        if fixed_bytes + extent_bytes > int(header[H_LIMIT]):
            return None
        if fixed_bytes + int(header[H_VALUE_BYTES]) + extent_bytes > int(header[H_LIMIT]):
            self._clear_after_crashes()
        over = fixed_bytes + int(header[H_VALUE_BYTES]) + extent_bytes - int(header[H_LIMIT])
        if over > 0:
            return self._replace(digest, extent_bytes, over)
        if not self._machine_has(extent_bytes):
            # The machine's memory is full, although the cache is not: the cache replaces values instead of growing.
            return self._replace(digest, extent_bytes, extent_bytes)
        return self._empty_place(extent_bytes)

    def _empty_place(self, extent_bytes: int) -> Extent | None:
        offset = self._space.find(extent_bytes)
        return None if offset is None else Extent(offset, False)

    def _replace(self, digest: bytes | None, extent_bytes: int, over_bytes: int) -> Extent | None:
        """Evict values that the policy ranks below the new value; returns a place for the new value."""
        reusable: int | None = None
        policy = self.policies[int(self.region.header[H_POLICY])]
        for slot in policy.victims(self.region.table(), digest):
            at = self._table.at_slot(slot)
            entry = self._table.read(at)
            if entry.tag & 3 != HERE or self._readers.is_read(entry.offset):
                continue
            over_bytes -= entry.extent_bytes
            is_fit = reusable is None and entry.extent_bytes == extent_bytes
            self._remove(at, entry, keep_pages=is_fit)
            self.region.header[H_EVICTIONS] += np.uint64(1)
            if is_fit:
                reusable = entry.offset
            if over_bytes <= 0:
                return self._empty_place(extent_bytes) if reusable is None else Extent(reusable, True)
        if reusable is not None:
            self.region.drop_values(reusable, reusable + extent_bytes)
        return None

    def _evict_to_limit(self) -> None:
        """Evict the least recently used values, under any policy, until the rest fits; pinned ones last."""
        header = self.region.header

        def fits() -> bool:
            return self.region.index_bytes + int(header[H_VALUE_BYTES]) <= int(header[H_LIMIT])

        if fits():
            return
        table, live = self.region.table(), self._table.live()
        is_pinned = table[live, E_OWNER] == np.uint64(PINNED)
        for slot in live[np.lexsort((table[live, E_STAMP], is_pinned))]:
            at = self._table.at_slot(int(slot))
            entry = self._table.read(at)
            if entry.tag & 3 == HERE:
                self._remove(at, entry)
                header[H_EVICTIONS] += np.uint64(1)
                if fits():
                    return

    def _remove(self, at: int, entry: Entry, *, keep_pages: bool = False) -> None:
        self._table.remove(at, entry)
        if keep_pages:
            return
        # A read after the release would allocate the page again, outside any entry.
        until_s = time.monotonic() + _READ_WITHIN_S
        while self._readers.is_read(entry.offset) and time.monotonic() < until_s:
            time.sleep(0.0005)
        self.region.drop_values(entry.offset, entry.offset + entry.extent_bytes)

    def _machine_has(self, extent_bytes: int) -> bool:
        now_s = time.monotonic()
        if now_s > self._headroom_until_s or self._headroom_left_bytes < extent_bytes:
            self._headroom_left_bytes, self._headroom_until_s = self._headroom_bytes(), now_s + _HEADROOM_S
        self._headroom_left_bytes -= extent_bytes
        self.is_short = self.is_short or self._headroom_left_bytes < 0
        return self._headroom_left_bytes >= 0

    def _clear_after_crashes(self) -> None:
        for number in self._readers.crashed_writers():
            self._clear_after(number)

    def _clear_after(self, number: int) -> None:
        """Remove the entries that a row's owner began to write and did not finish."""
        table = self.region.table()
        coming = table[:, E_TAG] & np.uint64(3) == COMING
        for slot in np.flatnonzero(coming & (table[:, E_OWNER] == number)):
            at = self._table.at_slot(int(slot))
            self._remove(at, self._table.read(at))
        self.region.rows[number, R_WRITING] = 0

    def _repair(self) -> None:
        """After a crash during a change of the table: count again, and release pages outside all entries."""
        header, table = self.region.header, self.region.table()
        self._count_again()
        self._forget(self._table.impossible())
        self._clear_after_crashes()
        # Unfinished entries whose row is not marked as writing: the row has a new owner, or the machine was reset.
        unknown = table[:, E_TAG] & np.uint64(3) == COMING
        unknown &= self.region.rows[table[:, E_OWNER].astype(np.int64) % len(self.region.rows), R_WRITING] == 0
        self._forget(np.flatnonzero(unknown))
        self._count_again()
        self._space.drop_unused()
        # The crash may have come between lowering the limit and evicting.
        self._evict_to_limit()
        header[H_CHANGING] = 0

    def _forget(self, slots: np.ndarray) -> None:
        """Remove entries without updating the counts or releasing their pages."""
        for slot in slots.tolist():
            self._table.forget(self._table.at_slot(slot))

    def _count_again(self) -> None:
        header, table, live = self.region.header, self.region.table(), self._table.live()
        header[H_ITEMS] = len(live)
        header[H_VALUE_BYTES] = extent_for(table[live, E_USED]).sum()
        header[H_USED_SLOTS] = np.count_nonzero(table[:, E_TAG] & np.uint64(3) != EMPTY)
