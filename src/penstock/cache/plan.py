"""When keys are needed next: one rank's epoch, known in advance.

In:  the keys of every batch, in order.
Out: how many batches from now a key is needed again.
Runs in: trainer (to make it), worker (to ask it).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from penstock.cache.keys import digest

NEVER = 1 << 62
"""How far away a key is that is not needed any more."""


class Plan:
    """Keys and the batches they are needed in, in two sorted arrays that may lie in shared memory."""

    def __init__(self, keys: np.ndarray, uses: np.ndarray, batches: int) -> None:
        self.keys = keys
        """Low words of the keys' digests, sorted."""
        self.uses = uses
        """For every use, place of its key times the stride, plus its batch: sorted, so both are found by bisection."""
        self.batches = batches
        self._stride = batches + 1

    @staticmethod
    def of(batches: Iterable[Sequence[bytes]]) -> Plan:
        """A plan of the digests of every batch's keys."""
        lows: list[int] = []
        numbers: list[int] = []
        count = 0
        for number, known in enumerate(batches):
            lows += [int.from_bytes(each[8:], "little") for each in known]
            numbers += [number] * len(known)
            count = number + 1
        keys, places = np.unique(np.array(lows, np.uint64), return_inverse=True)
        uses = np.unique(places.astype(np.int64) * (count + 1) + np.array(numbers, np.int64))
        return Plan(keys, uses, count)

    @staticmethod
    def of_keys(batches: Iterable[Iterable[object]]) -> Plan:
        return Plan.of([digest(key) for key in keys] for keys in batches)

    @property
    def repeats(self) -> bool:
        """Whether some key is needed in more than one batch."""
        return len(self.uses) > len(self.keys)

    def distances(self, low: np.ndarray, now: int) -> np.ndarray:
        """Per key, batches from batch ``now`` to the next that needs it: 0 if that is batch ``now`` itself."""
        if not len(self.keys):
            return np.full(len(low), NEVER, np.int64)
        places = np.searchsorted(self.keys, low)
        is_known = self.keys[np.minimum(places, len(self.keys) - 1)] == low
        first = places.astype(np.int64) * self._stride
        at = np.searchsorted(self.uses, first + now)
        found = self.uses[np.minimum(at, len(self.uses) - 1)]
        is_needed = is_known & (at < len(self.uses)) & (found < first + self._stride)
        return np.where(is_needed, found - first - now, NEVER)
