"""Which values to give up for which.

In:  the table, the newcomer's digest; for ``next-use``, when keys are needed next.
Out: slots of the table, the one to give up first at the front; none, if the newcomer is the one to do without.
Runs in: trainer and worker, under the writer's lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from penstock.cache.table import E_HIGH, E_LOW, E_STAMP, E_TAG, HERE, evictable

STATIC, LRU, NEXT_USE, LEFTOVERS = range(4)
"""What a tier's header calls the policy in force."""

_BATCH = 256
"""Candidates looked for at a time: a look at the whole table costs as much for one as for many."""


class Policy(Protocol):
    def victims(self, table: np.ndarray, newcomer: bytes) -> Iterator[int]: ...


class Static:
    """Fill, and never evict: where every key is used once per epoch no policy has more hits."""

    def victims(self, table: np.ndarray, newcomer: bytes) -> Iterator[int]:
        return iter(())


class Lru:
    """What was not used for longest goes first."""

    def __init__(self) -> None:
        self._candidates: list[tuple[int, int]] = []
        """Slots and stamps of what was oldest at the last look, oldest last."""

    def victims(self, table: np.ndarray, newcomer: bytes) -> Iterator[int]:
        looks = 1 + len(table) // _BATCH
        while True:
            while self._candidates:
                slot, stamp = self._candidates.pop()
                # Used since, or gone: it is not the oldest any more.
                if slot < len(table) and int(table[slot, E_STAMP]) == stamp and int(table[slot, E_TAG]) & 3 == HERE:
                    yield slot
            if not looks:
                return
            looks -= 1
            slots, stamps = self._allowed(table)
            if not len(slots):
                return
            if len(slots) > _BATCH:
                oldest = np.argpartition(stamps, _BATCH)[:_BATCH]
                slots, stamps = slots[oldest], stamps[oldest]
            order = np.argsort(stamps)[::-1]
            self._candidates = list(zip(slots[order].tolist(), stamps[order].tolist(), strict=True))

    def _allowed(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Slots whose values may go, and when they were last used."""
        slots = evictable(table)
        return slots, table[slots, E_STAMP]


class Leftovers(Lru):
    """What nobody has used since the tier was opened goes, oldest first; the rest stays.

    On disk, what earlier runs left under fingerprints that no longer are makes room for what is used now.
    """

    def __init__(self, began_ns: int) -> None:
        super().__init__()
        self._began_ns = np.uint64(began_ns)
        self._are_none = False

    def _allowed(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self._are_none:
            return _NONE, _NONE
        slots, stamps = super()._allowed(table)
        old = stamps < self._began_ns
        # What is used now was not, once: after the last leftover there are no more.
        self._are_none = not old.any()
        return slots[old], stamps[old]


_NONE = np.empty(0, np.int64)


class Oracle(Protocol):
    """When keys are needed next."""

    def is_known(self) -> bool:
        """Whether anybody has said."""
        ...

    def next_uses(self, high: np.ndarray, low: np.ndarray) -> np.ndarray:
        """Per key, how many batches from now; large for never."""
        ...


class NextUse(Lru):
    """What is needed latest goes first, unless the newcomer is needed later still; while nobody has said when what is
    needed, what was not used for longest."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__()
        self._oracle = oracle

    def victims(self, table: np.ndarray, newcomer: bytes) -> Iterator[int]:
        if not self._oracle.is_known():
            return super().victims(table, newcomer)
        here = evictable(table)
        own = np.frombuffer(newcomer, np.uint64)
        uses = self._oracle.next_uses(
            np.append(table[here, E_HIGH], own[0]), np.append(table[here, E_LOW], own[1])
        )  # fmt: skip
        own_use = uses[-1]
        later = np.flatnonzero(uses[:-1] > own_use)
        order = later[np.argsort(uses[later], kind="stable")[::-1]]
        return iter(here[order].tolist())
