"""One tier of the cache: values of all processes of a node, never more bytes than the limit.

In:  digests and packed values.
Out: the caller's own copies of values.
Runs in: trainer and worker.

A reader takes no lock. It notes the value it is about to read in its row, so that nobody gives the pages away
meanwhile, copies it, and looks whether the entry is still what it was; if not, the copy is worth nothing and it looks
again. A writer sets room aside under the writer's lock, copies without it, and takes the lock once more to say that
the value is there. Whoever dies leaves rows and coming entries that others recognise by the lock their owner no longer
holds; whoever is interrupted finds its own at the next write.
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
    Packed,
    Place,
    Region,
)
from penstock.cache.store.space import Space
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
    Table,
    evictable,
    extent_for,
)

_COPY_UNDER_LOCK_BYTES = 64 << 10
"""Values up to this size are copied while the lock is held: taking it twice costs more."""
_KEY_LOCKS = 1 << 30
_LOOKS = 8
"""How often to look again for a value that changes while it is read."""
_HEADROOM_S = 0.2
"""How long one look at the machine's free room is good for."""
_READ_WITHIN_S = 0.5
"""How long to wait for a reader before the pages it reads are given back."""
READS_IN_ORDER = platform.machine() in ("x86_64", "AMD64")
"""Whether the processor shows one process's writes to the others in the order they were made. Elsewhere, readers take
the writer's lock."""


