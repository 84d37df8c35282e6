"""The same batches, bit for bit, however many samples each worker fetches at a time."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset

import penstock
from support.datasets import seeded as data
from support.same_batches import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*one after the other")


class Waiting(Dataset[torch.Tensor]):
    """Samples that each wait for another one, where there are threads for it."""

    def __init__(self, length: int = 64) -> None:
        self.length = length
        self.together: threading.Barrier | None = None

    def __len__(self) -> int:
        return self.length

    def __getstate__(self) -> dict[str, Any]:
        return {"length": self.length, "together": None}

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(300) * index


class Rarely(Waiting):
    """Draws random numbers in a few samples only."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + (random.randrange(1000) if index % 19 == 7 else 0)


class CountsThreads(Waiting):
    """A sample waits until a second one is under way in the same worker."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.together is None:
            self.together = threading.Barrier(2)
        self.together.wait(60)
        return super().__getitem__(index)


class Failing(Waiting):
    """Two rows of a batch fail, the later one first."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in (18, 21):
            raise KeyError(f"row {index}")
        return super().__getitem__(index)


class KillsOnce(Waiting):
    """One sample kills its worker, once."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "mark": self.mark}

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 29 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Kills(Waiting):
    """One sample kills its worker, always."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 29:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def batches(case: dict[str, Any], workers: int, threads: int, **more: Any) -> list[Any]:
    generator = torch.Generator().manual_seed(77)
    loader: penstock.DataLoader[Any] = penstock.DataLoader(
        **case,
        num_workers=workers,
        threads_per_worker=threads,
        generator=generator,
        timeout=60 if workers else 0,
        **more,
    )
    with loader:
        return list(loader)


CASES: dict[str, dict[str, Any]] = {
    "no random numbers": {"dataset": Waiting(), "batch_size": 12, "shuffle": True},
    "few random numbers": {"dataset": Rarely(), "batch_size": 12, "shuffle": True},
    "augmented": {"dataset": data.Augmented(), "batch_size": 10, "shuffle": True},
    "structured, listed": {"dataset": data.Structured(), "batch_size": 6, "collate_fn": data.as_list},
    "ragged, mixed up": {"dataset": data.Ragged(), "batch_size": 8, "collate_fn": data.mixed_up},
    "large": {"dataset": data.Large(), "batch_size": 5},
    "large and ragged": {"dataset": data.LargeRagged(), "batch_size": 4, "collate_fn": data.as_list},
    "changing": {"dataset": data.Changing(), "batch_size": 8},
    "long texts": {"dataset": data.LongTexts(), "batch_size": 8, "shuffle": True},
    "by list": {"dataset": data.ByList(), "batch_size": 8},
    "subset": {"dataset": Subset(Rarely(), range(60, 5, -1)), "batch_size": 12},
    "single samples": {"dataset": Rarely(), "batch_size": None},
    "worst memory": {"dataset": data.Large(), "batch_size": 5, "memory": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_threads_gives_the_same_batches(case: str) -> None:
    want = batches(CASES[case], 0, 1)
    assert want
    for workers, threads in ((1, 4), (3, 2), (2, 9)):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="a batch needs")
            got = batches(CASES[case], workers, threads, multiprocessing_context="fork")
        assert_same(got, want, f"{workers} workers with {threads} threads")


def test_spawned_workers_with_threads_give_the_same_batches() -> None:
    case = CASES["few random numbers"]
    assert_same(batches(case, 2, 4, multiprocessing_context="spawn"), batches(case, 0, 1), "spawn")


def test_torchs_own_seeding_is_the_same_with_threads() -> None:
    case = CASES["few random numbers"]
    want = batches(case, 2, 1, seeding="worker")
    assert_same(batches(case, 2, 4, seeding="worker"), want, "seeding='worker'")


@pytest.mark.parametrize("subset", [False, True])
def test_samples_of_a_worker_are_under_way_together(subset: bool) -> None:
    dataset: Any = Subset(CountsThreads(), range(64)) if subset else CountsThreads()
    assert len(batches({"dataset": dataset, "batch_size": 16}, 2, 4)) == 4


def test_a_dataset_that_draws_random_numbers_is_named_in_one_warning() -> None:
    with pytest.warns(RuntimeWarning, match="Augmented draws from .* one after the other") as caught:
        batches(CASES["augmented"], 3, 4)
    assert sum("one after the other" in str(each.message) for each in caught) == 1


def test_no_warning_comes_where_few_samples_draw() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*one after the other")
        batches({"dataset": Rarely(), "batch_size": 12}, 1, 2)


def test_the_lowest_rows_error_is_raised_and_iteration_goes_on() -> None:
    with penstock.DataLoader(Failing(), batch_size=16, num_workers=2, threads_per_worker=4, timeout=60) as loader:
        batches = iter(loader)
        assert next(batches)[1, 1] == 1
        with pytest.raises(KeyError, match="row 18"):
            next(batches)
        assert next(batches)[0, 1] == 32
        assert len(list(batches)) == 1


def test_a_killed_worker_costs_a_retry(tmp_path: Path) -> None:
    case: dict[str, Any] = {"dataset": KillsOnce(tmp_path / "killed"), "batch_size": 16}
    got = batches(case, 2, 4, multiprocessing_context="fork")
    assert (tmp_path / "killed").exists()
    assert_same(got, batches({"dataset": Waiting(), "batch_size": 16}, 0, 1), "after a crash")


def test_a_sample_that_always_kills_its_worker_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"\b29\b"):
        batches({"dataset": Kills(), "batch_size": 16}, 2, 4, multiprocessing_context="fork")


