"""How many batches may be ahead of the training loop: more where it waited in vain, fewer where they lie about.

In:  what the loop found when it asked for a batch, how long it waited, how long workers had nothing to do.
Out: the depth in force.
Runs in: trainer, under the engine's lock.

Times are counted in batches: as many as all workers together make in that time.
"""

from __future__ import annotations

import math

from penstock.loader.rules import LoaderRules


class Ahead:
    """The depth, between the least that keeps workers busy with even samples and the most that memory is worth."""

    def __init__(self, rules: LoaderRules) -> None:
        self._rules = rules
        self.depth = self._least = self._most = 2
        self._price = 1.0
        """The loss, in batches, that one more batch ahead must save to be worth its pages."""
        self._missed = 0.0
        """Batches that workers could have made lately while the depth left them nothing to do."""
        self._lost = 0.0
        """Of these, the batches that the loop then waited for, beyond what is tolerated."""
        self._taken = 0
        self._spare: int | None = None
        """The fewest batches that were ready when the loop asked, in this stretch of ``_taken`` batches."""

    def bound(self, least: int, most: int, price: float) -> int:
        """Keep the depth between two bounds, which follow the samples, as ``price`` does; returns the depth."""
        self._least, self._most, self._price = least, max(least, most), price
        self.depth = max(self._least, min(self.depth, self._most))
        return self.depth

    @property
    def may_grow(self) -> bool:
        return self.depth < self._most

    def note_idle(self, batches: float) -> None:
        """Workers had nothing to do for as long as it takes to make ``batches``."""
        self._missed = min(self._missed + batches, self._most)

    def note_wait(self, batches: float) -> None:
        """The loop waited for as long as it takes to make ``batches``."""
        late = min(batches, self._missed)
        self._missed -= late
        self._lost += late
        if self._lost >= self._price:
            self._grow(int(self._lost / self._price))
            self._lost %= self._price

    def note_taken(self, batches: float, ready: int) -> None:
        """The loop asked for a batch while ``ready`` ones were there, ``batches`` after it last asked."""
        self._missed *= self._rules.remembered
        self._lost = max(0.0, self._lost - self._rules.tolerated * batches)
        self._spare = ready if self._spare is None else min(self._spare, ready)
        self._taken += 1
        if self._taken >= max(self._rules.shrink_after, 4 * self.depth):
            # One of them was what the loop came for; the others were there for nothing.
            surplus = max(0, self._spare - 1)
            self.depth = max(self._least, self.depth - math.ceil(surplus / 8))
            self._taken, self._spare = 0, None

    @property
    def most_spare(self) -> int:
        """Counting ready batches beyond this many changes nothing."""
        return self.depth if self._spare is None else self._spare

    def _grow(self, batches: int) -> None:
        self.depth = min(self.depth + batches, self._most)
        self._taken, self._spare = 0, None
