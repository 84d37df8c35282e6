"""The user's own collate function: what it gets, where it runs, what comes back."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, default_collate, get_worker_info


def _without_missing(samples: list[Any]) -> tuple[Any, bool, int]:
    """A batch of those samples that are there, whether torch put it into shared memory, and the worker's number."""
    batch = default_collate([sample for sample in samples if sample is not None])
    info = get_worker_info()
    return batch, batch.is_shared(), -1 if info is None else info.num_workers


class Gaps(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return None if index % 4 == 1 else torch.full((2, 3), index)


@pytest.mark.parametrize("seeding", ["batch", "worker"])
def test_torchs_collate_inside_a_collate_function_takes_no_shared_memory_and_sees_worker_info(seeding: str) -> None:
    from penstock import DataLoader

    found = list(DataLoader(Gaps(), batch_size=4, num_workers=2, collate_fn=_without_missing, seeding=seeding))
    assert [batch[:, 0, 0].tolist() for batch, _, _ in found] == [[0, 2, 3], [4, 6, 7], [8, 10, 11]]
    assert [is_shared for _, is_shared, _ in found] == [False] * 3
    assert [workers for _, _, workers in found] == [2] * 3


class OneSizePerBatch(Dataset[torch.Tensor]):
    """Draws a size once for as many samples as a batch has."""

    splittable = False

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.calls = self.size = 0

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.calls % self.batch_size == 0:
            self.size = 1 + index // self.batch_size
        self.calls += 1
        time.sleep(0.0005)
        return torch.full((self.size,), index)


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: ConcatDataset([d])], ids=["alone", "wrapped"])
def test_a_dataset_that_keeps_state_over_a_batch_and_says_so_gets_whole_batches(wrap: Any) -> None:
    from penstock import DataLoader

    # Tuples as batches, which are sliced like lists.
    sampler: Any = [tuple(range(start, start + 16)) for start in range(0, 96, 16)]
    loader = DataLoader(wrap(OneSizePerBatch(16)), batch_sampler=sampler, num_workers=2)
    assert [tuple(batch.shape) for batch in loader] == [(16, size) for size in range(1, 7)]
    assert not loader.stats().shared_batches


MISSING = object()


def _those_that_are_there(samples: list[Any]) -> torch.Tensor:
    return torch.stack([sample for sample in samples if sample is not MISSING])


class SlowWithGaps(Gaps):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return MISSING if index % 4 == 1 else torch.tensor(index)


def test_a_collate_function_gets_the_very_objects_that_the_dataset_returned_from_the_first_batch_on() -> None:
    from penstock import DataLoader

    loader = DataLoader(SlowWithGaps(), batch_size=6, num_workers=2, collate_fn=_those_that_are_there)
    assert [batch.tolist() for batch in loader] == [[0, 2, 3, 4], [6, 7, 8, 10, 11]]
