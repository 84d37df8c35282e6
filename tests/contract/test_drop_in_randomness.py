"""Randomness: the user's generators are left where torch leaves them, and samples draw what was promised."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler

from support.datasets.contract import EagerShuffle, LazyDraws, Samples, SeededStream, plain, random_collate, seeded
from support.loaders import MAKERS, MakeLoader
from support.torch_oracle import TORCH, assert_identical

SEED = 1234


def brief(given: dict[str, Any]) -> str:
    """A test id that is the same in every process."""
    words = [f"{name}={getattr(value, '__name__', value)}" for name, value in given.items() if name != "dataset"]
    return " ".join([*words, *(["stream"] if "dataset" in given else [])]) or "plain"


def seed_everything(seed: int = SEED) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def states(generator: torch.Generator | None = None) -> list[Any]:
    """Where the three global generators are, and the loader's own."""
    own = [] if generator is None else [generator.get_state()]
    legacy = np.random.get_state()
    return [random.getstate(), legacy[1].tolist(), legacy[2:], torch.get_rng_state(), *own]  # type: ignore[index]


def course(make: MakeLoader, *, own_generator: bool, epochs: int = 2, **given: Any) -> list[Any]:
    """What was delivered and where the generators stood, after each step a training takes."""
    seed_everything()
    generator = torch.Generator().manual_seed(99) if own_generator else None
    if given.get("sampler") is EagerShuffle:
        given["sampler"] = EagerShuffle(12, generator)
    loader = make(given.pop("dataset", Samples(plain, 12)), batch_size=3, generator=generator, **given)
    found = [states(generator)]
    for _ in range(epochs):
        iterator = iter(loader)
        found.append(states(generator))
        found.append(next(iterator))
        found.append(states(generator))
        found.append(list(iterator))
        found.append(states(generator))
    iter(loader)
    found.append(states(generator))
    return found


@pytest.mark.parametrize("own_generator", [False, True], ids=["global generator", "own generator"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "given", [{}, {"shuffle": True}, {"sampler": EagerShuffle}], ids=["in order", "shuffled", "eager sampler"]
)
def test_the_generators_are_left_where_torch_leaves_them(
    given: dict[str, Any], num_workers: int, own_generator: bool, penstock_maker: MakeLoader
) -> None:
    given = {"num_workers": num_workers, "own_generator": own_generator, **given}
    assert_identical(course(penstock_maker, **given), course(TORCH, **given))


def test_persistent_workers_draw_one_base_seed_for_all_epochs(penstock_maker: MakeLoader) -> None:
    given = {
        "num_workers": 2, "persistent_workers": True, "shuffle": True, "own_generator": True, "epochs": 3
    }  # fmt: skip
    assert_identical(course(penstock_maker, **given), course(TORCH, **given))


def test_an_iterator_that_is_never_used_draws_one_base_seed(any_maker: MakeLoader) -> None:
    generator = torch.Generator().manual_seed(SEED)
    iter(any_maker([1, 2, 3], generator=generator))
    reference = torch.Generator().manual_seed(SEED)
    torch.empty((), dtype=torch.int64).random_(generator=reference)
    assert_identical(generator.get_state(), reference.get_state())


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("taken", [0, 1, 5])
def test_an_epoch_left_early_changes_nothing_in_the_next_ones_order(
    taken: int, num_workers: int, penstock_maker: MakeLoader
) -> None:
    def order(make: MakeLoader) -> list[list[int]]:
        generator = torch.Generator().manual_seed(SEED)
        loader = make(range(24), batch_size=2, shuffle=True, generator=generator, num_workers=num_workers)
        iterator = iter(loader)
        for _ in range(taken):
            next(iterator)
        return [batch.tolist() for batch in loader]

    assert order(penstock_maker) == order(TORCH)


class Draws(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.rand(1) for _ in range(40))


@pytest.mark.parametrize(("kind", "seeding"), [("shuffled", "worker"), ("stream", "worker"), ("stream", "batch")])
@pytest.mark.parametrize("prefetch_factor", [1, 2, 5])
def test_an_epoch_left_early_leaves_the_workers_generators_where_torch_leaves_them(
    prefetch_factor: int, kind: str, seeding: str
) -> None:
    """Whatever was fetched ahead: torch has its workers finish all that was drawn."""

    def epochs(make: MakeLoader) -> list[torch.Tensor]:
        seed_everything()
        data: Any = Samples(lambda _: torch.rand(1), 40) if kind == "shuffled" else Draws()
        more = {"shuffle": True} if kind == "shuffled" else {}
        loader = make(
            data, batch_size=2, num_workers=2, persistent_workers=True, prefetch_factor=prefetch_factor, **more
        )
        return [batch for taken in (3, 0, 5, 14, 40) for batch in itertools.islice(loader, taken)]

    assert_identical(epochs(MAKERS[seeding]), epochs(TORCH))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_lazy_sampler_and_the_training_loop_share_a_generator_as_with_torch(
    num_workers: int, penstock_maker: MakeLoader
) -> None:
    def course_of_training(make: MakeLoader) -> list[Any]:
        seed_everything()
        found: list[Any] = []
        for batch in make(range(40), batch_size=2, sampler=LazyDraws(40), num_workers=num_workers):
            found += [batch, torch.rand(2)]  # a training step with dropout, say
        return found

    assert_identical(course_of_training(penstock_maker), course_of_training(TORCH))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_shuffling_gives_torchs_order(num_workers: int, penstock_maker: MakeLoader) -> None:
    def order(make: MakeLoader, workers: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(SEED)
        loader = make(range(40), batch_size=7, shuffle=True, generator=generator, num_workers=workers)
        return [batch.tolist() for _ in range(2) for batch in loader]

    assert order(penstock_maker, num_workers) == order(TORCH, 0)


def test_a_distributed_sampler_gives_each_rank_its_share(penstock_maker: MakeLoader) -> None:
    dataset: Any = range(20)
    for rank in range(2):
        for epoch in range(2):
            sampler = DistributedSampler(dataset, 2, rank, seed=3)
            sampler.set_epoch(epoch)
            ours = list(penstock_maker(dataset, batch_size=4, sampler=sampler, num_workers=2))
            assert_identical(ours, list(TORCH(dataset, batch_size=4, sampler=sampler)))


# --- seeding="worker": torch's randomness, exactly ----------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"num_workers": 0},
        {"num_workers": 1},
        {"num_workers": 3},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 2, "shuffle": True, "prefetch_factor": 1},
        {"num_workers": 2, "collate_fn": random_collate},
        {"num_workers": 0, "collate_fn": random_collate},
        {"num_workers": 2, "dataset": SeededStream()},
    ],
    ids=brief,
)
def test_worker_seeding_repeats_torchs_random_augmentation_to_the_bit(given: dict[str, Any]) -> None:
    given = {"dataset": Samples(seeded, 20), "own_generator": False, **given}
    assert_identical(course(MAKERS["worker"], **given), course(TORCH, **given))


