"""The probe and the profile of a dataset: real processes, a second each."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from penstock.errors import ConfigError, DataError
from penstock.lab.dataset.sample_probe import NoDataError, is_picklable, probe, spread_indices, weigh
from penstock.lab.planning import plan, time_step
from penstock.lab.profile import profile

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


class Slow(Dataset[torch.Tensor]):
    def __init__(self, *, wait_s: float = 0.0, spin_s: float = 0.0, fails_at: int = -1, count: int = 1000) -> None:
        self.wait_s, self.spin_s, self.fails_at, self.count = wait_s, spin_s, fails_at, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.fails_at:
            raise ValueError("damaged")
        time.sleep(self.wait_s)
        end_s = time.thread_time() + self.spin_s
        while time.thread_time() < end_s:
            pass
        return torch.zeros(25_000)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.zeros(40, 10))


class Shared(Stream):
    def __iter__(self) -> Iterator[torch.Tensor]:
        mine = get_worker_info()
        return itertools.islice(
            super().__iter__(), 0 if mine is None else mine.id, None, mine.num_workers if mine else 1
        )


class Noise(Stream):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.rand(40, 10))


class OnlyOnce(Stream):
    is_used = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.is_used:
            raise RuntimeError("it has begun already")
        self.is_used = True
        return super().__iter__()


def children() -> set[int]:
    """What this process has started; tests before may have left helpers of Python's own."""
    return {child.pid for child in psutil.Process().children()}


def probed(dataset: Any, batch_size: int = 4) -> Any:
    return probe(dataset, batch_size, default_collate, seconds=0.5, on_progress=lambda done: None)


class OneAtATime(Slow):
    """Two threads read it no faster than one."""

    def __init__(self, *, wait_s: float) -> None:
        super().__init__(wait_s=wait_s)
        self.lock = threading.Lock()

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:
            return super().__getitem__(index)


def test_waiting_and_computing_are_told_apart() -> None:
    waits, computes = probed(Slow(wait_s=0.02)), probed(Slow(spin_s=0.02))
    for sample in waits.samples:
        assert sample.wait_s > 0.015 and sample.cpu_s < 0.01 and sample.size_bytes == 100_000
    assert all(sample.cpu_s > 0.015 for sample in computes.samples)


def test_the_probe_finds_whether_two_threads_read_faster_than_one() -> None:
    # By sleeping: two threads that compute get more of a busy machine than one does, and look faster.
    assert probed(Slow(wait_s=0.02)).holds_gil is False
    assert probed(OneAtATime(wait_s=0.02)).holds_gil is True


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (Slow(fails_at=0), "index 0 failed: ValueError: damaged"),
        (Slow(count=0), "empty"),
        ([torch.zeros(1), torch.zeros(2), torch.zeros(3), torch.zeros(4)], "collating failed.*collate_fn="),
        (5, "asking for its samples failed: TypeError"),
    ],
)
def test_an_error_is_one_line_and_leaves_no_process(dataset: Any, said: str) -> None:
    before = children()
    with pytest.raises(DataError, match=said) as raised:
        probed(dataset)
    assert "\n" not in str(raised.value)
    assert children() <= before


class FailsInThreads(Slow):
    def __getitem__(self, index: int) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("file 3.bin is broken")
        return super().__getitem__(index)


def test_an_error_while_reading_in_threads_is_not_called_one_of_collating() -> None:
    with pytest.raises(DataError, match=r"^index 0, read in one of two threads, failed: ValueError: file 3"):
        probed(FailsInThreads())


class Missing(Slow):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.load(f"/nowhere/{index}.pt")


@pytest.mark.parametrize(("dataset", "lacks"), [(Slow(count=0), True), (Missing(), True), (Slow(fails_at=0), False)])
def test_missing_data_raises_an_error_of_its_own(dataset: Any, lacks: bool) -> None:
    with pytest.raises(DataError) as raised:
        probed(dataset)
    assert isinstance(raised.value, NoDataError) is lacks


def test_a_probe_with_a_deadline_accepts_a_single_sample_and_ends_without_one() -> None:
    def probe_within(within_s: float, *, wait_s: float) -> Any:
        return probe(
            Slow(wait_s=wait_s), 4, default_collate, seconds=0.2, within_s=within_s, on_progress=lambda done: None,
            tries_threads=False,
        )  # fmt: skip

    before = children()
    seen = probe_within(60.0, wait_s=0.4)
    assert len(seen.samples) == 1 and seen.holds_gil is None
    with pytest.raises(DataError, match="took longer than 1 s"):
        probe_within(1.0, wait_s=3000.0)
    assert children() <= before


