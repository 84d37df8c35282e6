"""A watch notices every use of a global generator, and leaves the generators as they were."""

from __future__ import annotations

import copy
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from penstock.workers import kept_generators
from penstock.workers.kept_generators import GeneratorWatch, KeptGenerators
from penstock.workers.rng import get_generators


@pytest.fixture(params=["memory", "public"])
def watch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[GeneratorWatch]:
    """A watch that reads states from memory, and one for interpreters and versions where that is not possible."""
    if request.param == "public":
        monkeypatch.setattr(kept_generators, "_memory_of_python", lambda _: None)
        monkeypatch.setattr(kept_generators, "_torch_offset", lambda: None)
    made = GeneratorWatch()
    monkeypatch.setattr(kept_generators, "the_watch", lambda: made)
    monkeypatch.setattr(kept_generators, "_active_watch", lambda: made if made.is_on else None)
    numpys = get_bit_generator()
    yield made
    assert not made.is_on
    assert get_bit_generator() is numpys


def restored(read: Callable[[], Any], draw: Callable[[], Any], write: Callable[[Any], Any]) -> Callable[[], Any]:
    def use() -> None:
        state = read()
        draw()
        write(state)

    return use


def fork_rng() -> None:
    with torch.random.fork_rng():
        torch.rand(1)


def in_a_thread(draw: Callable[[], Any]) -> Callable[[], Any]:
    def use() -> None:
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()

    return use


def fork() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


USES: dict[str, tuple[str, Callable[[], Any]]] = {
    "nothing": ("", lambda: None),
    "generators of one's own": (
        "",
        lambda: (
            random.Random(5).random(),
            np.random.default_rng(5).random(),
            torch.rand(1, generator=torch.Generator().manual_seed(3)),
        ),
    ),
    "random": ("python", random.random),
    "as many numbers as the state has words": ("python", lambda: [random.getrandbits(32) for _ in range(624)]),
    "one of Python's normal deviates": ("python", lambda: random.gauss(0, 1)),
    "Python's state, read": ("python", random.getstate),
    "Python's state, copied": ("python", lambda: copy.copy(random._inst)),  # type: ignore[attr-defined]
    "Python's state, put back": ("python", restored(random.getstate, random.random, random.setstate)),
    "Python's seed": ("python", lambda: random.seed(4)),
    "a draw in a thread": ("python", in_a_thread(random.random)),
    "numpy": ("numpy", np.random.rand),
    "numpy's normal deviates": ("numpy", np.random.randn),
    "numpy's state, read": ("numpy", np.random.get_state),
    "numpy's state, put back": ("numpy", restored(np.random.get_state, np.random.rand, np.random.set_state)),
    "numpy's seed": ("numpy", lambda: np.random.seed(3)),
    "numpy's bit generator": ("numpy", lambda: np.random.Generator(get_bit_generator()).random()),
    "another bit generator": ("numpy", lambda: set_bit_generator(np.random.PCG64(3))),
    "torch": ("torch", lambda: torch.rand(1)),
    "torch's normal deviates": ("torch", lambda: torch.randn(1)),
    "torch's generator, passed": ("torch", lambda: torch.rand(1, generator=torch.default_generator)),
    "torch's initial seed": ("torch", torch.initial_seed),
    "the initial seed of torch's generator": ("torch", lambda: torch.default_generator.initial_seed()),
    "torch's state, read": ("torch", torch.get_rng_state),
    "torch's state, put back": ("torch", restored(torch.get_rng_state, lambda: torch.rand(1), torch.set_rng_state)),
    "torch's state, forked": ("torch", fork_rng),
    "torch's seed": ("torch", lambda: torch.manual_seed(5)),
    "all": ("python numpy torch", lambda: (random.random(), np.random.rand(), torch.rand(1))),
    "a fork": ("python numpy torch", fork),
}
BEFORE: dict[str, Callable[[], Any]] = {
    "seeded": lambda: (random.seed(1), np.random.seed(1), torch.manual_seed(1)),
    "drawn from": lambda: (random.random(), np.random.rand(), torch.rand(3)),
    "half a pair of normal deviates": lambda: (random.gauss(0, 1), np.random.randn(), torch.randn(1)),
}


def used_in(watch: GeneratorWatch, block: Callable[[], Any]) -> set[str]:
    watch.begin()
    try:
        block()
    finally:
        used = watch.end()
    names = {watch.python: "python", watch.numpy: "numpy", watch.torch: "torch"}
    return {names[each] for each in used}  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("use", USES)
def test_every_use_is_noticed_and_undone(use: str, watch: GeneratorWatch) -> None:
    expected, block = USES[use]
    for before in BEFORE.values():
        BEFORE["seeded"]()
        before()
        for _ in range(2):
            states = get_generators()
            assert used_in(watch, block) == set(expected.split())
            after = get_generators()
            assert repr(after) == repr(states)
            assert torch.equal(after[2], states[2])
            assert np.array_equal(after[1][1], states[1][1])
            # Another place to come from, the second time.
            draws()


def draws() -> tuple[Any, ...]:
    return random.random(), random.gauss(0, 1), np.random.randn(), np.random.rand(3).tolist(), torch.randn(3).tolist()


@pytest.mark.parametrize("before", BEFORE)
def test_the_next_numbers_are_those_that_would_have_been_drawn_without_the_block(
    before: str, watch: GeneratorWatch
) -> None:
    BEFORE["seeded"]()
    BEFORE[before]()
    expected = [draws() for _ in range(3)]
    BEFORE["seeded"]()
    BEFORE[before]()
    used_in(watch, draws)
    assert [draws() for _ in range(3)] == expected


def test_what_happens_while_generators_are_kept_is_no_use(watch: GeneratorWatch) -> None:
    def block() -> None:
        with KeptGenerators():
            draws()

    assert used_in(watch, block) == set()

    def both() -> None:
        random.random()
        block()

    assert used_in(watch, both) == {"python"}


@pytest.mark.parametrize("before", BEFORE)
def test_a_snapshot_has_the_states_of_the_moment_it_was_taken(before: str, watch: GeneratorWatch) -> None:
    BEFORE["seeded"]()
    BEFORE[before]()
    for _ in range(2):
        expected = get_generators()
        taken = watch.snapshot()
        draws()
        got = watch.states_of(taken)
        assert got[0] == expected[0]
        assert np.array_equal(got[1][1], expected[1][1])
        assert (got[1][0], *got[1][2:]) == (expected[1][0], *expected[1][2:])
        assert torch.equal(got[2], expected[2])
        used_in(watch, lambda: None)


def test_only_one_block_at_a_time_and_in_the_main_thread(watch: GeneratorWatch) -> None:
    free: list[bool] = [watch.is_free()]
    in_a_thread(lambda: free.append(watch.is_free()))()
    used_in(watch, lambda: free.append(watch.is_free()))
    assert free == [True, False, False]


def test_state_of_a_generator_is_read_from_memory_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise fetching without workers costs several times as much as with torch."""
    assert kept_generators._torch_offset() is not None
    assert kept_generators._memory_of_python(random.Random(3)) is not None
