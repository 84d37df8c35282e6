"""When a worker keeps the memory of samples, over a made-up process and clock."""

from __future__ import annotations

import resource
import sys
from itertools import cycle
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import penstock
from penstock.arena.segment_sizes import PAGE_BYTES
from penstock.workers.child.kept_memory import KeptMemory

MIB = 1 << 20


class Process:
    """A worker whose samples take some memory, and the kernel's time where that memory is new."""

    kernel_s_per_mib = 0.001

    def __init__(self) -> None:
        self.now_s = self.kernel_s = 0.0
        self.own, self.kept, self.most_kept = 50 * MIB, 0, 0
        self.keeps = False
        self.trims = 0
        self.trim_s = 0.0
        self.memory = KeptMemory(
            self,
            lambda: self.own + self.kept,
            clock=lambda: self.now_s,
            kernel_s=lambda: self.kernel_s,
            queued_s=lambda: 0.0,
        )

    # The allocator.

    def keep(self) -> None:
        self.keeps = True

    def give_back(self) -> None:
        self.keeps = False

    def trim(self) -> None:
        self.kept = 0
        self.trims += 1
        self.kernel_s += self.trim_s

    # The dataset.

    def sample(self, size: int, *, own_s: float, new: int = 0, holds: int = 0) -> float:
        """One sample of ``size``; ``new`` of it fits nowhere in kept memory. Returns the time that the kernel took."""
        faulted = size if not self.keeps else max(new, size - self.kept)
        spent_s = faulted / MIB * self.kernel_s_per_mib
        self.kept = self.kept + faulted if self.keeps else 0
        self.most_kept = max(self.most_kept, self.kept)
        self.own += holds
        self.kernel_s += spent_s
        self.now_s += spent_s + own_s
        self.memory.sample_done()
        return spent_s


@pytest.fixture
def process() -> Process:
    process = Process()
    process.memory.allow(True)
    return process


def test_memory_of_like_samples_is_kept_where_the_kernel_takes_much_of_the_time(process: Process) -> None:
    spent_s = [process.sample(10 * MIB, own_s=0.005) for _ in range(200)]
    assert process.keeps and sum(spent_s[100:]) == 0.0
    assert process.most_kept == 10 * MIB


def test_memory_is_returned_where_that_takes_little_of_the_time(process: Process) -> None:
    for _ in range(200):
        process.sample(10 * MIB, own_s=0.05)
    assert not process.keeps and process.trims == 0


def test_memory_is_returned_until_the_budget_has_room() -> None:
    process = Process()
    for _ in range(200):
        process.sample(10 * MIB, own_s=0.0)
    assert not process.keeps


def test_kept_memory_is_returned_at_once_when_the_budget_has_no_room_any_more(process: Process) -> None:
    for _ in range(200):
        process.sample(10 * MIB, own_s=0.0)
    assert process.keeps and process.kept
    process.memory.allow(False)
    assert not process.keeps and not process.kept


def test_memory_of_uneven_samples_is_returned(process: Process) -> None:
    sizes = cycle([1, 90, 30, 4, 60, 12, 100])
    for _ in range(700):
        process.sample(next(sizes) * MIB, own_s=0.0)
    assert not process.keeps
    # Each attempt takes four samples, and the pauses between attempts grow.
    assert process.trims < 40


def test_one_giant_among_like_samples_leaves_nothing_behind(process: Process) -> None:
    for number in range(600):
        process.sample(500 * MIB if number == 300 else 10 * MIB, own_s=0.005)
        assert process.kept <= 30 * MIB
    assert process.keeps


def test_free_space_that_blocks_do_not_fit_into_is_bounded(process: Process) -> None:
    for _ in range(300):
        process.sample(10 * MIB, own_s=0.0, new=MIB)
        assert process.kept <= 2.25 * 10 * MIB + 4 * MIB
    assert process.keeps


def test_memory_is_returned_if_blocks_never_fit_where_others_were(process: Process) -> None:
    for _ in range(300):
        process.sample(10 * MIB, own_s=0.0, new=10 * MIB)
    assert not process.keeps


def test_memory_that_the_dataset_itself_holds_is_not_taken_for_kept(process: Process) -> None:
    for _ in range(600):
        process.sample(10 * MIB, own_s=0.005, holds=2 * MIB)
    assert process.keeps


def test_an_allocator_that_is_slow_to_return_memory_is_left_alone(process: Process) -> None:
    process.trim_s = 0.1
    for _ in range(1000):
        process.sample(10 * MIB, own_s=0.005)
    assert not process.keeps and process.trims <= 4


class Temporaries(Dataset[tuple[int, int]]):
    """A sample is what it took: the pages that its worker had to touch for the first time."""

    def __init__(self, length: int, mib: int) -> None:
        self._length, self._mib = length, mib

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        image = torch.ones(self._mib << 18)
        smaller = (image * 1.5 - 0.5).clamp(0, 1)[:MIB].clone()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, smaller


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_workers_soon_touch_no_new_memory_for_their_temporaries() -> None:
    loader = penstock.DataLoader(Temporaries(2000, 12), batch_size=4, num_workers=1, memory=400 * MIB)
    pages = 12 * MIB // PAGE_BYTES
    with loader:
        assert any(int(faults.max()) < pages // 4 for faults, _ in loader)
