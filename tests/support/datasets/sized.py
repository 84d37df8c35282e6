"""Batches of every size, each byte of which can be checked. At module level for spawn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

BATCH_ROWS = 4


def value_of(batch: int) -> int:
    return (batch * 37 + 11) % 251


def sample(batch: int, batch_bytes: int) -> torch.Tensor:
    return torch.full((max(1, batch_bytes // BATCH_ROWS),), value_of(batch), dtype=torch.uint8)


class Sized(Dataset[Any]):
    """Batch ``n`` weighs ``batch_bytes[n]`` bytes."""

    def __init__(self, batch_bytes: list[int]) -> None:
        self.batch_bytes = batch_bytes

    def __len__(self) -> int:
        return BATCH_ROWS * len(self.batch_bytes)

    def __getitem__(self, index: int) -> Any:
        batch = index // BATCH_ROWS
        return sample(batch, self.batch_bytes[batch])


class SizedWhole(Sized):
    """The same, fetched by list: one worker builds each batch."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class SizedStream(IterableDataset[Any]):
    """The same as a stream for one worker."""

    def __init__(self, batch_bytes: list[int]) -> None:
        super().__init__()
        self.batch_bytes = batch_bytes

    def __iter__(self) -> Iterator[Any]:
        for batch, batch_bytes in enumerate(self.batch_bytes):
            for _ in range(BATCH_ROWS):
                yield sample(batch, batch_bytes)


class SizedBytes(Sized):
    """Encoded images, as many datasets return them: bytes, not tensors."""

    def __getitem__(self, index: int) -> Any:
        batch = index // BATCH_ROWS
        return bytes([value_of(batch)]) * max(1, self.batch_bytes[batch] // BATCH_ROWS)


def listed(samples: list[Any]) -> list[Any]:
    return samples


def stacked(samples: list[Any]) -> torch.Tensor:
    return torch.stack(samples)
