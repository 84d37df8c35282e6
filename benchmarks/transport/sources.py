"""Samples in memory for bench_transport, so that fetching costs nothing but the copy.

In:  a case.
Out: the samples, as datasets for torch, numpy and plain indexing, and the checksum of every row.
Runs in: both; a spawned worker makes the same samples again, so that they need not be sent.

Sources are larger than any processor cache and are read in order, so that a loader copies from memory, as in training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

SOURCE_BYTES = 400_000_000
"""The samples rotate over at least this much: last-level caches of servers exceed 200 MB."""
ENDLESS = 1 << 31
"""Samples in the dataset: more than any round reads."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape of batch."""

    name: str
    rows: int
    """Samples in a batch."""
    shape: tuple[int, ...]
    """Shape of one float32 sample."""
    in_gigabytes: bool
    """Whether the report shows GB/s; otherwise batches/s."""
    against_torch: float
    """The bar for penstock / torch."""
    against_peers: float | None
    """The bar for penstock / another library; None: they are not run."""

    @property
    def batch_bytes(self) -> int:
        return self.rows * math.prod(self.shape) * 4

    @property
    def source_batches(self) -> int:
        """Distinct batches: the rotation is whole batches long."""
        return math.ceil(SOURCE_BYTES / self.batch_bytes)


CASES = {
    case.name: case
    for case in (
        Case(name="19MB", rows=32, shape=(3, 224, 224), in_gigabytes=True, against_torch=7.0, against_peers=3.0),
        Case(name="88MB", rows=8, shape=(3, 720, 1280), in_gigabytes=True, against_torch=6.0, against_peers=3.0),
        Case(name="64x4KB", rows=64, shape=(1024,), in_gigabytes=False, against_torch=4.0, against_peers=None),
    )
}


class Sources(Dataset[torch.Tensor]):
    """Random samples, the same in every process. Indexing returns a view, so only the loader copies."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._make()

    def _make(self) -> None:
        rows = self.case.source_batches * self.case.rows
        self.array = np.empty((rows, *self.case.shape), np.float32)
        np.random.default_rng(7).random(out=self.array, dtype=np.float32)
        self._tensor = torch.from_numpy(self.array)

    def __getstate__(self) -> dict[str, Case]:
        return {"case": self.case}

    def __setstate__(self, state: dict[str, Case]) -> None:
        self.case = state["case"]
        self._make()

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._tensor[index % len(self._tensor)]

    def indices(self, batch: int) -> range:
        """The samples of batch ``batch``, in order."""
        return range(batch * self.case.rows, (batch + 1) * self.case.rows)

    def tensor_batch(self, batch: int) -> torch.Tensor:
        """Batch ``batch`` built from its samples, for libraries that map a function over batches."""
        return torch.stack([self[index] for index in self.indices(batch)])

    def array_batch(self, batch: int) -> np.ndarray:
        """The same with numpy."""
        count = len(self.array)
        return np.stack([self.array[index % count] for index in self.indices(batch)])


class Rows:
    """The samples as numpy arrays, for Grain, which cannot batch tensors."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> np.ndarray:
        array = self._sources.array
        return array[index % len(array)]


class DealtRows(Rows):
    """The samples in an order that gives whole batches when Grain distributes them one by one among ``workers``."""

    def __init__(self, sources: Sources, workers: int) -> None:
        super().__init__(sources)
        self._workers = workers

    def __getitem__(self, index: int) -> np.ndarray:
        rows = self._sources.case.rows
        turn, worker = divmod(index, self._workers)
        batch, row = divmod(turn, rows)
        return super().__getitem__((batch * self._workers + worker) * rows + row)


class Checker:
    """Compares the rows of batches with their checksums."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._expected = row_sums(torch.from_numpy(sources.array))

    def check(self, batch: int, data: torch.Tensor | np.ndarray, when: str) -> None:
        """ValueError unless ``data`` is batch number ``batch``, as far as 64-bit sums of the bytes show."""
        tensor = torch.from_numpy(data) if isinstance(data, np.ndarray) else data
        case = self._sources.case
        if tensor.shape != (case.rows, *case.shape) or tensor.dtype != torch.float32:
            raise ValueError(f"batch {batch} {when} is {tuple(tensor.shape)} of {tensor.dtype}")
        at = torch.tensor(self._sources.indices(batch)) % len(self._expected)
        wrong = (row_sums(tensor) != self._expected[at]).nonzero().flatten().tolist()
        if wrong:
            raise ValueError(f"batch {batch} {when}: rows {wrong} differ from the dataset")


def row_sums(batch: torch.Tensor) -> torch.Tensor:
    """One wrapping 64-bit sum over the bytes of every row."""
    return batch.reshape(len(batch), -1).view(torch.int64).sum(dim=1)
