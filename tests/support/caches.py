"""What tests of the cache share: forecasts, and a comparison of values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from penstock.cache.keys import digest
from penstock.cache.policy.forecast import Forecast

MIB = 1 << 20


def lows(keys: Iterable[Any]) -> np.ndarray:
    """The low words of keys' digests, by which forecasts identify them."""
    return np.array([int.from_bytes(digest(key)[8:], "little") for key in keys], np.uint64)


def forecast_of(batches: list[list[Any]]) -> Forecast:
    numbers = [number for number, batch in enumerate(batches) for _ in batch]
    return Forecast.of(lows(key for batch in batches for key in batch), np.array(numbers, np.int64), len(batches))


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        one, other = one.to_dense(), other.to_dense()
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    elif isinstance(one, (np.ndarray, np.generic)):
        assert one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        for a, b in zip(one, other, strict=True):
            same(a, b)
    else:
        assert one == other
