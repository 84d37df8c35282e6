"""The training of bench_memory: large samples that arrive slowly, and long steps.

In:  nothing.
Out: the dataset, the custom collate function, sizes.
Runs in: both.
"""

from __future__ import annotations

import math
import time

import torch
from torch.utils.data import Dataset

from penstock.units import MIB

SHAPE = (3, 720, 1280)
ROWS = 8
"""Samples in a batch."""
SAMPLE_S = 0.020
"""Time that a sample takes to arrive."""
STEP_S = 0.050
"""Time of a training step, which limits the rate to ROWS / STEP_S = 160 samples/s."""
SAMPLE_BYTES = math.prod(SHAPE) * 4
BATCH_BYTES = ROWS * SAMPLE_BYTES
WORKER_BYTES = 8 * MIB
"""The bar for each further worker, beside one sample."""

OWN_BYTES = 4 * MIB
"""Memory that penstock counts for itself in the training process."""

Sample = tuple[torch.Tensor, int]


class SlowSamples(Dataset[Sample]):
    """Sample ``i`` is an image full of ``i``, and ``i`` itself."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        time.sleep(SAMPLE_S)
        return torch.full(SHAPE, float(index)), index


def stack_samples(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """A custom collate function, as every Hugging Face training has one."""
    return torch.stack([image for image, _ in samples]), torch.tensor([index for _, index in samples])
