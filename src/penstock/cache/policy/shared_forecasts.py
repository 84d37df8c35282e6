"""The plans of all loaders of a node, kept in the cache itself, where whoever evicts can ask them.

In:  a plan per loader and epoch, and how far the loader is.
Out: when keys are needed next, by the loader that needs them soonest.
Runs in: trainer (publishes), worker (asks).

A loader's plan lies under a number it holds a lock on: the plans of the dead are seen to be theirs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable

import numpy as np

from penstock.cache.keys import digest
from penstock.cache.policy.forecast import NEVER, Plan
from penstock.cache.store.locks import release, renew_after_fork, try_lock
from penstock.cache.store.region import H_CLAIMS, H_PLACES, L_PLANS, MOST_PLANS, Region
from penstock.cache.store.store import Tier
from penstock.cache.store.values import Packed, unpack
from penstock.errors import CacheError

# A place: which of the loader's two plans is in force, its serial, and the batch it is at, plus one.
_BATCH_BITS = 32
_BATCH = (1 << _BATCH_BITS) - 1
_MOST_SERIAL = (1 << 20) - 1
_WHICH_BIT = 62


class Plans:
    """What ``NextUse`` asks."""

    def __init__(self, region: Region, tier: Tier) -> None:
        self._places = region.header[H_PLACES : H_PLACES + MOST_PLANS]
        self._region = region
        self._tier = tier
        self._threads = threading.Lock()
        """The kernel does not keep threads of one process out of each other's numbers."""
        self._own: dict[int, int] = {}
        """Numbers held here, or by the process this one was forked from, and which of its two plans is in force."""
        self._known: dict[int, tuple[int, Plan]] = {}
        """Per number, the plan as it lies in shared memory, and the tag that says which one it is."""
        renew_after_fork(self)

    def forget_threads(self) -> None:
        self._threads = threading.Lock()

    # -- a loader's side ------------------------------------------------------------------------

    def claim(self) -> int:
        """A loader's epoch begins: what its plans and positions will be known by. Raises TooLong."""
        with self._region.changing() as header:
            self._bury(range(MOST_PLANS))
            header[H_CLAIMS] = serial = int(header[H_CLAIMS]) % _MOST_SERIAL + 1
        with self._threads:
            for number in range(MOST_PLANS):
                if number not in self._own and try_lock(self._region.lock_fd, L_PLANS + number):
                    self._own[number] = 0
                    self._places[number] = 0
                    return serial * MOST_PLANS + number
        raise CacheError(f"more than {MOST_PLANS} loaders use this cache at once")

    def publish(self, claim: int, plan: Plan, now: int) -> bool:
        """What a loader is going to need, and that it is at batch ``now``; False if there is no room for it. Raises
        TooLong, OSError."""
        number = claim % MOST_PLANS
        before = self._own[number]
        # Beside the last one, which is asked until this one is there.
        if not self._tier.put(_name(number, 1 - before), Packed((plan.keys, plan.uses, plan.batches)), pinned=True):
            return False
        self._own[number] = 1 - before
        self._places[number] = self._place(claim, now)
        self._tier.remove(_name(number, before))
        return True

    def advance(self, claim: int, now: int) -> None:
        """A loader is at that batch of its epoch."""
        if self._places[claim % MOST_PLANS]:
            self._places[claim % MOST_PLANS] = self._place(claim, now)

    def withdraw(self, claim: int) -> None:
        """A loader's epoch is over, or the loader gone. Needs no lock of the cache's: the garbage collector may call.

        What lies in the cache of it goes when the next loader claims a number.
        """
        number = claim % MOST_PLANS
        if self._own.pop(number, None) is not None:
            self._places[number] = 0
            release(self._region.lock_fd, L_PLANS + number)

    def _place(self, claim: int, now: int) -> int:
        number, serial = claim % MOST_PLANS, claim // MOST_PLANS
        return self._own[number] << _WHICH_BIT | serial << _BATCH_BITS | now + 1

    # -- the policy's side, under the writer's lock -----------------------------------------------

    def is_known(self) -> bool:
        return any(self._plan(number, place >> _WHICH_BIT) is not None for number, place in self._all_places())

    def count(self) -> int:
        """Loaders that have said what they need."""
        return len(self._all_places())

    def next_uses(self, low: np.ndarray, positions: np.ndarray) -> np.ndarray:
        soonest = np.full(len(low), NEVER, np.int64)
        claims, batches = positions >> np.uint64(_BATCH_BITS), (positions & np.uint64(_BATCH)).astype(np.int64)
        for number, place in self._all_places():
            plan = self._plan(number, place >> _WHICH_BIT)
            if plan is not None:
                claim = (place >> _BATCH_BITS & _MOST_SERIAL) * MOST_PLANS + number
                # Workers run ahead of their loader: what one of them has used already is not needed for that any more.
                used = np.where(claims == claim, batches, -1)
                np.minimum(soonest, plan.distances(low, (place & _BATCH) - 1, used), out=soonest)
        return soonest

    def bury(self) -> None:
        """Take the plans of loaders that died out of the cache."""
        self._bury([number for number, _ in self._all_places()])

    def _bury(self, numbers: Iterable[int]) -> None:
        with self._threads:
            for number in numbers:
                if number in self._own or not try_lock(self._region.lock_fd, L_PLANS + number):
                    continue
                self._places[number] = 0
                for which in range(2):
                    self._tier.remove_held(_name(number, which))
                release(self._region.lock_fd, L_PLANS + number)

    def _all_places(self) -> list[tuple[int, int]]:
        # Of a copy: the loaders move on meanwhile.
        return [(number, place) for number, place in enumerate(self._places.tolist()) if place]

    def _plan(self, number: int, which: int) -> Plan | None:
        found = self._tier.view(_name(number, which))
        if found is None:
            return None
        tag, source = found
        known = self._known.get(number)
        if known is None or known[0] != tag:
            known = self._known[number] = (tag, Plan(*unpack(source)))
        return known[1]


def position_of(claim: int, batch: int) -> int:
    """A batch of a loader's epoch, as one number. No loader and batch has number 0."""
    return claim << _BATCH_BITS | batch


@functools.cache
def _name(number: int, which: int) -> bytes:
    """A loader has two places for plans, taken in turn."""
    return digest(("penstock plan", number, which))
