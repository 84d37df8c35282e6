"""Which datasets may have the rows of one batch fetched by several workers, as a table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from penstock.workers.setup import Setup, can_split


class Rows(Dataset[int]):
    def __init__(self, splittable: bool | None = None) -> None:
        if splittable is not None:
            self.splittable = splittable

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class Lists(Rows):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class Transformed(Dataset[int]):
    """A wrapper as users write them."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> int:
        return self.dataset[index]


@pytest.mark.parametrize(
    ("dataset", "splits", "by_whole_list"),
    [
        (Rows(), True, False),
        ([1, 2], True, False),
        (TensorDataset(torch.arange(4)), True, False),
        (Rows(False), False, False),
        (Lists(), False, True),
        (Lists(True), True, False),
        (Lists(False), False, True),
        (Subset(Rows(), [0]), True, False),
        (Subset(Rows(False), [0]), False, True),
        (Subset(Lists(), [0]), False, True),
        (Subset(Lists(True), [0]), True, False),
        (Subset(Subset(Rows(False), [0]), [0]), False, True),
        (ConcatDataset([Rows(), Lists()]), True, False),
        (ConcatDataset([Rows(), Rows(False)]), False, False),
        (Subset(ConcatDataset([Rows(), Subset(Rows(False), [0])]), [0]), False, True),
        (StackDataset(Rows(), Rows()), False, True),
        (Transformed(Rows()), True, False),
        (Transformed(Lists()), True, False),
        (Transformed(Transformed(Rows(False))), False, False),
        (Transformed(ConcatDataset([Rows(False)])), False, False),
    ],
)
def test_a_dataset_says_whether_its_batches_may_be_split_and_wrappers_follow(
    dataset: Any, splits: bool, by_whole_list: bool
) -> None:
    assert can_split(dataset) is splits
    setup = Setup(
        dataset=dataset,
        collate_fn=list,
        init_fn=None,
        auto_collation=True,
        drop_last=False,
        batch_rows=2,
        hold_bytes=0,
        keeps_generators=False,
    )
    assert setup.fetches_whole_lists is by_whole_list
