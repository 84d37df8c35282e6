"""The measurements that an explanation needs, and their results.

In:  the command line's options; measurements.
Out: ``Job`` and ``Explained``, which the command line and the measuring process send to each other.
Runs in: command line, and a child process of the command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.lab.explain.breakdown import MemoryRun

_RUNS = 6


@dataclass(frozen=True, kw_only=True)
class Job:
    """The description of what is to be measured."""

    target: str
    settings: dict[str, Any]
    """The fields of ``LoadSettings``."""
    collate: str | None
    step_s: float | None
    """The time that a simulated training step takes; None without a simulated step."""
    train: str | None
    """The name of a function that takes a batch, which is used as the training step."""
    seconds: float
    """The seconds that a run takes."""
    is_whole: bool = True
    """Whether other batch sizes, other numbers of workers and a training step are measured too, besides the
    configuration itself."""

    @property
    def has_step(self) -> bool:
        return self.is_whole and (self.step_s is not None or self.train is not None)

    @property
    def runs(self) -> int:
        return (_RUNS if self.is_whole else 2) + self.has_step


@dataclass(frozen=True, kw_only=True)
class Explained:
    """The measurements."""

    length: int | None
    dataset_type: str
    containers: tuple[tuple[str, int, int], ...]
    """Large containers, each as its path, its bytes, and the bytes that a worker copies as it reads."""
    dataset_scales: bool
    """Whether one of the containers has an item for every sample."""
    ours: MemoryRun
    torchs: MemoryRun
    ours_other_batch: MemoryRun | None
    ours_other_workers: MemoryRun | None
    torchs_other_batch: MemoryRun | None
    torchs_other_workers: MemoryRun | None
    with_step: MemoryRun | None
    cpu_fraction: float
    """The share of a sample's time that is spent computing."""
    swap_growth_bytes: int | None
    kills: int | None
