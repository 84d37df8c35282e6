"""Times one way of reading files into batches.

In:  a request: the folder of the files, their size, the way, workers, seconds.
Out: GB/s.
Runs in: its own child, in every round.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import numpy as np
import torch

import penstock
from child import Harness

BATCH_ROWS, FILES = 8, 6
WAYS = ("np.fromfile", "readinto torch.empty", "readinto penstock.empty")
_LEAST_BATCHES = 16


class Files(torch.utils.data.Dataset[torch.Tensor]):
    """The same few files again and again."""

    def __init__(self, folder: Path, mib: int, way: str) -> None:
        self.folder, self.shape, self.way = folder, (mib, 512, 512), way

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        path = self.folder / f"{index % FILES}.bin"
        if self.way == "np.fromfile":
            return torch.from_numpy(np.fromfile(path, np.float32)).view(self.shape)
        tensor = (penstock if self.way == "readinto penstock.empty" else torch).empty(self.shape, dtype=torch.float32)
        with path.open("rb", buffering=0) as file:
            file.readinto(tensor.numpy().data)
        return tensor


def main() -> None:
    warnings.filterwarnings("ignore")
    harness = Harness()
    request = harness.request
    files = Files(Path(request["folder"]), request["mib"], request["way"])
    with penstock.DataLoader(files, batch_size=BATCH_ROWS, num_workers=request["workers"]) as loader:
        batches = iter(loader)
        began_s, batch, first = time.perf_counter(), next(batches), 1
        while time.perf_counter() - began_s < request["warm_up_s"]:
            batch, first = next(batches), first + 1
        began_s, elapsed_s, count = time.perf_counter(), 0.0, 0
        while count < _LEAST_BATCHES or elapsed_s < request["seconds"]:
            batch = next(batches)
            count += 1
            elapsed_s = time.perf_counter() - began_s
        for row, got in enumerate(batch, start=(first + count - 1) * BATCH_ROWS):
            if not np.array_equal(got.numpy().ravel(), np.fromfile(files.folder / f"{row % FILES}.bin", np.float32)):
                raise SystemExit(f"sample {row} is not its file")
    harness.result(batches=count, gigabytes_per_s=count * batch.nbytes / elapsed_s / 1e9)


if __name__ == "__main__":
    main()
