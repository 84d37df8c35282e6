"""The same batches, bit for bit, whoever fetches them: worker count, start method and cutting change nothing."""

from __future__ import annotations

import dataclasses
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Subset

import penstock
from support.datasets import seeded as data
from support.same_batches import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Split(penstock.DataLoader[Any]):
    """Every batch is cut as finely as can be, and no more than two are in the arena."""

    _rules = dataclasses.replace(penstock.DataLoader._rules, split_always=True, most_slots=2)


CASES: dict[str, dict[str, Any]] = {
    "augmented": {"dataset": data.Augmented(), "batch_size": 16},
    "augmented, one by one": {"dataset": data.Augmented(30)},
    "augmented, last dropped": {"dataset": data.Augmented(), "batch_size": 9, "drop_last": True},
    "augmented, shuffled": {"dataset": data.Augmented(), "batch_size": 10, "shuffle": True},
    "structured": {"dataset": data.Structured(), "batch_size": 7},
    "structured, as it is": {"dataset": data.Structured(), "batch_size": None},
    "structured, listed": {"dataset": data.Structured(), "batch_size": 6, "collate_fn": data.as_list},
    "ragged": {"dataset": data.Ragged(), "batch_size": 8, "collate_fn": data.pad, "shuffle": True},
    "ragged, mixed up": {"dataset": data.Ragged(), "batch_size": 8, "collate_fn": data.mixed_up},
    "large": {"dataset": data.Large(), "batch_size": 5},
    "large, listed": {"dataset": data.Large(), "batch_size": 4, "collate_fn": data.mixed_up},
    "large and ragged": {"dataset": data.LargeRagged(), "batch_size": 4, "collate_fn": data.as_list},
    "large and ragged, one by one": {"dataset": data.LargeRagged()},
    "changing": {"dataset": data.Changing(), "batch_size": 8},
    "long texts": {"dataset": data.LongTexts(), "batch_size": 8, "shuffle": True},
    "by list": {"dataset": data.ByList(), "batch_size": 8, "shuffle": True},
    "by list, splittable": {"dataset": data.SplittableByList(), "batch_size": 8},
    "subset": {"dataset": Subset(data.Augmented(), range(70, 5, -1)), "batch_size": 12},
    "subset by list": {"dataset": Subset(data.ByList(), range(40, 5, -1)), "batch_size": 12},
    "batch sampler": {
        "dataset": data.Augmented(),
        "batch_sampler": [[3, 1, 2], [80], (5, 5, 5, 5), [9] * 40, torch.tensor([4, 2])],
    },
    "worst memory": {"dataset": data.Large(), "batch_size": 5, "memory": 1},
}


