"""A dataset's samples in random order without an end, for measurements that epochs must not interrupt.

In:  a dataset, what a loader is given besides.
Out: arguments of a loader, an endless stream of its batches.
Runs in: trainer.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

from torch.utils.data import IterableDataset, RandomSampler

from penstock.lab.dataset.sample_probe import NoDataError

_WITHOUT_END = 1 << 40


def endless_arguments(dataset: Any) -> dict[str, Any]:
    """Arguments that make an epoch as long as anybody looks; a stream has none, and begins again."""
    if isinstance(dataset, IterableDataset):
        return {}
    if not len(dataset):
        raise NoDataError("it is empty: there is no sample to load")
    return {"sampler": RandomSampler(dataset, replacement=True, num_samples=_WITHOUT_END)}


def endless(loader: Iterable[Any]) -> Generator[Any, None, None]:
    """Epoch after epoch; raises if one is empty."""
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            raise NoDataError("it is empty: an epoch of it has no batch")
