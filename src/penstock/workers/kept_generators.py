"""The global random generators while user code runs in the trainer: they are restored afterwards and watched for use.

In:  a block that calls the user's code.
Out: the generators as they were before the block (``KeptGenerators``); which generators it used (``GeneratorWatch``).
Runs in: both; the watch runs in the trainer only.

Saving, seeding and restoring the generators takes as long as fetching dozens of small samples, and most datasets use no
global generator. A watch finds out cheaply whether a block used one. It notices draws and seeding, since these change
the state. It also notices calls that read or set a state, because during the block

- Python's hidden ``Random`` instance has a class that notices every access to ``gauss_next``, such as by ``getstate``,
  ``setstate``, ``seed`` and ``gauss``;
- numpy's functions use another bit generator, which notices any code that reads its state;
- ``torch.default_generator`` is an object that notices every access and passes it on; the functions in ``torch.random``
  use this object too.

A watch does not notice code that holds ``torch.default_generator`` under another name and reads the generator's seed or
state without drawing from it.
"""

from __future__ import annotations

import _random
import ctypes
import functools
import os
import random
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator  # a later import costs each worker 5 MiB

from penstock.workers.rng import get_generators, seed_numpy, seed_python, seed_torch

_STATE_WORDS = 624
"""The number of words in the state of a Mersenne twister; all three generators are Mersenne twisters."""
_STATE_BYTES = 4 * (_STATE_WORDS + 1)
"""The size of Python's and numpy's states: the words, and the number of used words."""
_TORCH_BYTES = 2544
"""The size of torch's state: seed, position and words, then the second halves of pairs of normal deviates."""


class KeptGenerators:
    """A block after which the global generators have the states that they had before it.

    Reading and writing numpy's state takes 70 µs, longer than fetching a small sample. Therefore a numpy generator
    that is unused since it was seeded is not read but replaced for the duration of the block. This halves the time of a
    batch of one 4 KB sample without workers, and the time of a cache miss of 4 KB.

    A watch ignores the block, because the block's results do not depend on the generators' states before it.
    """

    def __enter__(self) -> None:
        watch = _active_watch()
        self._unused = [] if watch is None else [each for each in watch.generators if not each.is_used()]
        self._random, self._torch = random.getstate(), torch.default_generator.get_state()
        self._generator = get_bit_generator()
        self._numpy: Any = None
        self._substitute: Any = None
        # Only in the main thread: with two threads, one thread could restore the substitute of the other thread.
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
        for watched in self._unused:
            watched.forget()


_SEEDING_FACTOR = 1812433253
"""The factor in the recurrence by which ``np.random.seed(number)`` fills a Mersenne twister's state."""
_FRESH_WORD, _FRESH_USED = 0x80000000, 623
"""The first word and the number of used words of a Mersenne twister that numpy seeded at import."""
_Words = ctypes.c_uint32 * (_STATE_WORDS + 1)
"""A Mersenne twister in numpy's memory: its state, and the number of used words."""
_substitutes: list[Any] = []
"""Substitute generators that are free for use."""


def _is_unused(generator: Any) -> bool:
    """Whether no number was drawn since numpy was imported or ``np.random.seed(number)`` was called. If so, numpy does
    not hold the second of a pair of normal deviates either; replacing the generator would lose it."""
    if type(generator) not in (np.random.MT19937, MT19937):
        return False
    words = _Words.from_address(generator.ctypes.state_address)
    used = words[_STATE_WORDS]
    if used == _FRESH_USED and words[0] == _FRESH_WORD:
        return True
    # After seeding, all words count as used. Each word is computed from the word before it, so three are checked.
    return used == _STATE_WORDS and all(
        words[at] == (_SEEDING_FACTOR * (words[at - 1] ^ words[at - 1] >> 30) + at) & 0xFFFFFFFF for at in (1, 2, 3)
    )


# -- watching ---------------------------------------------------------------------------------


class _Raw(Protocol):
    """The state of a generator. If its bytes are equal to earlier bytes, nothing was drawn in between."""

    @property
    def raw(self) -> Any: ...