def batches(case: dict[str, Any], workers: int, *, kind: type = penstock.DataLoader, **more: Any) -> list[Any]:
    arguments = {**case, **more}
    if workers:
        # A batch that never comes is a failure with a name, not a hang.
        arguments.setdefault("timeout", 20)
    generator = torch.Generator().manual_seed(77)
    if isinstance(arguments.get("batch_sampler"), str):
        sampler = RandomSampler(arguments["dataset"], generator=torch.Generator().manual_seed(5))
        arguments["batch_sampler"] = BatchSampler(sampler, 7, False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a batch needs")
        return list(kind(num_workers=workers, generator=generator, **arguments))


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_workers_gives_the_same_batches(case: str) -> None:
    want = batches(CASES[case], 0)
    assert want
    for workers in (1, 3, 7):
        assert_same(batches(CASES[case], workers, multiprocessing_context="fork"), want, f"{workers} workers")


@pytest.mark.parametrize("collate", [None, data.as_list], ids=["default collate", "own collate"])
@pytest.mark.parametrize("dataset", [data.ByList(), data.Stream(47)], ids=["by list", "stream"])
def test_batches_that_cannot_be_split_are_whole_at_every_length(dataset: Any, collate: Any) -> None:
    for batch_size in (1, 2, 3, 7, 8, 9, 10, 11, 13, 17, 23, 33, 47, 60):
        case = {"dataset": dataset, "batch_size": batch_size, "collate_fn": collate}
        assert_same(batches(case, 1), batches(case, 0), f"batches of {batch_size}")


@pytest.mark.parametrize("batch_size", [1, 4, 11, 16])
@pytest.mark.parametrize("drop_last", [False, True])
def test_streams_are_divided_among_workers_as_in_torch(batch_size: int, drop_last: bool) -> None:
    case = {"dataset": data.SharedStream(101), "batch_size": batch_size, "drop_last": drop_last}
    for workers in (1, 3):
        want = batches(case, workers, kind=torch.utils.data.DataLoader)
        assert_same(batches(case, workers), want, f"{workers} workers")


@pytest.mark.parametrize("case", CASES)
def test_splitting_every_batch_gives_the_same_batches(case: str) -> None:
    assert_same(batches(CASES[case], 3, kind=Split), batches(CASES[case], 0), "split")


@pytest.mark.parametrize("case", ["augmented, shuffled", "structured", "ragged", "large and ragged"])
def test_spawned_workers_give_the_same_batches(case: str) -> None:
    got = batches(CASES[case], 2, kind=Split, multiprocessing_context="spawn")
    assert_same(got, batches(CASES[case], 0), "spawn")


def test_forkserver_workers_give_the_same_batches() -> None:
    case = CASES["augmented, shuffled"]
    assert_same(batches(case, 3, multiprocessing_context="forkserver"), batches(case, 0), "forkserver")


@pytest.mark.parametrize("case", ["augmented", "ragged", "large"])
def test_out_of_order_gives_the_same_batches_in_some_order(case: str) -> None:
    def key(batch: Any) -> str:
        return repr(batch)

    got = batches(CASES[case], 3, in_order=False)
    want = batches(CASES[case], 0)
    assert sorted(map(key, got)) == sorted(map(key, want))


@pytest.mark.parametrize("workers", [0, 3])
def test_a_second_epoch_differs_from_the_first_and_repeats_with_the_seed(workers: int) -> None:
    def epochs() -> list[list[Any]]:
        loader = penstock.DataLoader(
            data.Augmented(), 16, num_workers=workers, generator=torch.Generator().manual_seed(3)
        )
        return [list(loader) for _ in range(2)]

    first, second = epochs()
    assert not torch.equal(first[0][0], second[0][0])
    assert_same(epochs(), [first, second], "the same seed")


def test_epochs_without_persistence_are_the_same_for_any_number_of_workers() -> None:
    def epochs(workers: int) -> list[list[Any]]:
        loader = penstock.DataLoader(
            data.Augmented(),
            16,
            shuffle=True,
            num_workers=workers,
            generator=torch.Generator().manual_seed(3),
        )
        return [list(loader) for _ in range(3)]

    assert_same(epochs(3), epochs(0), "three epochs")


def test_persistent_epochs_are_the_same_for_any_number_of_workers_and_after_a_break() -> None:
    def epochs(workers: int, *, leave_early: bool) -> list[list[Any]]:
        loader = penstock.DataLoader(
            data.Augmented(),
            16,
            shuffle=True,
            num_workers=workers,
            persistent_workers=True,
        )
        # Not a generator of its own: torch's sampler draws from that once more when it is read to its end.
        torch.manual_seed(3)
        with loader:
            first = list(loader)
            for _ in loader:
                if leave_early:
                    break
            return [first, list(loader)]

    want = epochs(1, leave_early=False)
    assert not torch.equal(want[0][0][0], want[1][0][0])
    for workers in (2, 5):
        assert_same(epochs(workers, leave_early=False), want, f"{workers} persistent workers")
        assert_same(epochs(workers, leave_early=True), want, f"{workers} persistent workers, second epoch left early")


def test_the_first_persistent_epoch_equals_one_without_persistence() -> None:
    case = CASES["augmented, shuffled"]
    assert_same(batches(case, 3, persistent_workers=True), batches(case, 0), "persistent")


@pytest.mark.parametrize("workers", [0, 3])
def test_the_callers_generators_are_touched_as_little_as_torch_does(workers: int) -> None:
    def after(kind: type) -> tuple[Any, ...]:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        for _ in kind(data.Structured(), batch_size=4, shuffle=True, num_workers=workers):
            pass
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    ours = after(penstock.DataLoader)
    random.seed(1)
    np.random.seed(1)
    assert ours[:2] == (random.random(), float(np.random.rand()))
    if workers:
        assert ours == after(torch.utils.data.DataLoader)


def test_ranks_augment_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    want = batches(CASES["augmented"], 2)

    class Ranked(penstock.DataLoader[Any]):
        def _get_iterator(self) -> Any:
            iterator = super()._get_iterator()
            assert hasattr(iterator, "_rank")
            return iterator

    monkeypatch.setattr("torch.distributed.is_available", lambda: True)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    got = batches(CASES["augmented"], 2, kind=Ranked)
    if torch.equal(got[0][0], want[0][0]):
        pytest.skip("torch does not tell map-style loaders their rank here")


def test_held_batches_stay_as_they_were_while_the_arena_turns_over() -> None:
    case = {**CASES["large"], "memory": "40MB"}
    loader = penstock.DataLoader(num_workers=2, generator=torch.Generator().manual_seed(77), **case)
    assert_same(list(loader), batches(CASES["large"], 0), "list(loader)")
