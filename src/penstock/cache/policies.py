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

_BATCH = 256
"""Candidates looked for at a time: a look at the whole table costs as much for one as for many."""


class Policy(Protocol):
    name: str

    def victims(self, table: np.ndarray, newcomer: bytes) -> Iterator[int]: ...


class Static:
    """Fill, and never evict: where every key is used once per epoch no policy has more hits."""

    name = "static"

    def victims(self, table: np.ndarray, newcomer: bytes) -> Iterator[int]:
        return iter(())


class Lru:
    """What was not used for longest goes first."""

    name = "lru"

    def __init__(self) -> None:
        self._candidates: list[tuple[int, int]] = []
        """Slots and stamps of what was oldest at the last look, oldest last."""

    def victims(self, table: np.ndarray, newcomer: bytes) -> Iterator[int]:
        looked = False
        while True:
            while self._candidates:
                slot, stamp = self._candidates.pop()
                # Used since, or gone: it is not the oldest any more.
                if slot < len(table) and int(table[slot, E_STAMP]) == stamp and int(table[slot, E_TAG]) & 3 == HERE:
                    yield slot
            if looked:
                return
            looked = True
            here = evictable(table)
            stamps = table[here, E_STAMP]
            if len(here) > _BATCH:
                oldest = np.argpartition(stamps, _BATCH)[:_BATCH]
                here, stamps = here[oldest], stamps[oldest]
            order = np.argsort(stamps)[::-1]
            self._candidates = list(zip(here[order].tolist(), stamps[order].tolist(), strict=True))


class Oracle(Protocol):
    """When keys are needed next."""

    def next_uses(self, high: np.ndarray, low: np.ndarray) -> np.ndarray:
        """Per key, how many batches from now; large for never."""
        ...


class NextUse:
    """What is needed latest goes first, unless the newcomer is needed later still."""

    name = "next-use"

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle

    def victims(self, table: np.ndarray, newcomer: bytes) -> Iterator[int]:
        here = evictable(table)
        own = np.frombuffer(newcomer, np.uint64)
        uses = self._oracle.next_uses(
            np.append(table[here, E_HIGH], own[0]), np.append(table[here, E_LOW], own[1])
        )  # fmt: skip
        own_use = uses[-1]
        later = np.flatnonzero(uses[:-1] > own_use)
        order = later[np.argsort(uses[later], kind="stable")[::-1]]
        return iter(here[order].tolist())
