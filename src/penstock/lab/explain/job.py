"""What an explanation measures, and the measurements.

In:  the command line's options; measurements.
Out: ``Job`` and ``Explained``, which are sent between the command line and the process that measures.
Runs in: command line, and a child of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.lab.explain.breakdown import MemoryRun

_RUNS = 6


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to measure."""

    target: str
    settings: dict[str, Any]
    """Fields of ``LoadSettings``."""
    collate: str | None
    step_s: float | None
    """How long a simulated training step takes; None: no step."""
    train: str | None
    """A function that takes a batch: the training step itself."""
    seconds: float
    """Length of a run."""
    is_whole: bool = True
    """False: only the configuration itself, without other batch sizes, other numbers of workers and a step."""

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
    """Large containers: path, bytes, bytes that a worker copies as it reads."""
    dataset_scales: bool
    """Whether one of them has an item for every sample."""
    ours: MemoryRun
    torchs: MemoryRun
    ours_other_batch: MemoryRun | None
    ours_other_workers: MemoryRun | None
    torchs_other_batch: MemoryRun | None
    torchs_other_workers: MemoryRun | None
    with_step: MemoryRun | None
    cpu_fraction: float
    """Share of a sample's time spent computing."""
    swap_growth_bytes: int | None
    kills: int | None
