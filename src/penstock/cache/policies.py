"""Which values to give up for which.

In:  the table, the newcomer's digest; for ``next-use``, when keys are needed next.
Out: slots of the table, the one to give up first at the front; none, if the newcomer is the one to do without.
Runs in: trainer and worker, under the writer's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from penstock.cache.table import E_LOW, E_MARK, E_STAMP, E_TAG, HERE, evictable

STATIC, LRU, NEXT_USE, LEFTOVERS = range(4)
"""What a tier's header calls the policy in force."""

_BATCH = 256
"""Candidates looked for at a time: a look at the whole table costs as much for one as for many."""


class Policy(Protocol):
    def victims(self, table: np.ndarray, newcomer: bytes | None) -> Iterator[int]:
        """``newcomer`` is None where one is let in whatever it is."""
        ...


class Static:
    """Fill, and never evict: where every key is used once per epoch no policy has more hits."""

    def victims(self, table: np.ndarray, newcomer: bytes | None) -> Iterator[int]:
        return iter(())


class Lru:
    """What was not used for longest goes first."""

    def __init__(self) -> None:
        self._candidates: list[tuple[int, int]] = []
        """Slots and stamps of what was oldest at the last look, oldest last."""

    def victims(self, table: np.ndarray, newcomer: bytes | None) -> Iterator[int]:
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
    """What is of a group nobody has asked for since the tier was opened goes, oldest first; the rest stays.

    On disk, what earlier runs left under fingerprints that no longer are makes room for what is used now.
    """

    def __init__(self, groups: np.ndarray) -> None:
        """``groups`` that were asked for, as they come."""
        super().__init__()
        self._groups = groups
        self._are_none = False

    def _allowed(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self._are_none:
            return _NONE, _NONE
        slots, stamps = super()._allowed(table)
        old = ~np.isin(table[slots, E_MARK], self._groups)
        # Nothing is added to a group nobody asks for: after the last leftover there are no more.
        self._are_none = not old.any()
        return slots[old], stamps[old]


_NONE = np.empty(0, np.int64)


class Oracle(Protocol):
    """When keys are needed next."""

    def is_known(self) -> bool:
        """Whether anybody has said."""
        ...

    def bury(self) -> None:
        """Forget what the dead have said."""
        ...

    def next_uses(self, low: np.ndarray, turns: np.ndarray) -> np.ndarray:
        """Per low word of a key, and turn it was last used in, how many batches from now; large for never."""
        ...


class NextUse(Lru):
    """What is needed latest goes first, unless the newcomer is needed later still; while nobody has said when what is
    needed, what was not used for longest.

    All of the table is looked at for every so many newcomers only; what came since is not considered until then.
    """

    def __init__(self, oracle: Oracle, turn: Callable[[], int]) -> None:
        """``turn`` says for which batch the newcomer was loaded: that use of it is over."""
        super().__init__()
        self.oracle = oracle
        self._turn = turn
        self._far: list[tuple[int, int]] = []
        """Slots and tags of what was needed latest at the last look, the very latest last."""
        self._newcomers_left = 0
        self._chance = np.random.default_rng()

    def victims(self, table: np.ndarray, newcomer: bytes | None) -> Iterator[int]:
        if not self.oracle.is_known():
            yield from super().victims(table, newcomer)
            return
        if self._newcomers_left <= 0:
            self._look(table)
        self._newcomers_left -= 1
        own = None if newcomer is None else np.frombuffer(newcomer, np.uint64)[1]
        for _ in range(2 + len(table) // _FEWEST):
            while self._far:
                slot, tag = self._far[-1]
                is_there = slot < len(table) and int(table[slot, E_TAG]) == tag
                if is_there and own is not None and not self._is_later(table[slot], own):
                    return
                self._far.pop()
                if is_there:
                    yield slot
            self._look(table)

    def _is_later(self, entry: np.ndarray, own: np.uint64) -> bool:
        """Whether an entry is needed later than the newcomer."""
        low, turns = np.array([entry[E_LOW], own]), np.array([entry[E_MARK], self._turn()], np.uint64)
        its, newcomers = self.oracle.next_uses(low, turns)
        return bool(its > newcomers)

    def _look(self, table: np.ndarray) -> None:
        self.oracle.bury()
        slots = evictable(table)
        if len(slots) > _SAMPLE:
            slots = slots[self._chance.integers(len(slots), size=_SAMPLE)]
        count = max(_FEWEST, len(slots) // _PARTS)
        uses = self.oracle.next_uses(table[slots, E_LOW], table[slots, E_MARK])
        if len(slots) > count:
            latest = np.argpartition(uses, -count)[-count:]
            slots, uses = slots[latest], uses[latest]
        slots = slots[np.argsort(uses, kind="stable")]
        self._far = list(zip(slots.tolist(), table[slots, E_TAG].tolist(), strict=True))
        self._newcomers_left = count


_FEWEST, _PARTS = 16, 512
"""How many of the entries that are looked at one look is for: a part of them, at least a few."""
_SAMPLE = 1 << 14
"""Of more entries than these, so many by chance: the farthest of them are far enough, and nobody waits for the rest."""