class WatchedGenerator:
    """One global generator. Between ``begin`` and ``end`` it notices whether it is used."""

    def __init__(self, state: _Raw, seed: Callable[[int], None]) -> None:
        self._state = state
        self._unused = state.raw
        self.seed = seed
        self.is_touched = False
        """Whether the generator's state was read or set."""

    def begin(self) -> None:
        raise NotImplementedError

    def end(self) -> bool:
        """Restore the generator's state from before ``begin``, if any; returns whether it was used."""
        raise NotImplementedError

    def is_used(self) -> bool:
        return self.is_touched or self._state.raw != self._unused

    def forget(self) -> None:
        """What was done so far does not count as use."""
        self._unused = self._state.raw
        self.is_touched = False


class _WatchedPython(WatchedGenerator):
    def __init__(self) -> None:
        self._hidden: random.Random = random._inst  # type: ignore[attr-defined]
        state = _memory_of_python(self._hidden) or _Public(lambda: _random.Random.getstate(self._hidden))
        super().__init__(state, seed_python)
        self._class = self._hidden.__class__
        self._kept, self._gauss = self._unused, self._hidden.__dict__["gauss_next"]

    def begin(self) -> None:
        hidden = self._hidden
        self._gauss = hidden.__dict__["gauss_next"]
        self._kept = self._unused = self._state.raw
        self.is_touched = False
        hidden.__class__ = _NoticingRandom

    def end(self) -> bool:
        hidden = self._hidden
        if hidden.__class__ is self._class:
            return False
        hidden.__class__ = self._class
        is_used = self.is_used()
        if is_used or self._unused is not self._kept:
            hidden.setstate((hidden.VERSION, _words(self._kept), self._gauss))
        return is_used

    def snapshot(self) -> tuple[Any, float | None]:
        return self._state.raw, self._hidden.__dict__["gauss_next"]


class _NoticingRandom(random.Random):
    @property
    def gauss_next(self) -> float | None:
        the_watch().python.is_touched = True
        return self.__dict__["gauss_next"]

    @gauss_next.setter
    def gauss_next(self, value: float | None) -> None:
        the_watch().python.is_touched = True
        self.__dict__["gauss_next"] = value


class _WatchedNumpy(WatchedGenerator):
    def __init__(self) -> None:
        self._stand_in = MT19937(0)
        super().__init__(_memory(self._stand_in.ctypes.state_address, _STATE_BYTES), seed_numpy)
        self._own = get_bit_generator()
        self._own_state: _Raw | None = None
        self._whole: Any = None
        """The latest state of the user's generator while numpy held no second half of a pair of normal deviates."""
        self._kept: Any = None

    def begin(self) -> None:
        own = get_bit_generator()
        if own is not self._own or self._own_state is None or self._own_state.raw != self._whole:
            self._look_at(own)
        self._unused = self._state.raw
        self.is_touched = False
        set_bit_generator(self._stand_in)

    def _look_at(self, own: Any) -> None:
        """Keep the state if numpy holds the second half of a pair of normal deviates, which replacing loses."""
        self._own, self._own_state, self._whole = own, None, None
        if type(own) is np.random.MT19937:
            self._own_state = _memory(own.ctypes.state_address, _STATE_BYTES)
            if _is_unused(own):
                self._whole = self._own_state.raw
                return
        state: Any = np.random.get_state(legacy=False)
        if state["has_gauss"]:
            self._kept = state
        elif self._own_state is not None:
            self._whole = self._own_state.raw

    def is_used(self) -> bool:
        return super().is_used() or get_bit_generator() is not self._stand_in

    def end(self) -> bool:
        is_used = self.is_used()
        set_bit_generator(self._own)
        if self._kept is not None:
            kept, self._kept = self._kept, None
            np.random.set_state(kept)
        return is_used

    def snapshot(self) -> Any:
        if self._own_state is None or get_bit_generator() is not self._own or self._own_state.raw != self._whole:
            return np.random.get_state()
        return self._whole