def test_values_cached_beside_other_samples_are_those_cached_alone() -> None:
    wanted = batches(CASES["few random numbers"], 1, 1, cache="64MB")
    assert_same(batches(CASES["few random numbers"], 2, 4, cache="64MB"), wanted, "cached")


class Endless(Waiting):
    """Samples from the second batch on never come."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 16:
            threading.Event().wait()
        return super().__getitem__(index)


def test_samples_that_never_come_are_named_and_do_not_outlive_the_loader() -> None:
    # Closing waits five seconds for the workers before it kills them.
    loader = penstock.DataLoader(
        Endless(), batch_size=16, num_workers=1, threads_per_worker=4, timeout=1, multiprocessing_context="fork"
    )
    with loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(RuntimeError, match=r"index 16 of batch 1(.|\n)*in __getitem__"):
            next(batches)
    assert not multiprocessing.active_children()


class ThreadCount(Waiting):
    """Each sample is the number of threads that an operation of torch may use in the worker."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(torch.get_num_threads())


def test_operations_in_worker_threads_use_one_thread_and_those_in_the_training_loop_as_many_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        loader = penstock.DataLoader(ThreadCount(8), batch_size=4, num_workers=2, backend="thread", timeout=60)
        with loader:
            assert torch.cat(list(loader)).tolist() == [1] * 8
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [0, -1, True, 2.0, "4", None])
def test_threads_per_worker_is_a_whole_number(threads: Any) -> None:
    with pytest.raises(penstock.ConfigError, match="threads_per_worker"):
        penstock.DataLoader(Waiting(), threads_per_worker=threads)


def test_threads_as_workers_and_streams_refuse_threads_per_worker() -> None:
    with pytest.raises(penstock.ConfigError, match="use num_workers=12 instead"):
        penstock.DataLoader(Waiting(), num_workers=3, backend="thread", threads_per_worker=4)
    with pytest.raises(penstock.ConfigError, match="iterable dataset"):
        penstock.DataLoader(data.Stream(7), num_workers=3, threads_per_worker=4)
    assert penstock.DataLoader(data.Stream(7), num_workers=3).threads_per_worker == 1
