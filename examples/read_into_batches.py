"""Files read straight into the batch: each sample is written once, by the kernel, where the batch needs it.

    python examples/read_into_batches.py [--samples 64] [--workers 2]

Writes files of 4 MiB to a temporary folder, reads them with ``penstock.empty``, and checks every batch.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

import penstock

SHAPE = (4, 512, 512)


class Volumes(torch.utils.data.Dataset[dict[str, torch.Tensor | int]]):
    """Raw float32 volumes, one per file."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.bin"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor | int]:
        volume = penstock.empty(SHAPE, torch.float32)
        with self.files[index].open("rb", buffering=0) as file:
            file.readinto(volume.numpy().data)
        return {"volume": volume, "number": index}


def write_files(folder: Path, samples: int) -> None:
    for number in range(samples):
        np.full(SHAPE, number, np.float32).tofile(folder / f"{number:05}.bin")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), options.samples)
        with penstock.DataLoader(Volumes(Path(folder)), batch_size=8, num_workers=options.workers) as loader:
            for batch in loader:
                assert (batch["volume"] == batch["number"].view(-1, 1, 1, 1)).all()
    print(f"{options.samples} samples of {np.prod(SHAPE) * 4 >> 20} MiB, all as they were written")


if __name__ == "__main__":
    main()
