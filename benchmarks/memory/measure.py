"""Trains with one loader while the harness samples the memory of this process and its workers.

In:  a request: loader, workers, samples, collate, budget.
Out: samples per second, time to the first batch, the loader's stats.
Runs in: its own child, in every run.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from child import Harness
from memory.work import ROWS, STEP_S, SlowSamples, stack_samples

_NOT_IN_STATS = ("cache", "stages")


def loader_of(request: dict[str, Any]) -> TorchDataLoader[Any]:
    """The loader with its defaults, except for the compared settings."""
    options: dict[str, Any] = {
        "batch_size": ROWS,
        "num_workers": request["workers"],
        "collate_fn": stack_samples if request["collate"] == "custom" else None,
    }
    dataset = SlowSamples(request["samples"])
    if request["loader"] == "torch":
        return TorchDataLoader(dataset, **options)
    if request["memory_bytes"] is not None:
        options["memory"] = request["memory_bytes"]
    return penstock.DataLoader(dataset, **options)


def main() -> None:
    # Some runs have more workers than cores, and both loaders warn of that.
    warnings.filterwarnings("ignore")
    harness = Harness()
    loader = loader_of(harness.request)
    # The memory that torch takes at its first operation must not count for a loader.
    torch.zeros(ROWS).sum()
    harness.ready()

    seen: list[int] = []
    first_s = elapsed_s = 0.0
    stats: dict[str, Any] = {}
    began_s = time.perf_counter()
    for images, indices in loader:
        if not seen:
            first_s = time.perf_counter() - began_s
        rows = indices.tolist()
        # The first and the last pixel of every image show a row written late or twice, and cost no time.
        if not images[:, 0, 0, 0].tolist() == images[:, -1, -1, -1].tolist() == rows:
            raise ValueError(f"batch of samples {rows} holds {images[:, 0, 0, 0].tolist()}")
        seen += rows
        time.sleep(STEP_S)
        elapsed_s = time.perf_counter() - began_s
        if isinstance(loader, penstock.DataLoader):
            stats = {name: value for name, value in vars(loader.stats()).items() if name not in _NOT_IN_STATS}
    if seen != list(range(harness.request["samples"])):
        raise ValueError("samples are missing, repeated or out of order")
    harness.result(samples_per_s=len(seen) / elapsed_s, first_batch_s=first_s, elapsed_s=elapsed_s, stats=stats)


if __name__ == "__main__":
    main()