def test_worker_seeding_leaves_a_seed_that_worker_init_fn_sets(any_maker: MakeLoader) -> None:
    if any_maker is MAKERS["batch"]:
        pytest.skip("batch seeding gives every sample the seed of its place in the epoch")
    loader = any_maker(range(6), num_workers=2, worker_init_fn=fixed_seed, collate_fn=initial_seed)
    assert set(loader) == {4321}


def fixed_seed(worker: int) -> None:
    torch.manual_seed(4321)


def initial_seed(samples: list[Any]) -> int:
    return torch.initial_seed()


# --- seeding="batch": the same batches however many workers -------------------------------------------------


def batches(num_workers: int, *, seed: int = SEED, epochs: int = 2, **given: Any) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    arguments = {
        "batch_size": 5,
        "shuffle": True,
        "num_workers": num_workers,
        "generator": generator,
        **given,
    }
    loader = MAKERS["batch"](Samples(seeded, 23), **arguments)
    return [list(loader) for _ in range(epochs)]


@pytest.mark.parametrize("given", [{}, {"collate_fn": random_collate}, {"batch_size": None}], ids=brief)
def test_batch_seeding_gives_the_same_batches_for_any_number_of_workers(given: dict[str, Any]) -> None:
    expected = batches(0, **given)
    for num_workers in (1, 3, 7):
        assert_identical(batches(num_workers, **given), expected)


def test_batch_seeding_gives_the_same_batches_with_persistent_workers() -> None:
    first = batches(0, epochs=1)
    assert_identical(batches(3, epochs=1, persistent_workers=True), first)
    assert_identical(batches(2, persistent_workers=True), batches(3, persistent_workers=True))


def test_batch_seeding_differs_between_epochs_samples_and_seeds() -> None:
    one, two = batches(2)
    other = batches(2, seed=SEED + 1)[0]
    drawn = [batch[name].tolist() for epoch in (one, two, other) for batch in epoch for name in ("random",)]
    values = [value for batch in drawn for value in batch]
    assert len(set(values)) == len(values)


def test_batch_seeding_without_workers_leaves_the_users_generators_alone() -> None:
    given = {"num_workers": 0, "own_generator": False}
    ours = course(MAKERS["batch"], dataset=Samples(seeded, 12), **given)
    theirs = course(TORCH, dataset=Samples(plain, 12), **given)  # torch, had the samples drawn nothing
    for our, their in zip(ours, theirs, strict=True):
        if isinstance(their, list) and their and isinstance(their[0], tuple):
            assert_identical(our, their)
