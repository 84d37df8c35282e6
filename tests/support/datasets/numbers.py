"""Datasets for the tests of what a loader leaves behind. At module level for spawn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler


class Numbers(Dataset[Any]):
    """Samples of ``sample_bytes`` bytes."""

    def __init__(self, length: int, sample_bytes: int = 1 << 12, sample_s: float = 0.0) -> None:
        self.length, self.sample_bytes, self.sample_s = length, sample_bytes, sample_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.sample_s:
            time.sleep(self.sample_s)
        return torch.full((self.sample_bytes,), index % 251, dtype=torch.uint8)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.ones(1 << 12)


class Counted(Sampler[int]):
    """Indices made as they are asked for; how many that were is known."""

    def __init__(self, length: int) -> None:
        self.length, self.drawn = length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for index in range(self.length):
            self.drawn += 1
            yield index
