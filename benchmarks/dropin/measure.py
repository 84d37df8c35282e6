"""Times torch's loader and penstock's on one kind of work, one after the other.

In:  a request: work, workers, seconds, which loader goes first.
Out: batches per second of each.
Runs in: its own child, in every round.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from child import Harness
from dropin.work import WORK, Work

_WARM_UP_SHARE = 0.3
_LEAST_BATCHES = 8


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    harness = Harness()
    request = harness.request
    work = WORK[request["work"]]
    loaders = {"torch": TorchDataLoader, "penstock": penstock.DataLoader}
    rates: dict[str, float] = {}
    for name in list(loaders)[:: 1 if request["torch_first"] else -1]:
        rates[name] = rate(loaders[name], work, request["workers"], request["seconds"])
        gc.collect()
    harness.result(torch_per_s=rates["torch"], penstock_per_s=rates["penstock"])


def rate(kind: Any, work: Work, workers: int, seconds: float) -> float:
    """Batches per second."""
    dataset = work.dataset()
    arguments = dict(work.arguments)
    if not workers:
        arguments.pop("multiprocessing_context", None)
    if work.epochs:
        began_s = time.perf_counter()
        loader = kind(dataset, num_workers=workers, **arguments)
        count = sum(1 for _ in _epochs(loader, work))
        del loader
        return count / (time.perf_counter() - began_s)
    loader = kind(dataset, num_workers=workers, **arguments)
    batches = iter(loader)
    _take(batches, _WARM_UP_SHARE * seconds)
    return _take(batches, seconds)


def _epochs(loader: Any, work: Work) -> Iterator[Any]:
    for _ in range(work.epochs):
        for batch in loader:
            yield batch
            if work.first_only:
                break


def _take(batches: Iterator[Any], seconds: float) -> float:
    """Take batches for a while, each held until the next one comes; returns their rate."""
    count, elapsed_s, held = 0, 0.0, None
    began_s = time.perf_counter()
    while count < _LEAST_BATCHES or elapsed_s < seconds:
        held = next(batches)
        count += 1
        elapsed_s = time.perf_counter() - began_s
    del held
    return count / elapsed_s


if __name__ == "__main__":
    main()
