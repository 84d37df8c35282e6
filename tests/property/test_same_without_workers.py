"""Without workers batches are those that workers give, even if a dataset draws random numbers only now and then."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import penstock
from penstock.workers.rng import get_generators
from support.same_batches import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

LENGTH, RARE = 60, (41, 42, 50)
"""The dataset's length, and the only indices at which it uses a generator."""


def forked() -> float:
    with torch.random.fork_rng():
        return float(torch.rand(()))


def put_back() -> float:
    state = random.getstate()
    drawn = random.random()
    random.setstate(state)
    return drawn


def put_back_numpys() -> float:
    state = np.random.get_state()
    drawn = np.random.rand()
    np.random.set_state(state)
    return drawn


def in_a_thread() -> float:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(random.random()))
    thread.start()
    thread.join()
    return found[0]


def seeds_itself() -> float:
    random.seed(random.getrandbits(3))
    return random.random()


def own_of_the_global() -> float:
    own = random.Random()
    own.setstate(random.getstate())
    return own.random()


def nested() -> float:
    inner = penstock.DataLoader(Drawing(lambda: float(torch.rand(())), range(12)), batch_size=4, shuffle=True)
    return float(sum(batch["drawn"].sum() for batch in inner))


DRAWS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "random's normal deviates": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy's normal deviates": np.random.randn,
    "torch": lambda: float(torch.rand(())),
    "torch's normal deviates": lambda: float(torch.randn(())),
    "torch's generator": lambda: float(torch.rand((), generator=torch.default_generator)),
    "initial seed": lambda: float(torch.initial_seed() % 1000),
    "as many numbers as the state has words": lambda: float(sum(random.getrandbits(32) for _ in range(624)) % 997),
    "put back": put_back,
    "numpy's, put back": put_back_numpys,
    "torch's, forked": forked,
    "in a thread": in_a_thread,
    "seeds itself": seeds_itself,
    "a generator of its own": own_of_the_global,
    "one after the other": lambda: random.choice((np.random.rand, lambda: float(torch.rand(()))))(),
    "a nested loader": nested,
}


class Drawing(Dataset[Any]):
    """Draws only at some indices, and counts how often each sample is fetched in this process."""

    def __init__(self, draw: Callable[[], float], at: Any = RARE, length: int = LENGTH) -> None:
        self.draw, self.at, self.length = draw, at, length
        self.fetched: Counter[int] = Counter()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.fetched[index] += 1
        return {"index": index, "drawn": float(self.draw()) if index in self.at else 0.0}


class DrawingCollate:
    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __call__(self, samples: list[Any]) -> Any:
        drawn = float(self.draw()) if any(sample["index"] in RARE for sample in samples) else 0.0
        return [sample["index"] for sample in samples], drawn


def two_epochs(dataset: Any, workers: int, **more: Any) -> list[Any]:
    generator = torch.Generator().manual_seed(77)
    loader = penstock.DataLoader(
        dataset,
        num_workers=workers,
        generator=generator,
        multiprocessing_context="fork" if workers else None,
        timeout=60 if workers else 0,
        **{"batch_size": 4, "shuffle": True, **more},
    )
    return [list(loader) for _ in range(2)]


@pytest.mark.parametrize("draw", DRAWS)
def test_rare_draws_are_those_of_a_worker_and_leave_the_callers_generators_alone(draw: str) -> None:
    for dataset, more in (
        (Drawing(DRAWS[draw]), {"batch_size": 4}),
        (Drawing(DRAWS[draw], range(0)), {"batch_size": 4, "collate_fn": DrawingCollate(DRAWS[draw])}),
    ):
        for seeded in (True, False):
            random.seed(1)
            np.random.seed(1)
            torch.manual_seed(1)
            if not seeded:
                # All three hold the second of a pair of normal deviates.
                _ = random.gauss(0, 1), np.random.randn(), torch.randn(1)
            before = get_generators()
            got = two_epochs(dataset, 0, **more)
            assert repr(get_generators()) == repr(before)
        assert_same(got, two_epochs(dataset, 1, **more), draw)


def test_a_dataset_that_draws_nothing_or_always_is_fetched_once() -> None:
    for at in (range(0), range(LENGTH)):
        dataset = Drawing(random.random, at)
        two_epochs(dataset, 0)
        assert set(dataset.fetched.values()) == {2}


def test_the_first_batch_that_draws_is_fetched_twice_once_in_the_life_of_a_loader() -> None:
    dataset = Drawing(random.random, range(20, LENGTH))
    two_epochs(dataset, 0, shuffle=False)
    assert [index for index, times in dataset.fetched.items() if times > 2] == [20, 21, 22, 23]
    assert set(dataset.fetched.values()) == {2, 3}


def test_an_exception_that_depends_on_a_draw_is_that_of_a_worker() -> None:
    def fail() -> float:
        raise ValueError(f"drawn {random.random()}")

    def messages(workers: int) -> list[str]:
        loader = penstock.DataLoader(
            Drawing(fail), batch_size=4, num_workers=workers, generator=torch.Generator().manual_seed(3)
        )
        found: list[str] = []
        iterator = iter(loader)
        while True:
            try:
                next(iterator)
            except StopIteration:
                return found
            except ValueError as error:
                found.append(str(error).strip().splitlines()[-1].rpartition(" ")[2])

    without = messages(0)
    assert len(without) == 2
    assert without == messages(1)


def test_in_another_thread_batches_are_the_same() -> None:
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.extend(two_epochs(Drawing(np.random.randn), 0)))
    thread.start()
    thread.join()
    assert_same(got, two_epochs(Drawing(np.random.randn), 0), "another thread")


@pytest.mark.parametrize("batch_size", [4, None])
def test_workers_join_and_leave_in_the_middle_of_an_epoch_that_began_without(batch_size: int | None) -> None:
    dataset = Drawing(lambda: float(torch.rand(())), length=160)

    def epoch(changes: dict[int, int]) -> list[Any]:
        loader = penstock.DataLoader(
            dataset, batch_size, shuffle=True, generator=torch.Generator().manual_seed(2), num_workers=0
        )
        came = []
        with loader:
            for number, batch in enumerate(loader):
                came.append(batch)
                if number in changes:
                    loader.resize(workers=changes[number])
            assert loader.num_workers == (changes[max(changes)] if changes else 0)
        return came

    want = epoch({})
    assert_same(epoch({2: 2, 20: 0}), want, "0, 2, 0 workers")
    assert_same(epoch({0: 1, 1: 0, 3: 2}), want, "0, 1, 0, 2 workers")
    assert_same(epoch({5: 2}), want, "0, 2 workers")


def test_a_state_saved_without_workers_continues_with_and_without() -> None:
    dataset = Drawing(np.random.randn)

    def made(workers: int) -> penstock.DataLoader[Any]:
        return penstock.DataLoader(dataset, 4, shuffle=True, num_workers=workers)

    torch.manual_seed(4)
    first = made(0)
    iterator = iter(first)
    for _ in range(6):
        next(iterator)
    state = first.state_dict()
    rest = list(iterator)
    for workers in (0, 1):
        loader = made(workers)
        loader.load_state_dict(state)
        assert_same(list(loader), rest, f"{workers} workers")
        loader.close()
