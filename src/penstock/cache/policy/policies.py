"""Which values to give up for which.

In:  the table, the newcomer's digest; for ``next-use``, when keys are needed next.
Out: slots of the table, the one to give up first at the front; none, if the newcomer is the one to do without.
Runs in: trainer and worker, under the writer's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from penstock.cache.policy.forecast import NEVER
from penstock.cache.store.table import E_LOW, E_MARK, E_STAMP, E_TAG, HERE, evictable

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

    def next_uses(self, low: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Per low word of a key, and position it was last used in, how many batches from now; or NEVER."""
        ...


class NextUse(Lru):
    """What is needed latest goes first, unless the newcomer is needed later still.

    Of what nobody is known to need, what was used outside of all plans goes first, the oldest before the rest, and
    newcomers from there may take its place: whoever has no plan is not left out. Then what plans have used, the newest
    first: its use is over, while the oldest may come up again beyond what is planned. Entries are looked at for every
    so many newcomers only; what came since is not considered until then.
    """

    def __init__(self, oracle: Oracle, position: Callable[[], int]) -> None:
        """``position`` says for which batch the newcomer was loaded: that use of it is over."""
        super().__init__()
        self.oracle = oracle
        self._position = position
        self._far: list[tuple[int, int]] = []
        """Slots and tags of what was needed latest at the last look, the very latest last."""
        self._newcomers_left = 0
        self._chance = np.random.default_rng()

    def victims(self, table: np.ndarray, newcomer: bytes | None) -> Iterator[int]:
        if not self.oracle.is_known():
            yield from super().victims(table, newcomer)
            return
        if self._newcomers_left <= 0 or newcomer is None:
            self._look(table, for_all=newcomer is None)
        self._newcomers_left -= 1
        own = None if newcomer is None else np.frombuffer(newcomer, np.uint64)[1]
        for _ in range(_LOOKS):
            while self._far:
                slot, tag = self._far[-1]
                is_there = slot < len(table) and int(table[slot, E_TAG]) == tag
                if is_there and own is not None and not self._may_go(table[slot], own):
                    return
                self._far.pop()
                if is_there:
                    yield slot
            self._look(table, for_all=True)

    def _may_go(self, entry: np.ndarray, own: np.uint64) -> bool:
        """Whether an entry is needed later than the newcomer, or not at all and the newcomer is of no plan."""
        position = self._position()
        low, positions = np.array([entry[E_LOW], own]), np.array([entry[E_MARK], position], np.uint64)
        its, newcomers = self.oracle.next_uses(low, positions)
        return bool(its > newcomers or (its == NEVER and not position))

    def _look(self, table: np.ndarray, *, for_all: bool) -> None:
        """Find what is needed latest: for the next few newcomers, or ``for_all`` that one large one pushes out."""
        self.oracle.bury()
        slots = self._some(table)
        count = len(slots) if for_all else max(_FEWEST, len(slots) // _PARTS)
        marks, stamps = table[slots, E_MARK], table[slots, E_STAMP]
        uses = self.oracle.next_uses(table[slots, E_LOW], marks)
        ages = np.where(marks == 0, ~stamps, stamps)
        slots = slots[np.lexsort((ages, marks == 0, uses))[-count:]]
        self._far = list(zip(slots.tolist(), table[slots, E_TAG].tolist(), strict=True))
        self._newcomers_left = max(_FEWEST, len(self._far)) if not for_all else 0

    def _some(self, table: np.ndarray) -> np.ndarray:
        """Slots that may go; of a large table, some by chance."""
        if len(table) <= 2 * _SAMPLE:
            return evictable(table)
        some = self._chance.integers(len(table), size=2 * _SAMPLE)
        return some[evictable(table[some])]


_FEWEST, _PARTS = 16, 512
"""How many of the entries that are looked at one look is for: a part of them, at least a few."""
_SAMPLE = 1 << 14
"""Of a table of more slots than twice these, as many by chance: the farthest of them are far enough."""
_LOOKS = 8
"""How often one newcomer has others looked for that could go."""
