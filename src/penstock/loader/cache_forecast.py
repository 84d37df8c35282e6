"""A loader's forecast for its cache: the keys it is going to need, in order, and the batch it is at.

In:  the sampler's batches, read ahead; the keys that each index needs.
Out: the same batches; a forecast in the cache that all ranks of the node see.
Runs in: trainer.

A short epoch is read whole before its first batch. Of a long epoch, the first part is read before the first batch, and
then two batches more for every batch that is delivered, as far ahead as the cache has room for.
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
"""What one use takes in a forecast, including its key."""
_FORECAST_SHARE = 32
"""All forecasts together take at most this fraction (1/32) of the cache; twice as much while they are replaced."""
_REMEMBERED = 1 << 16
_CANNOT = (CacheError, TooLong, OSError)
"""What a cache raises if it is closed, or if a process was stopped in the middle of a change."""


class CacheOrder:
    """One loader's forecast in a cache."""

    def __init__(self, cache: Cache, keys: Callable[[Any], Any], *, batched: bool) -> None:
        """``keys`` gives the keys of an index; ``batched``: whether the sampler gives lists of indices."""
        self._cache = cache
        self._keys = keys
        self._batched = batched
        self._low = functools.lru_cache(_REMEMBERED)(lambda key: int.from_bytes(cache.digest_of(key)[8:], "little"))
        self._claim: int | None = None
        """The cache's number for this epoch's forecast, if it has one."""
        self._pid = os.getpid()

    def begin(self, batches: Iterator[Any], following: Iterator[Any], first: int) -> Iterator[Any]:
        """The epoch's batches from number ``first`` on, after announcing them to the cache. ``following``: the next
        epoch's batches, as far as they can be foreseen; they are announced as well."""
        self.end()
        self._source, self._following = batches, following
        self._first, self._now, self._count = first, 0, 0
        self._drawn: deque[Any] = deque()
        self._is_drawn = False
        self._failure: Exception | None = None
        self._lows, self._numbers, self._published = array("Q"), array("q"), 0
        self._is_forecasting = True
        try:
            share_bytes = self._cache.limit_bytes // _FORECAST_SHARE // (1 + self._cache.plans)
        except _CANNOT:
            share_bytes = 0
        self._most_uses = min(_MOST_USES, share_bytes // _USE_BYTES)
        for _ in range(_FIRST_USES):
            if len(self._lows) >= min(_FIRST_USES, self._most_uses) or not self._look_ahead():
                break
        self._publish()
        return self._batches()

    def position(self, number: int) -> int:
        """The position that workers attach to the values that batch ``number`` uses."""
        return 0 if self._claim is None else position_of(self._claim, number - self._first)

    def advance(self, number: int) -> None:
        """No batch before ``number`` will be fetched any more."""
        if os.getpid() != self._pid or not self._is_forecasting:
            return
        self._now = number - self._first
        try:
            if self._claim is not None:
                self._cache.advance(self._claim, self._now)
        except _CANNOT:
            self._stop_forecasting()
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
        """The epoch is over. Any thread, also inside the garbage collector. Does nothing in a forked child, where the
        forecast is the parent's."""
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
        """Note one more batch; False if none can be foreseen."""
        if not self._is_forecasting or self._failure is not None:
            return False
        if self._draw():
            return True
        batch = next(self._following, None)
        if batch is None:
            return False
        self._note(batch)
        return True

    def _draw(self) -> bool:
        """Read one more batch from the sampler; an error of the sampler is raised when that batch is due."""
        if self._is_drawn:
            return False
        try:
            batch = next(self._source)
        except Exception as end:
            self._is_drawn = True
            self._failure = None if isinstance(end, StopIteration) else end
            return False
        # Some samplers fill the same list again, or give an iterator that can be read only once.
        if self._batched and isinstance(batch, (list, Iterator)):
            batch = list(batch)
        self._drawn.append(batch)
        self._note(batch)
        return True

    def _note(self, batch: Any) -> None:
        number, self._count = self._count, self._count + 1
        if not self._is_forecasting:
            return
        try:
            lows = [self._low(key) for index in (batch if self._batched else (batch,)) for key in self._keys(index)]
        except Exception as problem:
            self._stop_forecasting()
            warnings.warn(
                f"dataset.keys() failed ({problem!r}). Until the epoch ends, the cache evicts what was not used for "
                "longest, because it cannot see what comes next",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        self._lows.extend(lows)
        self._numbers.extend([number] * len(lows))

    def _publish(self) -> None:
        if not self._lows or not self._is_forecasting:
            return
        self._published = len(self._lows)
        plan = Plan.of(np.array(self._lows, np.uint64), np.array(self._numbers, np.int64), self._count)
        try:
            self._claim = self._cache.publish(plan, self._claim, self._now)
        except _CANNOT:
            self._stop_forecasting()

    def _stop_forecasting(self) -> None:
        self._is_forecasting = False
        self.end()