class MT19937(np.random.MT19937):
    """Takes the place of the user's generator during a block. numpy expects the class to have this name."""

    @property
    def state(self) -> Any:
        the_watch().numpy.is_touched = True
        return np.random.MT19937.state.__get__(self)  # type: ignore[attr-defined]

    @state.setter
    def state(self, value: Any) -> None:
        the_watch().numpy.is_touched = True
        np.random.MT19937.state.__set__(self, value)  # type: ignore[attr-defined]

    def _legacy_seeding(self, seed: Any) -> None:
        the_watch().numpy.is_touched = True
        super()._legacy_seeding(seed)  # type: ignore[misc]


class _WatchedTorch(WatchedGenerator):
    def __init__(self) -> None:
        super().__init__(_state_of_torch(_DEFAULT), seed_torch)
        self._stand_in = _NoticingGenerator()
        self._stand_in_state = _state_of_torch(self._stand_in)
        self._stand_in_unused = self._stand_in_state.raw
        self._kept, self._kept_raw = _DEFAULT.get_state(), self._unused

    def begin(self, *, is_seeded: bool = False) -> None:
        """``is_seeded``: whether the block seeds this generator. Operations that are passed ``torch.default_generator``
        then draw from its real state."""
        self.snapshot()
        self._unused = self._kept_raw
        self.is_touched = False
        _torch_random.default_generator = self._stand_in
        if not is_seeded:
            torch.default_generator = self._stand_in

    def is_used(self) -> bool:
        # An operation that was passed the stand-in draws from the stand-in's own state.
        return super().is_used() or self._stand_in_state.raw != self._stand_in_unused

    def forget(self) -> None:
        super().forget()
        self._stand_in_unused = self._stand_in_state.raw

    def end(self) -> bool:
        if _torch_random.default_generator is _DEFAULT:
            return False
        torch.default_generator = _torch_random.default_generator = _DEFAULT
        is_used = self.is_used()
        if is_used or self._unused is not self._kept_raw:
            _DEFAULT.set_state(self._kept)
            # The bytes next to the state may differ now.
            self._kept_raw = self._state.raw
            self._stand_in_unused = self._stand_in_state.raw
        return is_used

    def snapshot(self) -> torch.Tensor:
        """The generator's state; the tensor is shared with other snapshots."""
        raw = self._state.raw
        if raw != self._kept_raw:
            self._kept, self._kept_raw = _DEFAULT.get_state(), raw
        return self._kept


_DEFAULT = torch.default_generator
_torch_random: Any = torch.random


class _NoticingGenerator(torch.Generator):
    def __getattribute__(self, name: str) -> Any:
        the_watch().torch.is_touched = True
        return getattr(_DEFAULT, name)


