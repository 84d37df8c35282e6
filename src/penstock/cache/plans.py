"""The plans of all ranks of a node, kept in the cache itself, where whoever evicts can ask them.

In:  a plan per rank and epoch, and how far the rank is.
Out: when keys are needed next, by the rank that needs them soonest.
Runs in: trainer (publishes), worker (asks).
"""

from __future__ import annotations

import numpy as np

from penstock.cache.keys import digest
from penstock.cache.plan import NEVER, Plan
from penstock.cache.region import H_PLACES, MOST_RANKS, Region
from penstock.cache.tier import Tier
from penstock.cache.values import Packed, unpack
from penstock.errors import CacheError


class Plans:
    """What ``NextUse`` asks."""

    def __init__(self, region: Region, ram: Tier) -> None:
        self._places = region.header[H_PLACES : H_PLACES + MOST_RANKS]
        self._ram = ram
        self._known: dict[int, tuple[int, Plan]] = {}
        """Per rank, the plan as it lies in shared memory, and the number that says which one it is."""

    def publish(self, rank: int, plan: Plan) -> bool:
        """A rank's epoch begins; False if its plan takes more room than the cache has."""
        if not 0 <= rank < MOST_RANKS:
            raise CacheError(f"rank {rank} of a node: a cache serves {MOST_RANKS} at most")
        self._places[rank] = 0
        kept = self._ram.put(_name(rank), Packed((plan.keys, plan.uses, plan.batches)), pinned=True)
        if kept:
            self._places[rank] = 1
        return kept

    def advance(self, rank: int, batch: int) -> None:
        """A rank is at that batch of its epoch."""
        if self._places[rank]:
            self._places[rank] = batch + 1

    def withdraw(self, rank: int) -> None:
        """A rank's epoch is over, or its loader is gone."""
        self._places[rank] = 0
        self._ram.remove(_name(rank))

    def is_known(self) -> bool:
        return bool(self._places.any())

    def next_uses(self, high: np.ndarray, low: np.ndarray) -> np.ndarray:
        soonest = np.full(len(low), NEVER, np.int64)
        for rank in np.flatnonzero(self._places):
            plan = self._plan(int(rank))
            if plan is not None:
                np.minimum(soonest, plan.distances(low, int(self._places[rank]) - 1), out=soonest)
        return soonest

    def _plan(self, rank: int) -> Plan | None:
        found = self._ram.view(_name(rank))
        if found is None:
            return None
        tag, source = found
        known = self._known.get(rank)
        if known is None or known[0] != tag:
            known = self._known[rank] = (tag, Plan(*unpack(source)))
        return known[1]


def _name(rank: int) -> bytes:
    return digest(("penstock plan", rank))
