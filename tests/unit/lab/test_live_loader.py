"""One live loader under changing settings: what it measures is comparable, however it got there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from penstock.lab.live_loader import LiveLoader
from penstock.planner.search import Setting

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

MIB = 1 << 20


class Rows(Dataset[torch.Tensor]):
    def __init__(self, *, wait_s: float, size_bytes: int) -> None:
        self.wait_s, self.size_bytes = wait_s, size_bytes

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.wait_s)
        return torch.zeros(self.size_bytes, dtype=torch.uint8)


def live(dataset: Any, batch_size: int, trial_s: float, *, is_repeated: bool = False) -> LiveLoader:
    return LiveLoader(
        dataset, batch_size, collate_fn=None, memory_bytes=1 << 30, step_s=0.0, trial_s=trial_s,
        on_batch=lambda: None, is_repeated=is_repeated,
    )  # fmt: skip


def test_a_setting_takes_the_same_memory_before_and_after_a_larger_setting() -> None:
    before = set(psutil.Process().children())
    with live(Rows(wait_s=0.002, size_bytes=4 * MIB), 4, trial_s=0.4) as loader:
        small = Setting(1, 2)
        first = loader.measure(small, batch_s=0.02)
        larger = loader.measure(Setting(4, 6), batch_s=0.01)
        again = loader.measure(small, batch_s=0.02)
    # Up to four batches of 16 MiB more, and three workers; what a worker takes itself differs between torch's releases.
    assert larger.memory_bytes - first.memory_bytes > 2 * 16 * MIB
    assert again.memory_bytes == pytest.approx(first.memory_bytes, rel=0.15)
    assert set(psutil.Process().children()) <= before


def test_batches_that_take_longer_than_a_measurement_are_waited_for() -> None:
    with live(Rows(wait_s=0.05, size_bytes=1000), 4, trial_s=0.1) as loader:
        trial = loader.measure(Setting(1, 2), batch_s=0.2)
    # Of too few of them nothing would be known.
    assert trial.noise < 1.0
    assert 0 < trial.samples_per_s < 22


class Repeated(IterableDataset[torch.Tensor]):
    """Gives every worker all of it."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            time.sleep(0.005)
            yield torch.zeros(10)


def test_a_sample_that_every_worker_delivers_counts_once() -> None:
    with live(Repeated(), 4, trial_s=0.5, is_repeated=True) as loader:
        trial = loader.measure(Setting(4, 8), batch_s=0.02)
    # A sample takes 5 ms: four workers give 200 of them a second four times.
    assert 0 < trial.samples_per_s < 260
