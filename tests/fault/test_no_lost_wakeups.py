"""Two threads turn the crank: what one of them deals with, the other must not go on waiting for."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import Dataset

import penstock


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1200

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.004)
        return torch.tensor([index])


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_batch_that_became_ready_is_not_waited_for() -> None:
    """Steps about as long as loading: the engine's thread and the training thread wait for workers side by side."""
    longest_s = 0.0
    with penstock.DataLoader(Slow(), batch_size=4, num_workers=2) as loader:
        batches = iter(loader)
        for number in range(300):
            asked_s = time.monotonic()
            assert next(batches)[0, 0] == 4 * number
            longest_s = max(longest_s, time.monotonic() - asked_s)
            time.sleep(0.007)
    assert longest_s < 0.6, f"{longest_s:.2f} s for a batch of 8 ms"