def test_a_probe_whose_process_crashes_names_its_exit_code() -> None:
    class Deadly(Slow):
        def __getitem__(self, index: int) -> torch.Tensor:
            import os

            os._exit(7)

    with pytest.raises(DataError, match="exit code 7"):
        probed(Deadly())


def test_streams_are_read_from_their_beginning() -> None:
    assert 3 <= len(probed(Stream()).samples) <= 40


@pytest.mark.parametrize(
    ("stream", "is_repeated"),
    [(Stream(), True), (Shared(), False), (Noise(), False), (OnlyOnce(), False), (Slow(), False)],
)
def test_the_probe_finds_streams_that_give_every_worker_all_samples(stream: Any, is_repeated: bool) -> None:
    assert probed(stream).is_repeated is is_repeated


def test_the_first_few_indices_are_already_spread_over_the_dataset() -> None:
    assert sorted(spread_indices(3, 10)) == [0, 1, 2]
    few = spread_indices(10_000_000, 256)[:8]
    assert len(set(few)) == 8 and max(few) > 5_000_000 > min(few)
    assert spread_indices(0, 10) == []


def test_the_probe_finds_what_cannot_be_pickled() -> None:
    assert is_picklable(Slow()) and not is_picklable(lambda: 0)


@pytest.mark.parametrize(
    ("value", "size_bytes"), [("abc", 3), (b"abcd", 4), (7, 0), ({"x": torch.zeros(2), "y": ["a", "bc"]}, 11)]
)
def test_the_bytes_of_a_sample_are_counted(value: Any, size_bytes: int) -> None:
    assert weigh(value) == size_bytes


def test_a_profile_has_the_costs_of_both_loaders_and_leaves_no_process() -> None:
    reported: list[str] = []
    before = children()
    found = profile(
        Slow(wait_s=0.01), 4, name="slow", seconds=2.0, on_progress=lambda what, done: reported.append(what)
    )
    assert found.length == 1000 and found.is_splittable and found.is_picklable
    assert found.wait_s > 0.009 > found.cpu_s and found.sample_bytes == 100_000
    for cost in (found.torchs, found.ours):
        assert 2 << 20 <= cost.worker_bytes < 200 << 20 and 0 <= cost.trainer_s < 0.1 and 1.0 <= cost.copies <= 4.0
    assert reported[-1] == "done" and "torch's DataLoader" in reported
    assert children() <= before


@pytest.mark.parametrize("dataset", [5, iter([1])])
def test_a_plan_needs_a_dataset(dataset: Any) -> None:
    with pytest.raises(ConfigError, match="is not a dataset: it has no __getitem__ and no __len__"):
        plan(dataset, 8, seconds=1.0)


def test_a_profile_of_slow_samples_runs_no_loader() -> None:
    reported: list[str] = []
    found = profile(Slow(wait_s=0.5), 32, seconds=0.6, on_progress=lambda what, done: reported.append(what))
    # Each sample that was read reported its progress; loaders would have read dozens.
    assert set(reported) == {"reading samples", "done"} and len(reported) <= 4
    assert not found.has_runs and found.is_splittable


def test_a_step_is_timed_on_a_whole_batch_made_of_few_slow_samples() -> None:
    class Counted(Slow):
        reads = 0

        def __getitem__(self, index: int) -> torch.Tensor:
            self.reads += 1
            return super().__getitem__(index)

    dataset, lengths = Counted(wait_s=0.1), set()
    step_s = time_step(lambda batch: lengths.add(len(batch)), dataset, 32, seconds=0.3)
    assert dataset.reads <= 4 and lengths == {32} and 0 <= step_s < 0.1
    assert time_step(lambda batch: lengths.add(len(batch)), Slow(count=3), 2, seconds=30.0) >= 0
    assert lengths == {32, 2, 1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_s": "a"},
        {"step_s": -1},
        {"step_s": float("nan")},
        {"step_s": True},
        {"seconds": "long"},
        {"seconds": 0},
        {"seconds": float("inf")},
        {"seconds": None},
        {"batch_size": "8"},
        {"batch_size": 0},
        {"memory": "lots"},
        {"memory": None},
        {"memory": [1]},
        {"collate_fn": 5},
        {"name": 5},
        {"on_progress": None},
    ],
)
def test_a_wrong_argument_of_a_plan_is_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"^{name}="):
        plan(Slow(), **{"batch_size": 8, **wrong})
