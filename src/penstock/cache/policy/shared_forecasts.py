"""Stores the forecasts of all loaders of a node in the cache itself, where every process that evicts can read them.

In:  one forecast per loader and epoch, and the loader's current batch.
Out: when keys are needed next, by the loader that needs them first.
Runs in: trainer (publishes), worker (reads).

A loader's forecast is stored under a number, on which the loader holds a lock; the lock of a crashed loader is free.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable

import numpy as np

from penstock.cache.keys import digest
from penstock.cache.policy.forecast import NEVER, Forecast
from penstock.cache.store.locks import release, renew_after_fork, try_lock
from penstock.cache.store.region import H_CLAIMS, H_POSITIONS, L_FORECASTS, MOST_FORECASTS, Region
from penstock.cache.store.store import Store
from penstock.cache.store.values import PackedValue, unpack
from penstock.errors import CacheError

# A position word: which of the loader's two forecasts is in force, its serial number, and its batch plus one.
_BATCH_BITS = 32
_BATCH = (1 << _BATCH_BITS) - 1
_MOST_SERIAL = (1 << 20) - 1
_WHICH_BIT = 62


class SharedForecasts:
    """All loaders' forecasts, as ``NextUse`` reads them."""

    def __init__(self, region: Region, store: Store) -> None:
        self._positions = region.header[H_POSITIONS : H_POSITIONS + MOST_FORECASTS]
        self._region = region
        self._store = store
        self._threads = threading.Lock()
        """Excludes threads of this process from each other, which the kernel's locks do not do."""
        self._own: dict[int, int] = {}
        """Numbers that this process or its parent holds -> which of the number's two forecasts is in force."""
        self._known: dict[int, tuple[int, Forecast]] = {}
        """For each number, the forecast in shared memory and the tag of its entry."""
        renew_after_fork(self)

    def forget_threads(self) -> None:
        self._threads = threading.Lock()

    # -- for loaders ----------------------------------------------------------------------------

    def claim(self) -> int:
        """Begin an epoch of a loader; returns a number for its forecasts and positions. Raises TooLong, CacheError."""
        with self._region.changing() as header:
            self._remove_crashed(range(MOST_FORECASTS))
            header[H_CLAIMS] = serial = int(header[H_CLAIMS]) % _MOST_SERIAL + 1
        with self._threads:
            for number in range(MOST_FORECASTS):
                if number not in self._own and try_lock(self._region.lock_fd, L_FORECASTS + number):
                    self._own[number] = 0
                    self._positions[number] = 0
                    return serial * MOST_FORECASTS + number
        raise CacheError(f"More than {MOST_FORECASTS} loaders use this cache at once.")

    def publish(self, claim: int, forecast: Forecast, now: int) -> bool:
        """Store the forecast of a loader at batch ``now``; False if it does not fit. Raises TooLong, OSError."""
        number = claim % MOST_FORECASTS
        before = self._own[number]
        # This forecast is stored in addition to the previous one, which stays in force until this one is complete.
        packed = PackedValue((forecast.keys, forecast.uses, forecast.batches))
        if not self._store.put(_name(number, 1 - before), packed, pinned=True):
            return False
        self._own[number] = 1 - before
        self._positions[number] = self._position(claim, now)
        self._store.remove(_name(number, before))
        return True

    def advance(self, claim: int, now: int) -> None:
        """Note that a loader is at batch ``now`` of its epoch."""
        if self._positions[claim % MOST_FORECASTS]:
            self._positions[claim % MOST_FORECASTS] = self._position(claim, now)

    def withdraw(self, claim: int) -> None:
        """End an epoch of a loader. This method takes no lock of the cache, so the garbage collector may call it.

        The stored forecasts are removed when the next loader claims a number.
        """
        number = claim % MOST_FORECASTS
        if self._own.pop(number, None) is not None:
            self._positions[number] = 0
            release(self._region.lock_fd, L_FORECASTS + number)

    def _position(self, claim: int, now: int) -> int:
        number, serial = claim % MOST_FORECASTS, claim // MOST_FORECASTS
        return self._own[number] << _WHICH_BIT | serial << _BATCH_BITS | now + 1

    # -- for the policy, under the writer's lock ---------------------------------------------------

    def is_known(self) -> bool:
        return any(self._forecast(number, position >> _WHICH_BIT) for number, position in self._all_positions())

    def count(self) -> int:
        """The number of loaders with a forecast."""
        return len(self._all_positions())

    def next_uses(self, low: np.ndarray, positions: np.ndarray) -> np.ndarray:
        soonest = np.full(len(low), NEVER, np.int64)
        claims, batches = positions >> np.uint64(_BATCH_BITS), (positions & np.uint64(_BATCH)).astype(np.int64)
        for number, position in self._all_positions():
            forecast = self._forecast(number, position >> _WHICH_BIT)
            if forecast is not None:
                claim = (position >> _BATCH_BITS & _MOST_SERIAL) * MOST_FORECASTS + number
                # Workers are ahead of their loader: a use that a worker has already made does not count.
                used = np.where(claims == claim, batches, -1)
                np.minimum(soonest, forecast.distances(low, (position & _BATCH) - 1, used), out=soonest)
        return soonest

    def remove_crashed(self) -> None:
        """Remove the forecasts of crashed loaders from the cache."""
        self._remove_crashed([number for number, _ in self._all_positions()])

    def _remove_crashed(self, numbers: Iterable[int]) -> None:
        with self._threads:
            for number in numbers:
                if number in self._own or not try_lock(self._region.lock_fd, L_FORECASTS + number):
                    continue
                self._positions[number] = 0
                for which in range(2):
                    self._store.remove_locked(_name(number, which))
                release(self._region.lock_fd, L_FORECASTS + number)

    def _all_positions(self) -> list[tuple[int, int]]:
        # These words are read once, because the loaders change them meanwhile.
        return [(number, position) for number, position in enumerate(self._positions.tolist()) if position]

    def _forecast(self, number: int, which: int) -> Forecast | None:
        found = self._store.view(_name(number, which))
        if found is None:
            return None
        tag, source = found
        known = self._known.get(number)
        if known is None or known[0] != tag:
            known = self._known[number] = (tag, Forecast(*unpack(source)))
        return known[1]


def position_of(claim: int, batch: int) -> int:
    """One number for a batch of a loader's epoch; never 0."""
    return claim << _BATCH_BITS | batch


@functools.cache
def _name(number: int, which: int) -> bytes:
    """The key of one of a loader's two forecasts, which are replaced in turn."""
    return digest(("penstock forecast", number, which))
