"""Shuffled epochs of prompts and responses from one ordinary Parquet file, through a loader.

In:  a way, a number of workers, a file, seconds.
Out: rows per second, and microseconds of CPU per row of the whole process tree.
Runs in: the child. The harness samples its memory meanwhile.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import psutil
import pyarrow.parquet as pq
import torch
from torch.utils.data import Dataset

import penstock
from child import Harness
from penstock.data import LowMemDataset

BATCH = 64
CHARACTERS = 512


class SlicedTable(Dataset[tuple[str, str]]):
    """The whole table in memory; each row is a slice of it."""

    def __init__(self, path: str) -> None:
        self._table = pq.read_table(path)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> tuple[str, str]:
        row = self._table.slice(index, 1)
        prompt, response = row["prompt"][0].as_py(), row["response"][0].as_py()
        return f"{prompt[:CHARACTERS]}[EOS]", f"{response[:CHARACTERS]}[EOS]"


class OneByOne(Dataset[tuple[str, str]]):
    """A dataset around another one that asks it for single rows."""

    def __init__(self, path: str) -> None:
        self._rows = LowMemDataset(path)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[str, str]:
        return self._rows[index]


def collate(pairs: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    """The bytes of all texts, and their lengths."""
    texts = [text.encode() for pair in pairs for text in pair]
    return {
        "bytes": torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8),
        "lengths": torch.tensor([len(text) for text in texts]),
    }


TORCH, PENSTOCK = torch.utils.data.DataLoader, penstock.DataLoader
WAYS: dict[str, tuple[Any, Any]] = {
    "sliced table, torch": (SlicedTable, TORCH),
    "LowMemDataset, torch": (LowMemDataset, TORCH),
    "LowMemDataset, penstock": (LowMemDataset, PENSTOCK),
    "LowMemDataset one by one, torch": (OneByOne, TORCH),
}
"""Dataset and loader."""


def main() -> None:
    harness = Harness()
    request = harness.request
    make_dataset, make_loader = WAYS[request["way"]]
    make = functools.partial(
        make_loader, batch_size=BATCH, shuffle=True, num_workers=request["workers"], collate_fn=collate,
        persistent_workers=request["workers"] > 0, multiprocessing_context="fork" if request["workers"] else None,
    )  # fmt: skip
    harness.ready()
    dataset = make_dataset(request["path"])
    loader = make(dataset)
    batches = endless(loader)
    for _ in range(2 * BATCH):
        next(batches)
    rows, began_s, began_cpu_s = 0, time.perf_counter(), tree_cpu_s()
    while time.perf_counter() - began_s < request["seconds"]:
        rows += len(next(batches)["lengths"]) // 2
    took_s = time.perf_counter() - began_s
    harness.result(rows_per_s=rows / took_s, cpu_us=(tree_cpu_s() - began_cpu_s) / rows * 1e6)


def endless(loader: Any) -> Any:
    while True:
        yield from loader


def tree_cpu_s() -> float:
    """CPU time of this process and its workers."""
    tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(times.user + times.system for times in (process.cpu_times() for process in tree))


if __name__ == "__main__":
    main()
