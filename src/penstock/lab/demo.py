"""The demo's measurement: the same dataset through torch's DataLoader and ours, in turns, memory watched.

In:  ``DemoSettings``.
Out: a ``Comparison``.
Runs in: trainer (the command line plays it).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from penstock.lab.comparison import Comparison
from penstock.lab.demo_dataset import BigSamples
from penstock.lab.turns import Tally, Work, take_turns
from penstock.units import MIB


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What both loaders are given; the budget goes to ours alone, torch's has none."""

    sample_bytes: int = 8 * MIB
    """Size of one sample."""
    wait_s: float = 0.02
    """How long a sample takes to arrive."""
    batch_size: int = 8
    """Samples in a batch."""
    workers: int = 4
    """Worker processes."""
    step_s: float = 0.03
    """How long the pretended training step takes."""
    memory_bytes: int = 320 * MIB
    """Budget of our loader."""
    rounds: int = 2
    """Runs of each loader, in turns."""
    round_s: float = 3.5
    """How long a run lasts."""
    most_batches: int = 200
    """Batches in the dataset: more than any loader gets through in ``round_s``."""


def compare(settings: DemoSettings, *, on_progress: Callable[[str, float], None]) -> Comparison:
    """Run both loaders ``rounds`` times in turns; ``on_progress`` hears who runs and how much is done."""
    dataset = BigSamples(
        length=settings.most_batches * settings.batch_size,
        sample_bytes=settings.sample_bytes,
        wait_s=settings.wait_s,
    )

    def use(batch: dict[str, torch.Tensor], tally: Tally) -> Tally:
        order = (tally.order or []) + list(zip(batch["index"].tolist(), batch["pixels"][:, -1].tolist(), strict=True))
        time.sleep(settings.step_s)
        return Tally(len(order), tally.delivered_bytes + batch["pixels"].nbytes, order)

    return take_turns(
        Work(
            make={
                "torch": lambda: TorchDataLoader(dataset, **_common(settings)),
                "penstock": lambda: penstock.DataLoader(dataset, **_common(settings), memory=settings.memory_bytes),
            },
            use=use,
            rounds=settings.rounds,
            round_s=settings.round_s,
        ),
        on_progress=on_progress,
    )


def _common(settings: DemoSettings) -> dict[str, Any]:
    return {
        "batch_size": settings.batch_size,
        "num_workers": settings.workers,
        "shuffle": True,
        "generator": torch.Generator().manual_seed(0),
    }
