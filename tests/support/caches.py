"""What tests of the cache share: a machine with plenty, plans, and when two values are the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from penstock.cache.cache import Machine
from penstock.cache.keys import digest
from penstock.cache.policy.forecast import Plan

MIB = 1 << 20


def plenty() -> int:
    return 1 << 50


def little() -> int:
    return 64 * MIB


def lows(keys: Iterable[Any]) -> np.ndarray:
    """The low words of keys' digests, by which plans know them."""
    return np.array([int.from_bytes(digest(key)[8:], "little") for key in keys], np.uint64)


def plan_of(batches: list[list[Any]]) -> Plan:
    numbers = [number for number, batch in enumerate(batches) for _ in batch]
    return Plan.of(lows(key for batch in batches for key in batch), np.array(numbers, np.int64), len(batches))


MACHINE = Machine(memory_bytes=little, headroom_bytes=plenty)


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
