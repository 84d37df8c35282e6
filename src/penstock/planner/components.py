"""Host memory by component: what there is, what each part grows with, how two configurations differ.

In:  ``Reading``s of one loader: as asked for, with another batch size, with another number of workers.
Out: ``Component``s with what they grow with; ``Change``s between two readings.
Runs in: anywhere; pure.

A mark is a measurement: a part grows with the batch size if it was larger at the larger batch, by more than readings of
the same thing differ.
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
"""Part -> what it is. Together they are all the memory of the process and its workers."""

BATCH, WORKERS, DATASET = "batch size", "workers", "dataset size"

_MEASURED_ONCE = ("python", "torch", "imports", "dataset")
"""There before a loader was made: no batch size and no number of workers can change them."""
_COUNTED = ("batch", "buffers")
"""Follow from the batch size by counting. What a heap keeps of what it once held does not: of two sizes the larger may
well show less of it, and a line through both would point anywhere."""
_NOISE_BYTES = {"batch": 0, "buffers": 64 << 10, "workers": 2 * MIB, "other": 4 * MIB}
"""Readings of the same thing differ by so much. Batches are counted, heaps are not."""
_TELLING = 0.25
"""A part that grows by less than this share of growing in proportion does not grow with it."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One loader at its fullest, in parts that add up to all of it."""

    batch_size: int
    workers: int
    parts: Mapping[str, int]
    """Part -> bytes, for every one of ``PARTS``, with all batches ahead and nobody at work."""
    building_bytes: int = 0
    """What there was more than that at some moment: samples in workers that build batches. It comes and goes, and two
    runs of the same thing differ in it."""
    page_cache_bytes: int | None = None
    """What the kernel kept of files read meanwhile; it gives that back when memory is short, so it is no part. None:
    not known."""

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def most_bytes(self) -> int:
        """The most there was at any moment."""
        return self.total_bytes + self.building_bytes

    @property
    def loader_bytes(self) -> int:
        """What came with the loader: everything but what was there before."""
        return sum(count for name, count in self.parts.items() if name not in _MEASURED_ONCE)


@dataclass(frozen=True, kw_only=True)
class Component:
    """One part, and what it grows with."""

    name: str
    what: str
    bytes: int
    grows_with: tuple[str, ...]
    """Of batch size, workers, dataset size; empty: none of them."""
    per_sample_bytes: float = 0.0
    """Growth with every further sample of a batch."""
    per_worker_bytes: float = 0.0
    """Growth with every further worker."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One part in two configurations."""

    name: str
    what: str
    before_bytes: int
    after_bytes: int

    @property
    def change_bytes(self) -> int:
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True, kw_only=True)
class Line:
    """Memory by batch size, through what was read at the size asked for."""

    fixed_bytes: float
    per_sample_bytes: float
    ceiling_bytes: float | None = None
    """More than this is never taken: what was there before, and the budget. None: no ceiling."""
    measured: tuple[tuple[int, int], ...] = field(default=())
    """Batch size and bytes, as they were read."""

    def at(self, batch_size: float) -> float:
        found = self.fixed_bytes + self.per_sample_bytes * batch_size
        return found if self.ceiling_bytes is None else min(found, self.ceiling_bytes)

    def reaches(self, limit_bytes: float) -> int | None:
        """The largest batch size below the limit; None if every one is, as far as this line goes."""
        if self.per_sample_bytes <= 0 or (self.ceiling_bytes is not None and self.ceiling_bytes <= limit_bytes):
            return None
        return max(0, int((limit_bytes - self.fixed_bytes) / self.per_sample_bytes))


def components(
    reading: Reading, other_batch: Reading, other_workers: Reading, *, dataset_scales: bool, workers_copy_dataset: bool
) -> tuple[Component, ...]:
    """``dataset_scales``: the dataset holds something for every sample; ``workers_copy_dataset``: and reading it copies
    it into each worker."""
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
    """Growth per sample or per worker; 0 where the two readings do not differ by more than noise."""
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
    """Part by part, from one configuration to the other."""
    return tuple(
        Change(name=name, what=what, before_bytes=before.parts[name], after_bytes=after.parts[name])
        for name, what in PARTS.items()
    )


def line(
    reading: Reading, other_batch: Reading, *, budget_bytes: int | None = None, builds_whole: bool = False
) -> Line:
    """Memory by batch size. With ``budget_bytes`` batches and workers never take more than that.

    ``builds_whole``: every worker holds the samples of a batch of its own until it has them all, as torch's do.
    """
    (low, low_bytes), (high, high_bytes) = sorted(
        ((reading.batch_size, reading.total_bytes), (other_batch.batch_size, other_batch.total_bytes))
    )
    slope = sum(_slope(name, reading, other_batch, by_batch=True) for name in _COUNTED)
    if builds_whole:
        slope += reading.workers * reading.parts["batch"] / reading.batch_size
    before = reading.total_bytes - reading.loader_bytes
    ceiling = None if budget_bytes is None else before + reading.parts["other"] + budget_bytes
    return Line(
        fixed_bytes=reading.total_bytes - slope * reading.batch_size,
        per_sample_bytes=slope,
        ceiling_bytes=None if ceiling is None else max(ceiling, low_bytes, high_bytes),
        measured=((low, low_bytes), (high, high_bytes)),
    )


def answer(parts: tuple[Component, ...], reading: Reading) -> str:
    """What a larger batch does to host memory, in a sentence."""
    growing = [part for part in parts if part.name in _COUNTED and part.per_sample_bytes]
    slope = sum(part.per_sample_bytes for part in growing)
    more_bytes = slope * reading.batch_size
    if not slope:
        return "A larger batch does not show in host memory here: nothing grew with it by more than readings differ."
    share = more_bytes / reading.total_bytes
    return (
        f"Doubling the batch to {2 * reading.batch_size} adds {format_bytes(more_bytes)} of host memory ({share:.0%}): "
        f"{format_bytes(slope)} a sample, in {', '.join(part.name for part in growing)}; the other "
        f"{format_bytes(reading.total_bytes - more_bytes)} do not depend on it."
    )
