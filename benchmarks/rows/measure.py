"""One way of reading rows of one file: rows per second, and the memory of a worker.

In:  a way, an order, a file.
Out: rows per second; growth of the private memory of each worker over an epoch.
Runs in: the child.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from child import Harness

BATCH = 64
Way = Callable[[str, contextlib.ExitStack], tuple[Any, np.ndarray]]
"""Opens a file: returns a dataset with ``__getitems__``, and the first rows of the row groups."""


def main() -> None:
    harness = Harness()
    request = harness.request
    with contextlib.ExitStack() as opened:
        dataset, blocks = WAYS[request["way"]](request["path"], opened)
        if request["what"] == "speed":
            harness.result(**speed(dataset.__getitems__, blocks, request["order"], request["seconds"]))
        else:
            harness.result(**memory(dataset, blocks, request["order"], request["workers"], request["rows"]))


def speed(fetch: Callable[[list[int]], Any], blocks: np.ndarray, order: str, seconds: float) -> dict[str, Any]:
    batches = batches_of(blocks, order, seed=0)
    fetch(next(batches))
    rows, began_s = 0, time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        asked = next(batches)
        found = fetch(asked)
        rows += len(found)
        if [row["id"] for row in found] != asked:
            raise RuntimeError("the rows are not those that were asked for")
    return {"rows_per_s": rows / (time.perf_counter() - began_s)}


def memory(dataset: Any, blocks: np.ndarray, order: str, workers: int, rows: int) -> dict[str, Any]:
    """The largest private memory of a loader's workers while they read ``rows``, less that of idle workers."""
    batches = list(itertools.islice(batches_of(blocks, order, seed=1), -(-rows // BATCH)))
    idle = max(most_private(Numbers(), batches, workers))
    growths = [(private - idle) / 2**20 for private in most_private(dataset, batches, workers)]
    return {"growth_mib": max(growths), "growths_mib": growths, "idle_mib": idle / 2**20}


class Numbers:
    """The dataset of an idle worker."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def most_private(dataset: Any, batches: list[list[int]], workers: int) -> list[int]:
    """The largest private memory of each worker."""
    import penstock

    most: dict[int, int] = {}
    with penstock.DataLoader(
        dataset, batch_sampler=batches, num_workers=workers, collate_fn=len, multiprocessing_context="fork"
    ) as loader:  # fmt: skip
        for number, _ in enumerate(loader):
            if number < 2 or number % 8 == 0:
                for pid in children():
                    most[pid] = max(most.get(pid, 0), private_bytes(pid))
    return list(most.values())


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def private_bytes(pid: int) -> int:
    """Pages that only this process maps."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_"))


def batches_of(blocks: np.ndarray, order: str, seed: int) -> Iterator[list[int]]:
    """Endless: the whole file in random order, or blocks in random order with rows shuffled within 6 blocks."""
    from penstock.data import BlockShuffleSampler

    total = int(blocks[-1])
    epoch = 0
    while True:
        if order == "random":
            indices = np.random.default_rng((seed, epoch)).permutation(total).tolist()
        else:
            sampler = BlockShuffleSampler(np.diff(blocks), window=int(blocks[1]) * 6, seed=seed)
            indices = list(sampler.order(epoch))
        for first in range(0, total, BATCH):
            yield indices[first : first + BATCH]
        epoch += 1


# -- the ways ------------------------------------------------------------------------------------------------


def penstock_way(mode: str) -> Way:
    def opened(path: str, _: contextlib.ExitStack) -> tuple[Any, np.ndarray]:
        from penstock.data import ParquetDataset

        dataset = ParquetDataset(path, mode=mode)
        return dataset, dataset.blocks

    return opened


class TableSlices:
    """The whole table in memory; each row is a slice of it."""

    def __init__(self, path: str) -> None:
        import pyarrow.parquet as pq

        self._table = pq.read_table(path)

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        rows = (self._table.slice(index, 1) for index in indices)
        return [{name: row[name][0].as_py() for name in row.column_names} for row in rows]


def hugging_face(path: str, opened: contextlib.ExitStack) -> tuple[Any, np.ndarray]:
    import datasets  # pyright: ignore[reportMissingImports]

    datasets.disable_progress_bars()
    folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-"))
    return datasets.load_dataset("parquet", data_files=path, cache_dir=folder, split="train"), group_starts(path)


def group_starts(path: str) -> np.ndarray:
    import pyarrow.parquet as pq

    about = pq.read_metadata(path)
    return np.concatenate(([0], np.cumsum([about.row_group(n).num_rows for n in range(about.num_row_groups)])))


WAYS: dict[str, Way] = {
    "penstock": penstock_way("mapped"),
    "penstock ultra": penstock_way("ultra"),
    "penstock memory": penstock_way("memory"),
    "read_table.slice": lambda path, _: (TableSlices(path), group_starts(path)),
    "datasets": hugging_face,
}

if __name__ == "__main__":
    main()
