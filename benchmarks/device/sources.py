"""Images for delivery to a GPU, and their check on the GPU.

In:  a case; "hot" or "rotating" samples.
Out: a dataset that returns views of them; the checksum of every sample.
Runs in: both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

ROTATING_BYTES = 400_000_000
"""Rotating samples: too many for a processor cache, so that they come from memory."""
HOT_BYTES = 1 << 20
"""Hot samples: few enough to stay in a worker's processor cache, as if a decoder had just made them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape of batch."""

    name: str
    rows: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def sample_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def batch_bytes(self) -> int:
        return self.rows * self.sample_bytes


CASES = {
    case.name: case
    for case in (
        Case(name="uint8 256x3x224x224", rows=256, shape=(3, 224, 224), dtype="u1"),
        Case(name="float32 256x3x224x224", rows=256, shape=(3, 224, 224), dtype="f4"),
        Case(name="float32 8x3x720x1280", rows=8, shape=(3, 720, 1280), dtype="f4"),
    )
}


class Images(Dataset[torch.Tensor]):
    """``count`` samples that repeat fewer distinct ones. Indexing returns a view, so only the loader copies."""

    def __init__(self, case: Case, count: int, source: str) -> None:
        self.case, self.count = case, count
        source_bytes = HOT_BYTES if source == "hot" else ROTATING_BYTES
        distinct = max(2, math.ceil(source_bytes / case.sample_bytes))
        noise = np.random.default_rng(7).integers(0, 255, (distinct, *case.shape), np.uint8)
        self._samples = torch.from_numpy(noise if case.dtype == "u1" else noise.astype(case.dtype))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._samples[index % len(self._samples)]

    def row_sums(self) -> torch.Tensor:
        """A 64-bit sum over the bytes of every distinct sample."""
        return row_sums(self._samples)


def row_sums(batch: torch.Tensor) -> torch.Tensor:
    return batch.reshape(len(batch), -1).view(torch.int32).sum(dim=1, dtype=torch.int64)


class Checker:
    """Compares batches with the dataset, on the GPU, without waiting for it."""

    def __init__(self, images: Images, device: Any) -> None:
        self._expected = images.row_sums().to(device)
        self._rows = images.case.rows
        self._wrong = torch.zeros((), dtype=torch.int64, device=device)

    def check(self, number: int, batch: torch.Tensor) -> None:
        first = number * self._rows
        at = torch.arange(first, first + len(batch), device=batch.device) % len(self._expected)
        self._wrong += (row_sums(batch) != self._expected[at]).sum()

    @property
    def wrong_rows(self) -> int:
        return int(self._wrong)
