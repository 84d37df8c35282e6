"""The training that memory is measured on: large samples that arrive slowly, a step that takes its time.

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
"""How long a sample takes to arrive."""
STEP_S = 0.050
"""How long a training step takes: at most ROWS / STEP_S = 160 samples/s can be used."""
SAMPLE_BYTES = math.prod(SHAPE) * 4
BATCH_BYTES = ROWS * SAMPLE_BYTES
WORKER_BYTES = 8 * MIB
"""What the issue allows each further worker beside one sample."""

OWN_BYTES = 4 * MIB
"""What penstock counts for itself in the training process."""

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
    """A collate function of the user's own, as every Hugging Face run has one."""
    return torch.stack([image for image, _ in samples]), torch.tensor([index for _, index in samples])
