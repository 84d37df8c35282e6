"""Datasets a planner has to tell apart: those that compute and those that wait, small samples and large, even and not.

In:  a name.
Out: a dataset, its collate function and a batch size.
Runs in: children of the benchmark, and their workers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

MIB = 1 << 20


class Samples(Dataset[Any]):
    """Samples that sleep, then compute, then are there."""

    def __init__(self, *, sample_bytes: int, wait_s: float, cpu_s: float, spread: float, count: int = 100_000) -> None:
        self.sample_bytes, self.wait_s, self.cpu_s, self.spread, self.count = sample_bytes, wait_s, cpu_s, spread, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        size = self.sample_bytes
        if self.spread:
            size = int(size * random.Random(index).uniform(1 - self.spread, 1 + self.spread))
        time.sleep(self.wait_s)
        end_s = time.thread_time() + self.cpu_s
        while time.thread_time() < end_s:
            pass
        return torch.full((size,), index % 251, dtype=torch.uint8)


def as_list(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    return samples


@dataclass(frozen=True, kw_only=True)
class Case:
    """One dataset and how it is batched."""

    batch_size: int
    sample_bytes: int
    wait_s: float = 0.0
    cpu_s: float = 0.0
    spread: float = 0.0

    def dataset(self) -> Samples:
        return Samples(sample_bytes=self.sample_bytes, wait_s=self.wait_s, cpu_s=self.cpu_s, spread=self.spread)

    @property
    def collate_fn(self) -> Callable[[Any], Any] | None:
        return as_list if self.spread else None


CASES = {
    "waits, large": Case(batch_size=8, sample_bytes=8 * MIB, wait_s=0.02),
    "waits, small": Case(batch_size=32, sample_bytes=20_000, wait_s=0.015),
    "computes, small": Case(batch_size=16, sample_bytes=150_000, cpu_s=0.004),
    "computes, large": Case(batch_size=8, sample_bytes=4 * MIB, wait_s=0.004, cpu_s=0.006),
    "waits, uneven": Case(batch_size=8, sample_bytes=4 * MIB, wait_s=0.015, spread=0.8),
}
