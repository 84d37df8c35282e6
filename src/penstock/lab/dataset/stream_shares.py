"""Whether a stream divides its samples among workers, or delivers all samples to each worker.

In:  an iterable dataset, and the first samples that the dataset delivered to one worker.
Out: whether another worker would get the same samples.
Runs in: the probe's process, which pretends to be a worker; never in the trainer.

A stream that divides its samples asks torch which worker it is in (``torch.utils.data.get_worker_info``). A stream that
never asks may still deliver different samples to each worker, for example random samples. The first samples of a second
worker are therefore read and compared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data._utils import worker as torch_worker

from penstock.device.tree import leaves

COMPARED = 3
"""The number of first samples of two workers that are compared."""
_COMPARE_S = 0.5
"""The seconds after which only the samples read so far are compared."""


class WorkerStandIn:
    """Takes the place of torch's ``WorkerInfo``, and records whether the dataset asked for the worker's number."""

    def __init__(self, dataset: Any, *, worker: int, workers: int) -> None:
        self.dataset, self.seed = dataset, worker
        self.was_asked = False
        self._worker, self._workers = worker, workers
        torch_worker._worker_info = self  # type: ignore[assignment]

    @property
    def id(self) -> int:
        self.was_asked = True
        return self._worker

    @property
    def num_workers(self) -> int:
        self.was_asked = True
        return self._workers


def gives_all_to_each(dataset: Any, first: Sequence[Any], stand_in: WorkerStandIn) -> bool:
    """Whether every worker would get every sample. ``first`` holds the first samples that were delivered to the
    stand-in."""
    if stand_in.was_asked or not first or isinstance(dataset, IterDataPipe):
        # torch itself divides a data pipe among its workers.
        return False
    other, began_s = WorkerStandIn(dataset, worker=1, workers=2), time.perf_counter()
    try:
        stream = iter(dataset)
        for mine in first[:COMPARED]:
            if not _is_same(mine, next(stream, None)) or other.was_asked:
                return False
            if time.perf_counter() - began_s > _COMPARE_S:
                break
    except Exception:
        # The stream cannot be read twice, so what another worker would get is unknown.
        return False
    return True


def _is_same(one: Any, other: Any) -> bool:
    ones, others = list(leaves(one)), list(leaves(other))
    return len(ones) == len(others) and all(map(_is_same_leaf, ones, others))


def _is_same_leaf(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    try:
        if isinstance(one, torch.Tensor):
            return torch.equal(one, other)
        return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)
    except Exception:
        # Samples that cannot be compared count as different.
        return False
