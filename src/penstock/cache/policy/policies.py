"""Policies, which choose the values to evict for a new value.

In:  the table, the new value's digest; for ``next-use``, when keys are needed next.
Out: slots of the table, in the order of eviction; no slots if the new value is not worth an eviction.
Runs in: trainer and worker, under the writer's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from penstock.cache.policy.forecast import NEVER
from penstock.cache.store.table import E_LOW, E_MARK, E_STAMP, E_TAG, HERE, evictable

STATIC, LRU, NEXT_USE, LEFTOVERS = range(4)
"""The policies' numbers in a store's header."""

_CANDIDATES = 256
"""Candidates found at a time: a scan of the table costs the same for one candidate as for many."""


class Policy(Protocol):
    def victims(self, table: np.ndarray, newcomer: bytes | None) -> Iterator[int]:
        """Slots to evict, in order. ``newcomer`` is the digest of the new value; None if the new value must be kept."""
        ...


class Static:
    """Fills the cache and never evicts. If every key is used once per epoch, no policy has more hits than this one."""

    def victims(self, table: np.ndarray, newcomer: bytes | None) -> Iterator[int]:
        return iter(())


class Lru:
    """Evicts the least recently used value."""

    def __init__(self) -> None:
        self._candidates: list[tuple[int, int]] = []
        """Slots and stamps of the oldest values at the last scan, the oldest last."""

    def victims(self, table: np.ndarray, newcomer: bytes | None) -> Iterator[int]:
        scans = 1 + len(table) // _CANDIDATES
        while True:
            while self._candidates:
                slot, stamp = self._candidates.pop()
                # Otherwise the value was used or removed since the scan.
                if slot < len(table) and int(table[slot, E_STAMP]) == stamp and int(table[slot, E_TAG]) & 3 == HERE:
                    yield slot
            if not scans:
                return
            scans -= 1
            slots, stamps = self._allowed(table)
            if not len(slots):
                return
            if len(slots) > _CANDIDATES:
                oldest = np.argpartition(stamps, _CANDIDATES)[:_CANDIDATES]
                slots, stamps = slots[oldest], stamps[oldest]
            order = np.argsort(stamps)[::-1]
            self._candidates = list(zip(slots[order].tolist(), stamps[order].tolist(), strict=True))

    def _allowed(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Slots whose values may be evicted, and when they were last used."""
        slots = evictable(table)
        return slots, table[slots, E_STAMP]


class Leftovers(Lru):
    """Evicts values of groups that no process has requested since the store was opened, the oldest first.

    So on disk, values that earlier runs stored under other fingerprints make room for values of fingerprints in use.
    """

    def __init__(self, groups: np.ndarray) -> None:
        """``groups``: the groups that were requested so far, in shared memory."""
        super().__init__()
        self._groups = groups
        self._are_none = False

    def _allowed(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self._are_none:
            return _NONE, _NONE
        slots, stamps = super()._allowed(table)
        old = ~np.isin(table[slots, E_MARK], self._groups)
        # No value is added to a group that no process requests, so once there are no leftovers, there will never be
        # any.
        self._are_none = not old.any()
        return slots[old], stamps[old]


_NONE = np.empty(0, np.int64)


class Oracle(Protocol):
    """When keys are needed next; see ``SharedForecasts``."""

    def is_known(self) -> bool:
        """Whether there is any forecast."""
        ...

    def remove_crashed(self) -> None:
        """Remove forecasts of crashed loaders."""
        ...

    def next_uses(self, low: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """For each key, given by its low word and the position of its last use: in how many batches it is needed, or
        NEVER."""
        ...


class NextUse(Lru):
    """Evicts the value that is needed last, unless the new value is needed even later.

    Values that no forecast needs are evicted first. Of these values, the ones that were used outside all forecasts go
    before the rest, the oldest first. A new value that is used outside all forecasts may replace such a value, so users
    without a forecast get a share of the cache too. The rest are values that forecasts have used. Of these, the newest
    go first: their use is over, while the oldest may be needed again beyond the end of the forecast. The table is
    scanned once for several new values; values added after a scan are candidates from the next scan on.
    """

    def __init__(self, oracle: Oracle, position: Callable[[], int]) -> None:
        """``position``: the batch that the new value was loaded for; this use of the value is over."""
        super().__init__()
        self.oracle = oracle
        self._position = position
        self._far: list[tuple[int, int]] = []
        """Slots and tags of the values that are needed last, from the latest scan; the value needed last of all is at
        the end."""
        self._newcomers_left = 0
        self._chance = np.random.default_rng()

    def victims(self, table: np.ndarray, newcomer: bytes | None) -> Iterator[int]:
        if not self.oracle.is_known():
            yield from super().victims(table, newcomer)
            return
        if self._newcomers_left <= 0 or newcomer is None:
            self._scan(table, for_all=newcomer is None)
        self._newcomers_left -= 1
        own = None if newcomer is None else np.frombuffer(newcomer, np.uint64)[1]
        for _ in range(_MOST_SCANS):
            while self._far:
                slot, tag = self._far[-1]
                is_there = slot < len(table) and int(table[slot, E_TAG]) == tag
                if is_there and own is not None and not self._may_go(table[slot], own):
                    return
                self._far.pop()
                if is_there:
                    yield slot
            self._scan(table, for_all=True)

    def _may_go(self, entry: np.ndarray, own: np.uint64) -> bool:
        """Whether an entry is needed later than the new value, or is never needed and the new value belongs to no
        forecast."""
        position = self._position()
        low, positions = np.array([entry[E_LOW], own]), np.array([entry[E_MARK], position], np.uint64)
        its, newcomers = self.oracle.next_uses(low, positions)
        return bool(its > newcomers or (its == NEVER and not position))

    def _scan(self, table: np.ndarray, *, for_all: bool) -> None:
        """Find the values needed last: enough for a few new values, or with ``for_all`` as many as a large value may
        evict."""
        self.oracle.remove_crashed()
        slots = self._some(table)
        count = len(slots) if for_all else max(_FEWEST, len(slots) // _PARTS)
        marks, stamps = table[slots, E_MARK], table[slots, E_STAMP]
        uses = self.oracle.next_uses(table[slots, E_LOW], marks)
        ages = np.where(marks == 0, ~stamps, stamps)
        slots = slots[np.lexsort((ages, marks == 0, uses))[-count:]]
        self._far = list(zip(slots.tolist(), table[slots, E_TAG].tolist(), strict=True))
        self._newcomers_left = max(_FEWEST, len(self._far)) if not for_all else 0

    def _some(self, table: np.ndarray) -> np.ndarray:
        """Slots that may be evicted; of a large table, a random sample."""
        if len(table) <= 2 * _SAMPLE:
            return evictable(table)
        some = self._chance.integers(len(table), size=2 * _SAMPLE)
        return some[evictable(table[some])]


_FEWEST, _PARTS = 16, 512
"""A scan keeps one candidate per ``_PARTS`` entries, and at least ``_FEWEST`` candidates."""
_SAMPLE = 1 << 14
"""A table with more than twice this number of slots is sampled, because the farthest uses in a sample are far
enough."""
_MOST_SCANS = 8
"""Scans for one new value at most."""
