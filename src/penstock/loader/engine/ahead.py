"""How many batches may be ahead of the training loop: more where it waited in vain, fewer where they lie about.

In:  what the loop found when it asked for a batch, how long it waited, what idle workers could have made meanwhile.
Out: the depth in force.
Runs in: trainer, under the engine's lock.
"""

from __future__ import annotations

import math

from penstock.loader.rules import LoaderRules


class Ahead:
    """The depth, between the least that keeps workers busy with even samples and the most that memory is worth."""

    def __init__(self, rules: LoaderRules) -> None:
        self._rules = rules
        self.depth = self._least = self._most = 2
        self._missed = 0.0
        """Batches that workers could have made lately while the depth left them nothing to do."""
        self._short = 0.0
        """Of these, the batches that the loop then waited for; whole ones are added to the depth."""
        self._taken = 0
        self._spare: int | None = None
        """The fewest batches that were ready when the loop asked, in this stretch of ``_taken`` batches."""

    def bound(self, least: int, most: int) -> int:
        """Keep the depth between two bounds, which follow the samples; returns the depth."""
        self._least, self._most = least, max(least, most)
        self.depth = max(self._least, min(self.depth, self._most))
        return self.depth

    @property
    def may_grow(self) -> bool:
        return self.depth < self._most

    def grow(self, batches: int = 1) -> None:
        """The loop waits while a worker has nothing to do: another batch would be useful."""
        self.depth = min(self.depth + batches, self._most)
        self._taken, self._spare = 0, None

    def note_idle(self, batches: float) -> None:
        """Workers had nothing to do for as long as it takes to make ``batches``."""
        self._missed = min(self._missed + batches, self._most)

    def note_wait(self, batches: float) -> None:
        """The loop waited for as long as it takes to make ``batches``."""
        late = min(batches, self._missed)
        self._missed -= late
        self._short += late
        if self._short >= 1.0:
            self.grow(int(self._short))
            self._short %= 1.0

    def note_taken(self, ready: int) -> None:
        """The loop asked for a batch while ``ready`` ones were there."""
        self._missed *= self._rules.remembered
        self._short *= self._rules.remembered
        self._spare = ready if self._spare is None else min(self._spare, ready)
        self._taken += 1
        if self._taken >= max(self._rules.shrink_after, 4 * self.depth):
            # One of them was what the loop came for; the others were there for nothing.
            surplus = max(0, self._spare - 1)
            self.depth = max(self._least, self.depth - math.ceil(surplus / 8))
            self._taken, self._spare = 0, None
