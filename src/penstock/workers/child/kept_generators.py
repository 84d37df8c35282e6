"""The caller's randomness, left as it was by code that draws from the same generators.

In:  the global generators: ``random``, numpy's legacy one, torch's.
Out: their state, put back.
Runs in: trainer (samples it fetches itself) and worker (loads for a cache).
"""

from __future__ import annotations

import ctypes
import random
import threading
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

_STATE_WORDS = 624
_SEEDING_FACTOR = 1812433253
"""Of the Mersenne twister's own way to make a state of a number."""
_Words = ctypes.c_uint32 * (_STATE_WORDS + 1)
"""A Mersenne twister as numpy keeps it: its state, and how many words of that are used up."""
_stand_ins: list[Any] = []
"""Generators that have stood in for numpy's, for the next time."""


class KeptGenerators:
    """Inside, the generators are anybody's; afterwards they are as they were.

    numpy takes ten times as long as the others to tell its state and to take it back. One that nobody has drawn from
    since it was seeded steps aside instead, and another one stands in for it.
    """

    def __enter__(self) -> None:
        self._random, self._torch = random.getstate(), torch.default_generator.get_state()
        self._generator = get_bit_generator()
        self._numpy: Any = None
        self._stand_in: Any = None
        # Of two threads that do this at once, one could put back what stood in for the other.
        if threading.current_thread() is threading.main_thread() and _is_as_seeded(self._generator):
            self._stand_in = _stand_ins.pop() if _stand_ins else np.random.MT19937(0)
            set_bit_generator(self._stand_in)
        else:
            self._numpy = np.random.get_state(legacy=False)

    def __exit__(self, *_: object) -> None:
        random.setstate(self._random)
        torch.default_generator.set_state(self._torch)
        if get_bit_generator() is not self._generator:
            set_bit_generator(self._generator)
        if self._stand_in is None:
            np.random.set_state(self._numpy)
        else:
            _stand_ins.append(self._stand_in)


def _is_as_seeded(generator: Any) -> bool:
    """Whether nothing was drawn since ``np.random.seed(number)``.

    Then no second half of a pair of normal deviates is waiting either, which would be lost with the change.
    """
    if type(generator) is not np.random.MT19937:
        return False
    words = _Words.from_address(generator.ctypes.state_address)
    # A seeded state is all used up, and each of its words follows from the one before; the first few will do.
    return words[_STATE_WORDS] == _STATE_WORDS and all(
        words[at] == (_SEEDING_FACTOR * (words[at - 1] ^ words[at - 1] >> 30) + at) & 0xFFFFFFFF for at in (1, 2, 3)
    )
