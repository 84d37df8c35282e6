"""Seeds of the global random generators, so that batches do not depend on which worker fetches them, or how often.

In:  the epoch's base seed, rank, epoch and batch number (trainer); the batch's seed and a row (worker).
Out: seeded global generators: Python's ``random``, numpy's legacy one, torch's; their states saved and restored.
Runs in: both.

Rows of a batch are seeded in stretches whose length depends on the batch's length alone. A task consists of whole
stretches, so the samples do not depend on how the batch is divided, or on whether a stretch is fetched twice.
"""

from __future__ import annotations

import ctypes
import random
import threading
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator  # loaded later, it costs each worker 5 MiB

_MASK = (1 << 64) - 1
_COLLATE = 1 << 32
"""A stretch number above all others, for the seed of the collate function."""


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
    np.random.seed(seed & 0xFFFFFFFF)  # a 64-bit seed goes through an array, which takes five times as long
    # torch.manual_seed also visits every accelerator and takes ten times as long.
    torch.default_generator.manual_seed(seed >> 1)


def get_generators() -> tuple[Any, Any, Any]:
    """The states of all three global generators."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_generators(state: tuple[Any, Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


class KeptGenerators:
    """A block after which the global generators have the states that they had before it.

    Reading and writing numpy's state takes 70 µs, longer than fetching a small sample. Therefore a numpy generator
    that is unused since it was seeded is not read but replaced for the duration of the block. In a batch of one 4 KB
    sample without workers, this halves the time; so it does in a cache miss of 4 KB.
    """

    def __enter__(self) -> None:
        self._random, self._torch = random.getstate(), torch.default_generator.get_state()
        self._generator = get_bit_generator()
        self._numpy: Any = None
        self._substitute: Any = None
        # Only in the main thread: of two threads, one could restore the substitute of the other.
        if threading.current_thread() is threading.main_thread() and _is_unused(self._generator):
            self._substitute = _substitutes.pop() if _substitutes else np.random.MT19937(0)
            set_bit_generator(self._substitute)
        else:
            self._numpy = np.random.get_state(legacy=False)

    def __exit__(self, *_: object) -> None:
        random.setstate(self._random)
        torch.default_generator.set_state(self._torch)
        if get_bit_generator() is not self._generator:
            set_bit_generator(self._generator)
        if self._substitute is None:
            np.random.set_state(self._numpy)
        else:
            _substitutes.append(self._substitute)


_STATE_WORDS = 624
_SEEDING_FACTOR = 1812433253
"""Of the recurrence by which ``np.random.seed(number)`` fills a Mersenne twister's state."""
_FRESH_WORD, _FRESH_USED = 0x80000000, 623
"""The first word, and the number of used words, of a Mersenne twister that numpy seeded at import."""
_Words = ctypes.c_uint32 * (_STATE_WORDS + 1)
"""A Mersenne twister in numpy's memory: its state, and the number of used words."""
_substitutes: list[Any] = []
"""Substitute generators that are free for use."""


def _is_unused(generator: Any) -> bool:
    """Whether no number was drawn since numpy was imported or ``np.random.seed(number)`` was called.

    In that case numpy does not hold the second of a pair of normal deviates either, which replacing would lose.
    """
    if type(generator) is not np.random.MT19937:
        return False
    words = _Words.from_address(generator.ctypes.state_address)
    used = words[_STATE_WORDS]
    if used == _FRESH_USED and words[0] == _FRESH_WORD:
        return True
    # After seeding, all words count as used, and each is computed from the one before it; checking three is enough.
    return used == _STATE_WORDS and all(
        words[at] == (_SEEDING_FACTOR * (words[at - 1] ^ words[at - 1] >> 30) + at) & 0xFFFFFFFF for at in (1, 2, 3)
    )