class GeneratorWatch:
    """A block that leaves the global generators as they were before it, and reports which generators it used.

    There is one block at a time, in the main thread.
    """

    def __init__(self) -> None:
        self.python, self.numpy, self.torch = _WatchedPython(), _WatchedNumpy(), _WatchedTorch()
        self.generators: tuple[WatchedGenerator, ...] = (self.python, self.numpy, self.torch)
        self.is_on = False
        os.register_at_fork(before=self._note_fork)

    def is_free(self) -> bool:
        """Whether a block may begin in this thread."""
        return not self.is_on and threading.get_ident() == threading.main_thread().ident

    def begin(self, seeded: Sequence[WatchedGenerator] = ()) -> None:
        """``seeded``: generators that the block will seed for itself."""
        self.is_on = True
        self.python.begin()
        self.numpy.begin()
        self.torch.begin(is_seeded=self.torch in seeded)

    def used(self) -> list[WatchedGenerator]:
        return [generator for generator in self.generators if generator.is_used()]

    def forget(self) -> None:
        """What was done so far does not count as use."""
        for generator in self.generators:
            generator.forget()

    def end(self) -> list[WatchedGenerator]:
        """Returns the generators that were used."""
        by_python, by_numpy, by_torch = self.python.end(), self.numpy.end(), self.torch.end()
        self.is_on = False
        if not (by_python or by_numpy or by_torch):
            return []
        return [each for each, is_used in zip(self.generators, (by_python, by_numpy, by_torch), strict=True) if is_used]

    def snapshot(self) -> tuple[Any, Any, Any]:
        """The current states of all three generators, for ``states_of``."""
        if not self.is_free():
            return get_generators()
        return self.python.snapshot(), self.numpy.snapshot(), self.torch.snapshot()

    @staticmethod
    def states_of(snapshot: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        """The states in the form of ``get_generators``."""
        by_python, by_numpy, by_torch = snapshot
        if len(by_python) == 2:
            by_python = (random.Random.VERSION, _words(by_python[0]), by_python[1])
        if isinstance(by_numpy, bytes):
            words, used = np.frombuffer(by_numpy, np.uint32, _STATE_WORDS), int.from_bytes(by_numpy[-4:], sys.byteorder)
            by_numpy = ("MT19937", words.copy(), used, 0, 0.0)
        return by_python, by_numpy, by_torch.clone()

    def _note_fork(self) -> None:
        """A child gets copies of the generators."""
        if self.is_on:
            for generator in self.generators:
                generator.is_touched = True


@functools.cache
def the_watch() -> GeneratorWatch:
    return GeneratorWatch()


def _active_watch() -> GeneratorWatch | None:
    """The watch, if this thread is inside the watch's block."""
    is_on = the_watch.cache_info().currsize and the_watch().is_on
    return the_watch() if is_on and threading.current_thread() is threading.main_thread() else None


# -- reading states ---------------------------------------------------------------------------


class _Public:
    def __init__(self, read: Callable[[], Any]) -> None:
        """``read`` returns a state by the generator's own functions."""
        self._read = read

    @property
    def raw(self) -> Any:
        return self._read()


def _words(raw: Any) -> tuple[int, ...]:
    """The state in the form that Python's ``setstate`` takes."""
    if not isinstance(raw, bytes):
        return raw
    used, *words = struct.unpack(f"i{_STATE_WORDS}I", raw)
    return (*words, used)


def _memory(address: int, size: int) -> _Raw:
    return (ctypes.c_char * size).from_address(address)


def _memory_of_python(generator: random.Random) -> _Raw | None:
    """The memory of the generator's state if it lies where CPython puts it. Reading it takes 0.1 µs instead of 7 µs."""
    offset = object.__basicsize__
    if random.Random.__basicsize__ < offset + _STATE_BYTES:
        return None
    trial = random.Random(1)
    memory = _memory(id(trial) + offset, _STATE_BYTES)
    for _ in range(2):
        if _words(memory.raw) != trial.getstate()[1]:
            return None
        trial.random()
    return _memory(id(generator) + offset, _STATE_BYTES)


def _state_of_torch(generator: torch.Generator) -> _Raw:
    """The memory of the generator's state if it lies at the expected offset. Reading it takes 0.1 µs, not 3 µs."""
    offset = _torch_offset()
    if offset is None:
        return _Public(lambda: bytes(torch.Generator.get_state(generator).numpy()))
    return _memory(torch.Generator._cdata.__get__(generator) + offset, _TORCH_BYTES)  # type: ignore[attr-defined]


@functools.cache
def _torch_offset() -> int | None:
    """The offset of the state in a generator; None unless every kind of draw changes the bytes at this offset."""
    seed = 0x1234567890ABCDE
    trial: Any = torch.Generator().manual_seed(seed)
    offset = ctypes.string_at(trial._cdata, 128).find(seed.to_bytes(8, sys.byteorder))
    if offset < 0:
        return None
    memory = _memory(trial._cdata + offset, _TORCH_BYTES)
    # Normal deviates come in pairs: every second call only returns the deviate that the call before it kept.
    for draw in (torch.rand, torch.randn, torch.randn, torch.rand):
        for kind in (torch.float32, torch.float64):
            before = memory.raw
            draw(1, generator=trial, dtype=kind)
            if memory.raw == before:
                return None
    words = np.frombuffer(memory.raw, np.uint32, _STATE_WORDS, 20)
    kept = np.frombuffer(bytes(trial.get_state().numpy()), np.uint64, _STATE_WORDS, 24)
    return offset if np.array_equal(words, kept) else None
