"""One loader's forecast for its cache: the keys that the loader will need, in order, and how far the loader is.

In:  the sampler's batches, read ahead; the keys that each index needs.
Out: the same batches; a forecast in the cache, for all ranks of the node.
Runs in: trainer.

A short epoch is read completely before its first batch. Of a long epoch, only so much is read at first that the user
does not have to wait. After that, two more batches are read for each delivered batch, until the cache's room for
forecasts is full.
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
from penstock.cache.keys import keys_of
from penstock.cache.policy.forecast import Forecast
from penstock.cache.policy.shared_forecasts import position_of
from penstock.cache.store.locks import TooLong
from penstock.errors import CacheError

_FIRST_USES = 1 << 17
_MOST_USES = 1 << 19
_USE_BYTES = 16
"""The size of one entry of a forecast, including its key."""
_FORECASTS_SHARE = 32
"""All forecasts together take at most one part in this many of the cache, or two such parts while a forecast is
replaced."""
_REMEMBERED = 1 << 16
_CANNOT = (CacheError, TooLong, OSError)
"""The exceptions of a cache that is closed, or that a stopped process holds locked."""


class ForecastClaim:
    """The loader's claim on the cache's current forecast. It ends with the loader, so it refers to no object of the
    loader."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._pid = os.getpid()
        self.number: int | None = None

    @property
    def is_own(self) -> bool:
        """Whether this process made the claim, instead of its parent."""
        return os.getpid() == self._pid

    def end(self) -> None:
        """Withdraw the forecast. Any thread may call this, even inside the garbage collector. Does nothing in a forked
        child."""
        number, self.number = self.number, None
        if number is not None and self.is_own:
            self._cache.withdraw(number)


class CacheForecast:
    """The forecasts of one loader, epoch by epoch."""

    def __init__(self, cache: Cache, keys: Callable[[Any], Any], *, batched: bool) -> None:
        """``keys`` returns the keys of an index. ``batched``: whether the sampler yields lists of indices."""
        self._cache = cache
        self._keys = keys
        self._batched = batched
        self._low = functools.lru_cache(_REMEMBERED)(lambda key: int.from_bytes(cache.digest_of(key)[8:], "little"))
        self.claim = ForecastClaim(cache)

    @classmethod
    def of(cls, cache: Cache, dataset: Any, *, batched: bool) -> CacheForecast | None:
        """The forecast of a loader; None if the dataset does not name its keys, or if the cache's policy reads no
        forecasts."""
        keys = keys_of(dataset)
        return None if keys is None or not cache.uses_forecasts else cls(cache, keys, batched=batched)

    def begin(self, batches: Iterator[Any], following: Iterator[Any], first: int) -> Iterator[Any]:
        """The epoch's batches from number ``first`` on; the cache gets their forecast.

        ``following``: the batches of the next epoch, as far as they are known.
        """
        self.claim.end()
        self._source, self._following = batches, following
        self._first, self._now, self._count = first, 0, 0
        self._drawn: deque[Any] = deque()
        self._is_drawn = False
        self._failure: Exception | None = None
        self._lows, self._numbers, self._published = array("Q"), array("q"), 0
        self._is_active = True
        try:
            share_bytes = self._cache.limit_bytes // _FORECASTS_SHARE // (1 + self._cache.forecasts)
        except _CANNOT:
            share_bytes = 0
        self._most_uses = min(_MOST_USES, share_bytes // _USE_BYTES)
        for _ in range(_FIRST_USES):
            if len(self._lows) >= min(_FIRST_USES, self._most_uses) or not self._read_ahead():
                break
        self._publish()
        return self._batches()

    def position(self, number: int) -> int:
        """The position that workers note on the values that batch ``number`` uses."""
        return 0 if self.claim.number is None else position_of(self.claim.number, number - self._first)

    def advance(self, number: int) -> None:
        """Note that all batches before ``number`` have been fetched."""
        if not self.claim.is_own or not self._is_active:
            return
        self._now = number - self._first
        try:
            if self.claim.number is not None:
                self._cache.advance(self.claim.number, self._now)
        except _CANNOT:
            self._stop()
            return
        past = bisect.bisect_left(self._numbers, self._now)
        is_exhausted = False
        for _ in range(2):
            if is_exhausted or len(self._lows) - past >= self._most_uses:
                break
            is_exhausted = not self._read_ahead()
        unpublished = len(self._lows) - self._published
        if unpublished > self._published // 2 or (unpublished and is_exhausted):
            del self._lows[:past], self._numbers[:past]
            self._publish()

    # -- inside -------------------------------------------------------------------------------

    def _batches(self) -> Iterator[Any]:
        while self._drawn or self._draw():
            yield self._drawn.popleft()
        if self._failure is not None:
            raise self._failure

    def _read_ahead(self) -> bool:
        """Add one more batch to the forecast; False if no further batch is known."""
        if not self._is_active or self._failure is not None:
            return False
        if self._draw():
            return True
        batch = next(self._following, None)
        if batch is None:
            return False
        self._note(batch)
        return True

    def _draw(self) -> bool:
        """Read one more batch from the sampler. An exception is kept and raised later, in place of the batch."""
        if self._is_drawn:
            return False
        try:
            batch = next(self._source)
        except Exception as end:
            self._is_drawn = True
            self._failure = None if isinstance(end, StopIteration) else end
            return False
        # Some samplers reuse one list, or yield iterators, which can be read only once.
        if self._batched and isinstance(batch, (list, Iterator)):
            batch = list(batch)
        self._drawn.append(batch)
        self._note(batch)
        return True

    def _note(self, batch: Any) -> None:
        number, self._count = self._count, self._count + 1
        if not self._is_active:
            return
        try:
            lows = [self._low(key) for index in (batch if self._batched else (batch,)) for key in self._keys(index)]
        except Exception as problem:
            self._stop()
            warnings.warn(
                f"dataset.keys() failed ({problem!r}). Until the epoch ends, the cache evicts the least recently used "
                "values instead of the values that are needed last.",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        self._lows.extend(lows)
        self._numbers.extend([number] * len(lows))

    def _publish(self) -> None:
        if not self._lows or not self._is_active:
            return
        self._published = len(self._lows)
        forecast = Forecast.of(np.array(self._lows, np.uint64), np.array(self._numbers, np.int64), self._count)
        try:
            self.claim.number = self._cache.publish(forecast, self.claim.number, self._now)
        except _CANNOT:
            self._stop()

    def _stop(self) -> None:
        self._is_active = False
        self.claim.end()
