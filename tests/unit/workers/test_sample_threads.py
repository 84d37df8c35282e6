"""Samples fetched by threads of one worker: their order, their errors, and the generators around them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from penstock.workers.child.sample_threads import SampleThreads
from penstock.workers.kept_generators import the_watch
from penstock.workers.rng import GeneratorUsed, get_generators, is_beside_others

Get = Callable[[Any], Any]


@pytest.fixture
def threads() -> Iterator[SampleThreads]:
    made = SampleThreads(3)
    yield made
    made.rest()
    made.end()


def fetched(threads: SampleThreads, get: Get, count: int, window: int = 1) -> list[Any]:
    samples = list(threads.in_order(get, range(count), lambda: window))
    threads.rest()
    return samples


def test_samples_come_in_the_order_of_their_indices_whichever_ends_first(threads: SampleThreads) -> None:
    last_is_done = threading.Event()

    def get(index: int) -> int:
        if index == 2:
            last_is_done.set()
        elif index == 0:
            assert last_is_done.wait(60)
        return 10 * index

    assert fetched(threads, get, 3) == [0, 10, 20]


def test_as_many_samples_as_there_are_threads_are_fetched_at_a_time(threads: SampleThreads) -> None:
    together = threading.Barrier(3)
    assert fetched(threads, lambda index: together.wait(60) >= 0, 6) == [True] * 6


@pytest.mark.parametrize(("window", "most"), [(1, 3), (5, 5)])
def test_no_more_samples_are_in_hand_than_the_window_and_the_threads_allow(
    threads: SampleThreads, window: int, most: int
) -> None:
    begun: list[int] = []
    samples = threads.in_order(lambda index: begun.append(index) or index, range(40), lambda: window)
    for taken, _ in enumerate(samples, 1):
        assert max(begun) < taken + most
    assert sorted(begun) == list(range(40))


def test_a_samples_error_is_raised_in_its_place_and_the_others_come_to_rest(threads: SampleThreads) -> None:
    under_way = threading.Semaphore(0)
    ended: list[int] = []

    def get(index: int) -> int:
        if index == 1:
            assert under_way.acquire(timeout=60)
            raise KeyError("first")
        if index == 2:
            under_way.release()
            raise ValueError("ended earlier, but is the later row")
        ended.append(index)
        return index

    samples = threads.in_order(get, range(5), lambda: 1)
    assert next(samples) == 0
    with pytest.raises(KeyError, match="first"):
        next(samples)
    threads.rest()
    assert set(ended) <= {0, 3, 4}
    assert fetched(threads, lambda index: index, 4) == [0, 1, 2, 3]


DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "torch": lambda: torch.rand(1),
    "seeding": lambda: random.seed(3),
    "reading a state": random.getstate,
    "seeding numpy": lambda: np.random.seed(3),
    "reading torch's state": torch.get_rng_state,
    "restoring": lambda: random.setstate(random.getstate()),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_samples_are_given_out_only_until_a_generator_is_used(threads: SampleThreads, draw: Callable[[], Any]) -> None:
    taken = threading.Event()

    def get(index: int) -> int:
        if index == 1:
            assert taken.wait(60)
            draw()
        return index

    before = get_generators()
    samples = threads.in_order(get, range(8), lambda: 1)
    assert next(samples) == 0
    taken.set()
    with pytest.raises(GeneratorUsed):
        next(samples)
    threads.rest()
    after = get_generators()
    assert before[0] == after[0] and np.array_equal(before[1][1], after[1][1]) and torch.equal(before[2], after[2])
    assert not the_watch().is_on


def test_only_the_threads_of_samples_are_beside_others(threads: SampleThreads) -> None:
    assert fetched(threads, lambda index: is_beside_others(), 3) == [True] * 3
    assert not is_beside_others()


def test_sys_exit_in_a_sample_reaches_the_worker(threads: SampleThreads) -> None:
    def get(index: int) -> None:
        raise SystemExit(7)

    with pytest.raises(SystemExit):
        next(threads.in_order(get, [0, 1], lambda: 1))
