"""What a loader tells its cache: which keys it is going to need, in what order, and how far it is.

In:  the sampler's batches, read ahead; the keys each index needs.
Out: the same batches; a plan in the cache that all ranks of the node see.
Runs in: trainer.

A short epoch is known whole before its first batch. Of a long one, so much as not to be waited for; from then on, two
batches more for every one that is delivered, as far ahead as the cache has room to note.
"""

from __future__ import annotations

import bisect
import functools
import os
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from penstock.cache.cache import Cache
from penstock.cache.policy.forecast import Plan
from penstock.cache.policy.shared_forecasts import position_of
from penstock.cache.store.locks import TooLong
from penstock.errors import CacheError

_FIRST_USES = 1 << 17
_MOST_USES = 1 << 19
_USE_BYTES = 16
"""What one use takes in a plan, its key included."""
_PLAN_SHARE = 32
"""One part in so many of the cache is the most that all plans take; twice that while they are replaced."""
_REMEMBERED = 1 << 16
_CANNOT = (CacheError, TooLong, OSError)
"""What a cache raises that is closed, or that somebody has stopped in the middle of a change."""


class CacheOrder:
    """One loader's part in a cache."""

    def __init__(self, cache: Cache, keys: Callable[[Any], Any], *, batched: bool) -> None:
        """``keys`` gives an index's keys; ``batched`` says whether the sampler gives lists of indices."""
        self._cache = cache
        self._keys = keys
        self._batched = batched
        self._low = functools.lru_cache(_REMEMBERED)(lambda key: int.from_bytes(cache.digest_of(key)[8:], "little"))
        self._claim: int | None = None
        """Under which the cache knows this epoch's plans, if it does."""
        self._pid = os.getpid()

    def begin(self, batches: Iterator[Any], following: Iterator[Any], first: int) -> Iterator[Any]:
        """The epoch's batches from number ``first`` on, known to the cache, and those of the next epoch, if anybody
        knows them."""
        self.end()
        self._source, self._following = batches, following
        self._first, self._now, self._count = first, 0, 0
        self._drawn: deque[Any] = deque()
        self._is_drawn = False
        self._failure: Exception | None = None
        self._lows, self._numbers, self._published = array("Q"), array("q"), 0
        self._is_planning = True
        try:
            share_bytes = self._cache.limit_bytes // _PLAN_SHARE // (1 + self._cache.plans)
        except _CANNOT:
            share_bytes = 0
        self._most_uses = min(_MOST_USES, share_bytes // _USE_BYTES)
        for _ in range(_FIRST_USES):
            if len(self._lows) >= min(_FIRST_USES, self._most_uses) or not self._look_ahead():
                break
        self._publish()
        return self._batches()

    def position(self, number: int) -> int:
        """What workers note on values that batch ``number`` uses."""
        return 0 if self._claim is None else position_of(self._claim, number - self._first)

    def advance(self, number: int) -> None:
        """Of the batches before ``number``, none is to be fetched any more."""
        if os.getpid() != self._pid or not self._is_planning:
            return
        self._now = number - self._first
        try:
            if self._claim is not None:
                self._cache.advance(self._claim, self._now)
        except _CANNOT:
            self._stop_planning()
            return
        past = bisect.bisect_left(self._numbers, self._now)
        is_dry = False
        for _ in range(2):
            if is_dry or len(self._lows) - past >= self._most_uses:
                break
            is_dry = not self._look_ahead()
        unsaid = len(self._lows) - self._published
        if unsaid > self._published // 2 or (unsaid and is_dry):
            del self._lows[:past], self._numbers[:past]
            self._publish()

    def end(self) -> None:
        """The epoch is over. Any thread, also within the garbage collector; in a forked child it is the parent's."""
        claim, self._claim = self._claim, None
        if claim is not None and os.getpid() == self._pid:
            self._cache.withdraw(claim)

    # -- inside -------------------------------------------------------------------------------

    def _batches(self) -> Iterator[Any]:
        while self._drawn or self._draw():
            yield self._drawn.popleft()
        if self._failure is not None:
            raise self._failure

    def _look_ahead(self) -> bool:
        """Note one more batch; False if none is known."""
        if not self._is_planning or self._failure is not None:
            return False
        if self._draw():
            return True
        batch = next(self._following, None)
        if batch is None:
            return False
        self._note(batch)
        return True

    def _draw(self) -> bool:
        """Read one more batch from the sampler; what it raises is raised when that batch's turn comes."""
        if self._is_drawn:
            return False
        try:
            batch = next(self._source)
        except Exception as end:
            self._is_drawn = True
            self._failure = None if isinstance(end, StopIteration) else end
            return False
        # Some samplers fill the same list again, or give what can be read once.
        if self._batched and isinstance(batch, (list, Iterator)):
            batch = list(batch)
        self._drawn.append(batch)
        self._note(batch)
        return True

    def _note(self, batch: Any) -> None:
        number, self._count = self._count, self._count + 1
        if not self._is_planning:
            return
        try:
            lows = [self._low(key) for index in (batch if self._batched else (batch,)) for key in self._keys(index)]
        except Exception as problem:
            self._stop_planning()
            warnings.warn(
                f"dataset.keys() failed ({problem!r}): until the epoch ends the cache goes by what was used last, not "
                "by what comes next",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        self._lows.extend(lows)
        self._numbers.extend([number] * len(lows))

    def _publish(self) -> None:
        if not self._lows or not self._is_planning:
            return
        self._published = len(self._lows)
        plan = Plan.of(np.array(self._lows, np.uint64), np.array(self._numbers, np.int64), self._count)
        try:
            self._claim = self._cache.publish(plan, self._claim, self._now)
        except _CANNOT:
            self._stop_planning()

    def _stop_planning(self) -> None:
        self._is_planning = False
        self.end()