class Tier:
    def __init__(
        self,
        region: Region,
        policies: dict[int, Any],
        *,
        headroom_bytes: Callable[[], int],
        position: Callable[[], int] | None = None,
    ) -> None:
        """``policies`` by the number the header names them by; ``headroom_bytes`` says what the machine, container or
        disk can still give; ``position`` says for which batch values are looked up now, to be noted on them."""
        self._position = position
        self.region = region
        self.policies = policies
        self._headroom_bytes = headroom_bytes
        self._table = Table(region)
        self._space = Space(region, self._table)
        self._readers = Readers(region)
        self._room_bytes, self._room_until_s = 0, 0.0
        self._at_rest_at = -1
        """How many tags had been given when nobody was seen writing."""
        self.is_short = False
        """Whether the machine could not give what the limit allows."""
        region.repair = self._repair
        self.loading = KeyLocks(region.lock_fd, L_KEYS, _KEY_LOCKS)
        """One per key, for whoever loads it."""

    # -- reading ----------------------------------------------------------------------------

    def get(self, digest: bytes, *, counts: bool = True) -> np.ndarray | None:
        """A private copy of a value's bytes, or None."""
        row = self._readers.row()
        if READS_IN_ORDER:
            found, copy = self._look(digest, row)
        else:
            with self.region.changing():
                found, copy = self._look(digest, row)
        if copy is not None:
            row[R_HITS] += counts
            return copy
        if found:
            self.remove_corrupt(digest)
        row[R_MISSES] += counts
        return None

    def _look(self, digest: bytes, row: np.ndarray) -> tuple[bool, np.ndarray | None]:
        """Whether the key has a value, and a copy of it; none, if what lies there is damaged."""
        table = self._table
        for _ in range(_LOOKS):
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
        """A pinned value's bytes where they lie, and a number that changes when they do; None if there is none."""
        found = self._table.find(digest)
        if found is None or found[1].tag & 3 != HERE:
            return None
        entry = found[1]
        return entry.tag, self.region.values[entry.offset : entry.offset + entry.used_bytes]

    def has(self, digest: bytes) -> bool:
        """Whether a value is there; it counts as used."""
        found = self._table.find(digest)
        if found is None or found[1].tag & 3 != HERE:
            return False
        self._table.touch(found[0], time.time_ns())
        return True

    # -- writing ----------------------------------------------------------------------------

    def put(
        self, digest: bytes, packed: Packed, *, pinned: bool = False, replaces: bool = True, group: int = 0
    ) -> bool:
        """Keep a value, if the policy and the room allow; a pinned one stays until it is replaced. Raises OSError.

        Unless it ``replaces``, what is there already stays. ``group`` is noted where positions are not.
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
            # Before there is an entry: one that is coming is looked for only in rows that say so.
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
            # The table may have been made anew meanwhile, and the entry be elsewhere.
            found = self._table.find(digest)
            is_ours = found is not None and found[1].tag == tag
            if found is not None and is_ours:
                self._table.arrive(found[0], pinned=pinned)
                # Whoever lowered the limit meanwhile could not take out what was still coming.
                self._evict_to_limit()
            row[R_WRITING] = 0
        return is_ours

    def refuses(self, digest: bytes, least_bytes: int) -> bool:
        """Whether a new value of at least so many bytes is refused for certain, seen without the lock.

        Whoever misses in a full cache that gives nothing up would pack for nothing, and hold everybody else up.
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
        """Whether somebody is writing a value, or died while doing so."""
        # Every new entry takes another tag. Rows of all threads lie on as many cache lines.
        tags = int(self.region.header[H_TAGS])
        if tags != self._at_rest_at:
            if self.region.rows[:, R_WRITING].any():
                return True
            self._at_rest_at = tags
        return False

    def remove(self, digest: bytes) -> None:
        with self.region.changing():
            self.remove_held(digest)

    def remove_held(self, digest: bytes) -> None:
        """The same, by one who holds the writer's lock."""
        found = self._table.find(digest)
        if found is not None and found[1].tag & 3 == HERE:
            self._remove(*found)

    def remove_corrupt(self, digest: bytes) -> None:
        self._readers.row()[R_CORRUPT] += 1
        self.remove(digest)

    def clear(self) -> None:
        """Forget every value; what is pinned is of use while others come."""
        with self.region.changing():
            for slot in evictable(self.region.table()):
                at = self._table.at_slot(int(slot))
                entry = self._table.read(at)
                if entry.tag & 3 == HERE:
                    self._remove(at, entry)

    def resize(self, limit_bytes: int) -> None:
        """Change the limit now; what is over it goes back to the system at once."""
        with self.region.changing() as header:
            header[H_LIMIT] = limit_bytes
            self._evict_to_limit()

    def close(self) -> None:
        """Let go of it: the memory is not in use here any more."""
        self.policies.clear()
        self.region.close()

    def begin(self) -> None:
        """Nobody else has it open: what earlier processes were at is over, and counting begins anew."""
        header = self.region.header
        # First of all: what a row says would be acted upon.
        self.region.rows[:] = 0
        for word in (H_HITS, H_MISSES, H_PASSED, H_CORRUPT, H_EVICTIONS):
            header[word] = 0
        header[H_GROUPS : H_GROUPS + MOST_GROUPS] = 0
        header[H_CHANGING] = 1
        with self.region.changing():
            self._evict_to_limit()
        header[H_READY] = 1

    def ask_for(self, group: int) -> None:
        """Values of this group are in use from now on."""
        with self.region.changing() as header:
            groups = header[H_GROUPS : H_GROUPS + MOST_GROUPS]
            free = np.flatnonzero(groups == 0)
            # More groups than there is room to note: the last ones are as good as leftovers.
            if group not in groups and len(free):
                groups[free[0]] = group

    # -- inside, under the writer's lock ------------------------------------------------------

    def _place(self, digest: bytes, extent_bytes: int, *, must: bool) -> Place | None:
        """Where a value is to lie; None if it is not to be kept, or somebody else is writing it. One that ``must`` be
        kept is, whatever the policy would rather have, if there is room at all."""
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
        # Who died while writing may not have come to it.
        return Place(entry.offset, entry.tag & 3 == HERE)

    def _room_for(self, digest: bytes | None, extent_bytes: int) -> Place | None:
        """A place for a value, after others have made room if need be."""
        header = self.region.header
        fixed_bytes = self.region.index_bytes + self._table.grown_bytes()
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
        return self._empty_place(extent_bytes)

    def _empty_place(self, extent_bytes: int) -> Place | None:
        offset = self._space.place(extent_bytes)
        return None if offset is None else Place(offset, False)

    def _replace(self, digest: bytes | None, extent_bytes: int, over_bytes: int) -> Place | None:
        """Evict what is wanted least, if it is wanted less than the newcomer; gives a place for that one."""
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
                return self._empty_place(extent_bytes) if reusable is None else Place(reusable, True)
        if reusable is not None:
            self.region.drop_values(reusable, reusable + extent_bytes)
        return None

    def _evict_to_limit(self) -> None:
        """Whatever the policy: what was not used for longest goes until the rest fits, what is pinned last."""
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
        # A page read after it was given back would exist again, and belong to nobody.
        until_s = time.monotonic() + _READ_WITHIN_S
        while self._readers.is_read(entry.offset) and time.monotonic() < until_s:
            time.sleep(0.0005)
        self.region.drop_values(entry.offset, entry.offset + entry.extent_bytes)

    def _machine_has(self, extent_bytes: int) -> bool:
        now_s = time.monotonic()
        if now_s > self._room_until_s or self._room_bytes < extent_bytes:
            self._room_bytes, self._room_until_s = self._headroom_bytes(), now_s + _HEADROOM_S
        self._room_bytes -= extent_bytes
        self.is_short = self.is_short or self._room_bytes < 0
        return self._room_bytes >= 0

    def _clear_after_the_dead(self) -> None:
        for number in self._readers.dead_writers():
            self._clear_after(number)

    def _clear_after(self, number: int) -> None:
        """Forget what a row's owner began to write and did not finish."""
        table = self.region.table()
        coming = table[:, E_TAG] & np.uint64(3) == COMING
        for slot in np.flatnonzero(coming & (table[:, E_OWNER] == number)):
            at = self._table.at_slot(int(slot))
            self._remove(at, self._table.read(at))
        self.region.rows[number, R_WRITING] = 0

    def _repair(self) -> None:
        """Somebody died while changing the table: count again, and give back what belongs to no entry."""
        header, table = self.region.header, self.region.table()
        self._count_again()
        self._forget(self._table.impossible())
        self._clear_after_the_dead()
        # What is coming, and no row knows of: its owner's row has gone to somebody else, or the machine went down.
        unknown = table[:, E_TAG] & np.uint64(3) == COMING
        unknown &= self.region.rows[table[:, E_OWNER].astype(np.int64) % len(self.region.rows), R_WRITING] == 0
        self._forget(np.flatnonzero(unknown))
        self._count_again()
        self._space.drop_unused()
        # It may have died between lowering the limit and keeping it.
        self._evict_to_limit()
        header[H_CHANGING] = 0

    def _forget(self, slots: np.ndarray) -> None:
        """Take entries out and leave their pages to whoever counts them."""
        for slot in slots.tolist():
            self._table.forget(self._table.at_slot(slot))

    def _count_again(self) -> None:
        header, table, live = self.region.header, self.region.table(), self._table.live()
        header[H_ITEMS] = len(live)
        header[H_VALUE_BYTES] = extent_for(table[live, E_USED]).sum()
        header[H_USED_SLOTS] = np.count_nonzero(table[:, E_TAG] & np.uint64(3) != EMPTY)
