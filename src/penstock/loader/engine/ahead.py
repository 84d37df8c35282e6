"""How many batches may be ahead of the training loop: more if the loop had to wait for batches, fewer if batches lie
unused.

In:  how many batches were ready when the loop asked for one, how long the loop waited, how long workers had nothing to
     do.
Out: the depth in force.
Runs in: trainer, under the engine's lock.

A time is counted in batches: the number that all workers together make in this time.
"""

from __future__ import annotations

import math

from penstock.loader.rules import LoaderRules


class Ahead:
    """The depth. It lies between the least depth that keeps workers busy with even samples and the largest depth that
    is worth its memory."""

    def __init__(self, rules: LoaderRules) -> None:
        self._rules = rules
        self.depth = self._least = self._most = 2
        self._price = 1.0
        """The loss of time, in batches, that one more batch ahead must prevent to be worth its pages."""
        self._missed = 0.0
        """The number of batches that workers could have made lately while the depth left them nothing to do."""
        self._lost = 0.0
        """The number of these batches for which the loop then waited, beyond the tolerated wait."""
        self._taken = 0
        self._spare: int | None = None
        """The fewest batches that were ready when the loop asked for a batch, in the latest ``_taken`` requests."""

    def bound(self, least: int, most: int, price: float) -> int:
        """Keep the depth between ``least`` and ``most``; returns the depth. Both bounds and ``price`` depend on the
        samples."""
        self._least, self._most, self._price = least, max(least, most), price
        self.depth = max(self._least, min(self.depth, self._most))
        return self.depth

    @property
    def may_grow(self) -> bool:
        return self.depth < self._most

    def note_idle(self, batches: float) -> None:
        """Note that workers had nothing to do for as long as it takes to make ``batches``."""
        self._missed = min(self._missed + batches, self._most)

    def note_wait(self, batches: float) -> None:
        """Note that the loop waited for as long as it takes to make ``batches``."""
        late = min(batches, self._missed)
        self._missed -= late
        self._lost += late
        if self._lost >= self._price:
            self._grow(int(self._lost / self._price))
            self._lost %= self._price

    def note_taken(self, batches: float, ready: int) -> None:
        """Note that the loop asked for a batch while ``ready`` batches were ready. ``batches``: the time since the loop
        last asked, counted in batches."""
        self._missed *= self._rules.remembered
        self._lost = max(0.0, self._lost - self._rules.tolerated * batches)
        self._spare = ready if self._spare is None else min(self._spare, ready)
        self._taken += 1
        if self._taken >= max(self._rules.shrink_after, 4 * self.depth):
            # The loop needed one of these batches; the others were made earlier than necessary.
            surplus = max(0, self._spare - 1)
            self.depth = max(self._least, self.depth - math.ceil(surplus / 8))
            self._taken, self._spare = 0, None

    @property
    def most_spare(self) -> int:
        """The number of ready batches beyond which further ready batches make no difference."""
        return self.depth if self._spare is None else self._spare

    def _grow(self, batches: int) -> None:
        self.depth = min(self.depth + batches, self._most)
        self._taken, self._spare = 0, None
