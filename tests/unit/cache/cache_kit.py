"""What tests of the cache share: a machine with plenty, and when two values are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.cache.cache import Machine

MIB = 1 << 20


def plenty() -> int:
    return 1 << 50


def little() -> int:
    return 64 * MIB


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
