"""The demo: torch's DataLoader and penstock's load a built-in dataset and are compared as in `penstock bench`.

In:  ``DemoSettings``.
Out: a ``LoaderComparison``.
Runs in: trainer (here, the command line); workers fetch samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

import penstock
from penstock.lab.bench import Rounds, Tally, compare_loaders
from penstock.lab.comparison import LoaderComparison
from penstock.units import MIB


class BigSamples(Dataset[dict[str, Any]]):
    """A dataset of ``length`` samples of ``sample_bytes`` each, which are the same on every machine. Reading a sample
    waits ``wait_s``, as reading from a disk or a network does."""

    def __init__(self, *, length: int, sample_bytes: int, wait_s: float, seed: int = 0) -> None:
        self._length = length
        self._wait_s = wait_s
        generator = torch.Generator().manual_seed(seed)
        self._source = torch.randint(0, 256, (sample_bytes,), dtype=torch.uint8, generator=generator)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        time.sleep(self._wait_s)
        return {"pixels": self._source + (index % 251), "index": index}


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The settings of both loaders. The budget is for penstock's loader only, because torch's loader has no budget."""

    sample_bytes: int = 8 * MIB
    """The size of one sample."""
    wait_s: float = 0.02
    """The time that reading a sample waits."""
    batch_size: int = 8
    """The number of samples in a batch."""
    workers: int = 4
    """Worker processes."""
    step_s: float = 0.03
    """The time that the pretended training step takes."""
    memory_bytes: int = 320 * MIB
    """The budget of penstock's loader."""
    rounds: int = 2
    """The number of rounds of each loader. The loaders take turns."""
    round_s: float = 3.5
    """The time that a round lasts."""
    most_batches: int = 200
    """The number of batches in the dataset, which is more than any loader delivers in ``round_s``."""


def compare(settings: DemoSettings, *, on_progress: Callable[[str, float], None]) -> LoaderComparison:
    """Run both loaders in turns. ``on_progress`` gets the name of the loader that runs and the share of all rounds that
    is done."""
    dataset = BigSamples(
        length=settings.most_batches * settings.batch_size,
        sample_bytes=settings.sample_bytes,
        wait_s=settings.wait_s,
    )

    def given() -> dict[str, Any]:
        return {
            "batch_size": settings.batch_size,
            "num_workers": settings.workers,
            "shuffle": True,
            "generator": torch.Generator().manual_seed(0),
        }

    def use(batch: dict[str, torch.Tensor], tally: Tally) -> None:
        order = [] if tally.order is None else tally.order
        order += zip(batch["index"].tolist(), batch["pixels"][:, -1].tolist(), strict=True)
        time.sleep(settings.step_s)
        tally.samples, tally.order = len(order), order
        tally.delivered_bytes += batch["pixels"].nbytes

    rounds = Rounds(
        make={
            "torch": lambda: TorchDataLoader(dataset, **given()),
            "penstock": lambda: penstock.DataLoader(dataset, memory=settings.memory_bytes, **given()),
        },
        use=use,
        rounds=settings.rounds,
        round_s=settings.round_s,
    )
    return compare_loaders(rounds, on_progress=on_progress)
