"""Seeds of the global random generators. Batches do not depend on which worker fetches them, or how often.

In:  the epoch's base seed, rank, epoch and batch number (trainer); the batch's seed and a row (worker).
Out: seeded global generators (Python's ``random``, numpy's legacy generator, torch's) and their states.
Runs in: both.

Rows of a batch are seeded in stretches whose length depends on the batch's length alone. A task consists of whole
stretches, so the samples do not depend on how the batch is divided, or on whether a stretch is fetched twice.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1
_COLLATE = 1 << 32
"""A stretch number above all others, for the seed of the collate function."""


class GeneratorUsed(BaseException):
    """A global generator was used while several threads fetched samples: the numbers drawn depend on timing. This is no
    Exception, because a dataset may catch every Exception."""


class _Here(threading.local):
    beside_others = False


_here = _Here()


def note_beside_others() -> None:
    """Note that this thread fetches samples at the same time as other threads of its process, with which it shares the
    generators."""
    _here.beside_others = True


def is_beside_others() -> bool:
    """Whether this thread must leave the generators alone."""
    return _here.beside_others


def mix(*words: int) -> int:
    """Mix several numbers into one well-spread 64-bit number (splitmix64's finaliser over a running sum)."""
    state = 0
    for word in words:
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def batch_seed(base_seed: int, rank: int, epoch: int, batch: int) -> int:
    return mix(base_seed, rank, epoch, batch)


def stretch_seed(seed: int, stretch: int) -> int:
    return mix(seed + stretch)


def collate_seed(seed: int) -> int:
    return mix(seed + _COLLATE)


def seed_stretch(seed: int, stretch: int) -> None:
    _seed_generators(stretch_seed(seed, stretch))


def seed_collate(seed: int) -> None:
    _seed_generators(collate_seed(seed))


def _seed_generators(seed: int) -> None:
    seed_python(seed)
    seed_numpy(seed)
    seed_torch(seed)


seed_python: Callable[[int], None] = random.seed


def seed_numpy(seed: int) -> None:
    np.random.seed(seed & 0xFFFFFFFF)  # a 64-bit seed goes through an array and takes five times as long as this one


def seed_torch(seed: int) -> None:
    # torch.manual_seed also visits every accelerator and takes ten times as long as this call.
    torch.default_generator.manual_seed(seed >> 1)


def get_generators() -> tuple[Any, Any, Any]:
    """The states of all three global generators."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_generators(state: tuple[Any, Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
