"""A forecast: the keys that a loader is going to need, and the batches that need them.

In:  keys, and the batch that needs each.
Out: in how many batches a key is needed next.
Runs in: trainer (makes it), worker (reads it).
"""

from __future__ import annotations

import numpy as np

NEVER = 1 << 62
"""The distance of a key that is not needed again."""


class Forecast:
    """Keys and the batches that need them, in two sorted arrays that may be in shared memory."""

    def __init__(self, keys: np.ndarray, uses: np.ndarray, batches: int) -> None:
        self.keys = keys
        """Low words of the keys' digests, sorted."""
        self.uses = uses
        """For each use, the index of its key times the stride, plus twice its batch; sorted for bisection. The same
        number plus one represents all further uses in the same batch."""
        self.batches = batches
        self._stride = 2 * batches + 2

    @staticmethod
    def of(lows: np.ndarray, numbers: np.ndarray, batches: int) -> Forecast:
        """``lows``: the low words of the digests of needed keys; ``numbers``: the batch that needs each."""
        keys, places = np.unique(lows, return_inverse=True)
        firsts = places.astype(np.int64) * (2 * batches + 2) + 2 * numbers.astype(np.int64)
        uses, counts = np.unique(firsts, return_counts=True)
        # The arrays take memory of the cache, so they are half as wide where that suffices.
        is_short = (len(keys) + 1) * (2 * batches + 2) < 1 << 32
        uses = np.sort(np.concatenate((uses, uses[counts > 1] + 1)))
        return Forecast(keys, uses.astype(np.uint32) if is_short else uses, batches)

    @property
    def repeats(self) -> bool:
        """Whether some key is needed more than once."""
        return len(self.uses) > len(self.keys)

    def distances(self, low: np.ndarray, now: int, except_in: np.ndarray | int = -1) -> np.ndarray:
        """For each key, the number of batches from batch ``now`` to the next batch that needs the key; 0 if batch
        ``now`` needs it. The first use in batch ``except_in`` does not count."""
        if not len(self.keys):
            return np.full(len(low), NEVER, np.int64)
        places = np.searchsorted(self.keys, low)
        is_known = self.keys[np.minimum(places, len(self.keys) - 1)] == low
        first = places.astype(np.int64) * self._stride
        # searchsorted would convert the whole array if the types differed.
        at = np.searchsorted(self.uses, (first + 2 * min(now, self.batches)).astype(self.uses.dtype))
        last = len(self.uses) - 1
        at += self.uses[np.minimum(at, last)] == first + 2 * np.asarray(except_in)
        found = self.uses[np.minimum(at, last)]
        is_needed = is_known & (at <= last) & (found < first + self._stride)
        return np.where(is_needed, (found - first) // 2 - now, NEVER)
