"""Host memory by component: the size of each part, what the part grows with, and how two configurations differ.

In:  three ``Reading``s of one loader: as configured, with another batch size, and with another number of workers.
Out: ``Component``s, each with what it grows with; ``Change``s between two readings.
Runs in: anywhere; pure.

Growth is measured: a part grows with the batch size if it is larger at the larger batch by more than the difference
between repeated readings of one batch size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.units import MIB, format_bytes

PARTS: dict[str, str] = {
    "python": "Python and its libraries",
    "torch": "torch and the loaders",
    "imports": "what TARGET imports",
    "dataset": "the dataset: object and containers",
    "batch": "the batch in the training loop",
    "buffers": "loader buffers: batches ahead",
    "workers": "the workers' own memory",
    "other": "other, in the training process",
}
"""Part -> its description. Together the parts are all memory of the training process and its workers."""

BATCH, WORKERS, DATASET = "batch size", "workers", "dataset size"

_MEASURED_ONCE = ("python", "torch", "imports", "dataset")
"""Parts that exist before a loader is created. Neither the batch size nor the number of workers changes these parts."""
_COUNTED = ("batch", "buffers")
"""Parts that are counted and follow from the batch size. The freed memory that a heap keeps does not follow from the
batch size: a larger batch may leave less of it, so a line through two readings would be meaningless."""
_NOISE_BYTES = {"batch": 0, "buffers": 64 << 10, "workers": 2 * MIB, "other": 4 * MIB}
"""Differences between repeated readings, for parts that are counted (batches) and parts that are not counted
(heaps)."""
_TELLING = 0.25
"""A part counts as constant if it grows by less than this share of growth in proportion to the batch size or
workers."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The memory of one loader with all its batches ready, in parts that add up to the total."""

    batch_size: int
    workers: int
    parts: Mapping[str, int]
    """Part -> bytes, for each of ``PARTS``, measured while all batches ahead are ready and all workers are idle."""
    building_bytes: int = 0
    """The most memory beyond ``parts`` at any moment: samples in workers that build batches. It varies within a run and
    between runs."""
    page_cache_bytes: int | None = None
    """Pages of files that the kernel cached during the reading; None if unknown. The kernel releases these pages when
    memory is short, so they are not one of the parts."""

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def most_bytes(self) -> int:
        """The most memory that was taken at any moment."""
        return self.total_bytes + self.building_bytes

    @property
    def loader_bytes(self) -> int:
        """All memory except the parts that exist before a loader is created."""
        return sum(count for name, count in self.parts.items() if name not in _MEASURED_ONCE)


