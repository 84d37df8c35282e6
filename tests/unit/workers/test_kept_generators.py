"""The global generators are left as they were, whatever was drawn before and whatever happens inside the block."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from penstock.workers import kept_generators
from penstock.workers.kept_generators import KeptGenerators
from penstock.workers.rng import seed_stretch


@pytest.fixture(autouse=True)
def numpys_generator() -> Iterator[None]:
    before = get_bit_generator()
    yield
    set_bit_generator(before)


def draws() -> tuple[Any, ...]:
    # Normal deviates come in pairs, of which numpy keeps the second one for the next call.
    return random.random(), random.gauss(0, 1), np.random.randn(), np.random.rand(3).tolist(), torch.rand(3).tolist()


BEFORE: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "one number": lambda: np.random.rand(),
    "half a pair of normal deviates": lambda: np.random.randn(),
    "all words of the state": lambda: np.random.bytes(4 * 624),
    "half a pair of Python's": lambda: random.gauss(0, 1),
    "torch's": lambda: torch.rand(5),
}


def fail() -> None:
    raise KeyError


INSIDE: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "draws": draws,
    "seeds and draws": lambda: (seed_stretch(7, 7), draws()),
    "another generator": lambda: set_bit_generator(np.random.PCG64(5)),
    "the same again": lambda: kept(lambda: (seed_stretch(3, 3), kept(draws), draws())),
    "fails": fail,
}


def kept(inside: Callable[[], Any]) -> None:
    with KeptGenerators():
        inside()


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("in_main_thread", [True, False])
def test_the_next_numbers_are_those_that_would_have_been_drawn_without_the_block(
    before: str, inside: str, in_main_thread: bool
) -> None:
    seed_stretch(1, 1)
    BEFORE[before]()
    want = [draws() for _ in range(3)]
    got: list[Any] = []

    def again() -> None:
        seed_stretch(1, 1)
        BEFORE[before]()
        if inside == "fails":
            with pytest.raises(KeyError):
                kept(INSIDE[inside])
        else:
            kept(INSIDE[inside])
        got.extend(draws() for _ in range(3))

    if in_main_thread:
        again()
    else:
        thread = threading.Thread(target=again)
        thread.start()
        thread.join()
    assert got == want


def test_an_unused_generator_is_replaced_and_the_state_of_a_used_one_is_read() -> None:
    numpys = get_bit_generator()
    np.random.seed(5)
    with KeptGenerators():
        assert get_bit_generator() is not numpys
    assert get_bit_generator() is numpys
    np.random.rand()
    with KeptGenerators():
        assert get_bit_generator() is numpys


def test_numpys_generator_is_replaced_in_a_process_that_never_seeded_it() -> None:
    program = (
        "import numpy as np\n"
        "from numpy.random.mtrand import get_bit_generator\n"
        "from penstock.workers.kept_generators import KeptGenerators\n"
        "numpys = get_bit_generator()\n"
        "before = np.random.get_state(legacy=False)\n"
        "with KeptGenerators():\n"
        "    assert get_bit_generator() is not numpys\n"
        "    np.random.rand()\n"
        "assert get_bit_generator() is numpys\n"
        "assert repr(np.random.get_state(legacy=False)) == repr(before)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_another_kind_of_generator_is_kept_too() -> None:
    set_bit_generator(np.random.PCG64(3))
    before = np.random.get_state(legacy=False)
    kept(lambda: np.random.rand(10))
    assert np.random.get_state(legacy=False) == before


def test_substitutes_are_used_again() -> None:
    for number in range(10):
        np.random.seed(number)
        kept(lambda: np.random.seed(1))
    assert 1 <= len(kept_generators._substitutes) <= 3
