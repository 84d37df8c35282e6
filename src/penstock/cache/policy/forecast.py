"""When keys are needed next: what a loader is going to ask for, known in advance.

In:  keys, and the batches that need them.
Out: how many batches from now a key is needed again.
Runs in: trainer (to make it), worker (to ask it).
"""

from __future__ import annotations

import numpy as np

NEVER = 1 << 62
"""How far away a key is that is not needed any more."""


class Plan:
    """Keys and the batches they are needed in, in two sorted arrays that may lie in shared memory."""

    def __init__(self, keys: np.ndarray, uses: np.ndarray, batches: int) -> None:
        self.keys = keys
        """Low words of the keys' digests, sorted."""
        self.uses = uses
        """For every use, place of its key times the stride, plus twice its batch: sorted, so bisection finds both. One
        more stands for all further uses in the same batch: when the first is over, they are still to come."""
        self.batches = batches
        self._stride = 2 * batches + 2

    @staticmethod
    def of(lows: np.ndarray, numbers: np.ndarray, batches: int) -> Plan:
        """A plan of uses: low words of the digests of what is needed, and the batch each is needed in."""
        keys, places = np.unique(lows, return_inverse=True)
        firsts = places.astype(np.int64) * (2 * batches + 2) + 2 * numbers.astype(np.int64)
        uses, counts = np.unique(firsts, return_counts=True)
        # It lies in the memory of the cache: half as large where that will do.
        is_short = (len(keys) + 1) * (2 * batches + 2) < 1 << 32
        uses = np.sort(np.concatenate((uses, uses[counts > 1] + 1)))
        return Plan(keys, uses.astype(np.uint32) if is_short else uses, batches)

    @property
    def repeats(self) -> bool:
        """Whether some key is needed more than once."""
        return len(self.uses) > len(self.keys)

    def distances(self, low: np.ndarray, now: int, besides: np.ndarray | int = -1) -> np.ndarray:
        """Per key, batches from batch ``now`` to the next that needs it, not counting its first use in batch
        ``besides``: 0 if that is batch ``now`` itself."""
        if not len(self.keys):
            return np.full(len(low), NEVER, np.int64)
        places = np.searchsorted(self.keys, low)
        is_known = self.keys[np.minimum(places, len(self.keys) - 1)] == low
        first = places.astype(np.int64) * self._stride
        # Of the same type as what is searched, which would be converted as a whole.
        at = np.searchsorted(self.uses, (first + 2 * min(now, self.batches)).astype(self.uses.dtype))
        last = len(self.uses) - 1
        at += self.uses[np.minimum(at, last)] == first + 2 * np.asarray(besides)
        found = self.uses[np.minimum(at, last)]
        is_needed = is_known & (at <= last) & (found < first + self._stride)
        return np.where(is_needed, (found - first) // 2 - now, NEVER)