@dataclass(frozen=True, kw_only=True)
class Component:
    """One part of the memory, and what this part grows with."""

    name: str
    what: str
    bytes: int
    grows_with: tuple[str, ...]
    """Any of batch size, workers and dataset size; empty if the part is constant."""
    per_sample_bytes: float = 0.0
    """The growth with each further sample in a batch."""
    per_worker_bytes: float = 0.0
    """The growth with each further worker."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """The bytes of one part in two configurations."""

    name: str
    what: str
    before_bytes: int
    after_bytes: int

    @property
    def change_bytes(self) -> int:
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryLine:
    """Memory by batch size: a straight line through the reading at the requested batch size."""

    fixed_bytes: float
    per_sample_bytes: float
    ceiling_bytes: float | None = None
    """The upper limit: the memory that exists before the loader, plus the budget. None if there is no limit."""
    measured: tuple[tuple[int, int], ...] = field(default=())
    """Batch sizes and bytes of the readings."""

    def at(self, batch_size: float) -> float:
        found = self.fixed_bytes + self.per_sample_bytes * batch_size
        return found if self.ceiling_bytes is None else min(found, self.ceiling_bytes)

    def reaches(self, limit_bytes: float) -> int | None:
        """The largest batch size below the limit; None if this line never reaches the limit."""
        if self.per_sample_bytes <= 0 or (self.ceiling_bytes is not None and self.ceiling_bytes <= limit_bytes):
            return None
        return max(0, int((limit_bytes - self.fixed_bytes) / self.per_sample_bytes))


def components(
    reading: Reading, other_batch: Reading, other_workers: Reading, *, dataset_scales: bool, workers_copy_dataset: bool
) -> tuple[Component, ...]:
    """``dataset_scales`` means that the dataset holds an item for every sample; ``workers_copy_dataset`` means that
    each worker makes a copy of these items as it reads."""
    found = []
    for name, what in PARTS.items():
        grows: list[str] = []
        per_sample = _slope(name, reading, other_batch, by_batch=True)
        per_worker = _slope(name, reading, other_workers, by_batch=False)
        if per_sample:
            grows.append(BATCH)
        if per_worker:
            grows.append(WORKERS)
        if (name == "dataset" and dataset_scales) or (name == "workers" and workers_copy_dataset and reading.workers):
            grows.append(DATASET)
        found.append(
            Component(
                name=name, what=what, bytes=reading.parts[name], grows_with=tuple(grows),
                per_sample_bytes=per_sample, per_worker_bytes=per_worker,
            )
        )  # fmt: skip
    return tuple(found)


def _slope(name: str, reading: Reading, other: Reading, *, by_batch: bool) -> float:
    """The growth per sample or per worker; 0 if the difference between the two readings is within the noise."""
    if name in _MEASURED_ONCE:
        return 0.0
    counts = (reading.batch_size, other.batch_size) if by_batch else (reading.workers, other.workers)
    low, high = sorted(zip(counts, (reading.parts[name], other.parts[name]), strict=True))
    steps = high[0] - low[0]
    grown = high[1] - low[1]
    if not steps or grown <= _NOISE_BYTES[name] or grown < _TELLING * high[1] * steps / high[0]:
        return 0.0
    return grown / steps


def changes(before: Reading, after: Reading) -> tuple[Change, ...]:
    """The change of each part from the first configuration to the second."""
    return tuple(
        Change(name=name, what=what, before_bytes=before.parts[name], after_bytes=after.parts[name])
        for name, what in PARTS.items()
    )


def line(
    reading: Reading, other_batch: Reading, *, budget_bytes: int | None = None, builds_whole: bool = False
) -> MemoryLine:
    """Memory by batch size. ``budget_bytes`` is the limit of what batches and workers take together.

    ``builds_whole`` means that every worker holds all samples of the batch that it builds, as torch's workers do.
    """
    (low, low_bytes), (high, high_bytes) = sorted(
        ((reading.batch_size, reading.total_bytes), (other_batch.batch_size, other_batch.total_bytes))
    )
    slope = sum(_slope(name, reading, other_batch, by_batch=True) for name in _COUNTED)
    if builds_whole:
        slope += reading.workers * reading.parts["batch"] / reading.batch_size
    before = reading.total_bytes - reading.loader_bytes
    ceiling = None if budget_bytes is None else before + reading.parts["other"] + budget_bytes
    return MemoryLine(
        fixed_bytes=reading.total_bytes - slope * reading.batch_size,
        per_sample_bytes=slope,
        ceiling_bytes=None if ceiling is None else max(ceiling, low_bytes, high_bytes),
        measured=((low, low_bytes), (high, high_bytes)),
    )


def answer(parts: tuple[Component, ...], reading: Reading) -> str:
    """A sentence that says how a larger batch changes host memory."""
    growing = [part for part in parts if part.name in _COUNTED and part.per_sample_bytes]
    slope = sum(part.per_sample_bytes for part in growing)
    more_bytes = slope * reading.batch_size
    if not slope:
        return "A larger batch does not change host memory here: no part grew with the batch by more than noise."
    share = more_bytes / reading.total_bytes
    return (
        f"Doubling the batch to {2 * reading.batch_size} adds {format_bytes(more_bytes)} of host memory ({share:.0%}): "
        f"{format_bytes(slope)} a sample, in {', '.join(part.name for part in growing)}; the other "
        f"{format_bytes(reading.total_bytes - more_bytes)} do not depend on it."
    )
