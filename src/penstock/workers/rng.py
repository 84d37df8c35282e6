"""Where randomness comes from, so that batches are the same whoever fetches them and however often.

In:  the epoch's base seed, rank, epoch and batch number (trainer); the batch's seed and a row (worker).
Out: seeded global generators: ``random``, numpy's legacy one, torch's.
Runs in: both.

Rows of a batch are seeded in stretches that depend on the batch's length alone. A task is always whole
stretches, so it does not matter how a batch was cut, by whom it was fetched, or whether it was fetched twice.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.random  # numpy loads it on first use, which in a forked worker would cost 5 MiB each
import torch

_MASK = (1 << 64) - 1
_COLLATE = 1 << 32
"""A place no row has, for the seed of the collate function."""


def mix(*words: int) -> int:
    """One well-spread 64-bit number from several (splitmix64's finaliser over a running sum)."""
    state = 0
    for word in words:
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def batch_seed(base_seed: int, *, rank: int, epoch: int, batch: int) -> int:
    return mix(base_seed, rank, epoch, batch)


def seed_stretch(seed: int, stretch: int) -> None:
    _seed_generators(mix(seed + stretch))


def seed_collate(seed: int) -> None:
    _seed_generators(mix(seed + _COLLATE))


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # 64 bits would go through an array and cost five times as much
    # torch.manual_seed also visits every accelerator and costs ten times as much.
    torch.default_generator.manual_seed(seed >> 1)


def get_generators() -> tuple[Any, Any, Any]:
    """The state of all three global generators."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_generators(state: tuple[Any, Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
