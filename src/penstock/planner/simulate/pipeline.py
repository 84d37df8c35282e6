"""A loader at work, in thought: what the two kinds have in common.

In:  a profile, a machine's cores, a batch size, how long a training step takes.
Out: ``Load`` to be played through, ``Outcome`` of it.
Runs in: anywhere; pure.

What a loader holds is added up as it comes and goes, and the training loop takes batches as a ``for`` loop does: it
holds each until it has the next.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.planner.profile import LoaderCost, Profile, Sample
from penstock.planner.simulate.cores import Activity, Compute, Cores, Until, Wait

PIECES = 8
"""Pieces a batch is cut into at most."""
_STARTING_BYTES, _INDEX_BYTES = 3 << 19, 45
"""What a training process takes at the least, for starting workers and for every index of a shuffled order, which torch
makes whole. One that has loaded before, as one that profiles has, finds room for some of it."""
_LEAST_BATCHES, _MOST_BATCHES = 30, 240
MOST_LAG = 0.5
"""Of a sample's own time: what takes longer still is not the crowd."""
_MOST_DRAWN = 256
"""Rows of a batch that are drawn; the rest are like them."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is loaded, and for whom."""

    profile: Profile
    cores: float
    """Cores this training may use."""
    batch_size: int
    workers: int
    step_s: float = 0.0
    """How long the training loop is busy with a batch; 0 if it only takes them."""
    hit_rate: float = 0.0
    """Share of samples that come out of a cache at once."""

    @property
    def workers_beyond_cores(self) -> float:
        return max(0.0, self.workers - max(1.0, self.cores))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of it."""

    samples_per_s: float
    first_batch_s: float
    growth_bytes: int
    """Most memory the loader takes, workers included, beyond what the process had before."""
    batches_bytes: int
    """Of that, batches: being built, ready and held."""
    workers_bytes: int
    """And what workers have to themselves."""
    most_batches_bytes: int
    """The most that batches take at any time; the rest may be at its least then."""
    most_workers_bytes: int
    """The most that workers do."""
    wait_fraction: float
    """Share of the training loop's time spent waiting for data."""


class Gauge:
    """Bytes now, and at the most."""

    def __init__(self) -> None:
        self._batches = self._private = 0.0
        self.most_batches = self.most_private = 0.0
        """At the moment when the sum was largest."""
        self.peak_batches = self.peak_private = 0.0
        """Each at its own."""

    def add(self, *, batches: float = 0.0, private: float = 0.0) -> None:
        self._batches += batches
        self._private += private
        self.peak_batches = max(self.peak_batches, self._batches)
        self.peak_private = max(self.peak_private, self._private)
        if self._batches + self._private > self.most_batches + self.most_private:
            self.most_batches, self.most_private = self._batches, self._private

    def add_for_good(self, *, private: float) -> None:
        """What is there at the fullest besides, whenever that is."""
        self.most_private += private
        self.peak_private += private


class Piece(NamedTuple):
    """Some rows of a batch, added up."""

    rows: int
    size_bytes: int
    largest_bytes: int
    """Of one sample."""
    wait_s: float
    cpu_s: float


class Stream:
    """The samples of a run, drawn from those that were seen: the same ones every time."""

    def __init__(self, load: Load) -> None:
        self._chance = random.Random(0)
        self._load = load
        profile, missed = load.profile, 1 - load.hit_rate
        self._largest_bytes = profile.largest_bytes
        self._mean = profile.sample_bytes, missed * profile.wait_s, missed * profile.cpu_s

    def batch(self, rows_a_piece: int) -> list[Piece]:
        """One batch's samples, in pieces."""
        rows = self._load.batch_size
        return [self._piece(min(rows_a_piece, rows - at)) for at in range(0, rows, rows_a_piece)]

    def _piece(self, rows: int) -> Piece:
        # Drawn one by one, the rows of a large batch would take longer than loading it.
        count = min(rows, max(1, _MOST_DRAWN * rows // self._load.batch_size))
        drawn = [self._one() for _ in range(count)]
        sums: tuple[float, ...] = (
            sum(sample.size_bytes for sample in drawn),
            sum(sample.wait_s for sample in drawn),
            sum(sample.cpu_s for sample in drawn),
        )
        if count < rows:
            # The rest is as those seen are on the whole, and differs from it as the sum of so many does.
            scale = (rows / count) ** 0.5
            sums = tuple(
                rows * mean + scale * (total - count * mean) for total, mean in zip(sums, self._mean, strict=True)
            )
        size_bytes, wait_s, cpu_s = sums
        return Piece(
            rows=rows,
            size_bytes=int(size_bytes),
            largest_bytes=max(sample.size_bytes for sample in drawn) if count == rows else self._largest_bytes,
            wait_s=wait_s,
            cpu_s=cpu_s,
        )

    def _one(self) -> Sample:
        sample = self._load.profile.samples[self._chance.randrange(len(self._load.profile.samples))]
        is_hit = self._load.hit_rate and self._chance.random() < self._load.hit_rate
        return replace(sample, wait_s=0.0, cpu_s=0.0) if is_hit else sample


class Trainer:
    """The training loop, and the clock that is held to it."""

    def __init__(self, load: Load, cost: LoaderCost, cores: Cores, *, ahead: int, at_a_time: int = 1) -> None:
        """``ahead``: batches there may be ahead of it, or being built; a run is long enough to turn them over a few
        times. ``at_a_time``: how many come together."""
        self._load, self._cost, self._cores = load, cost, cores
        self._at_a_time = at_a_time
        self.batches = max(_LEAST_BATCHES, 3 * at_a_time, min(_MOST_BATCHES, 6 * ahead + 12))
        self._taken_s: list[float] = []
        self._waited_s: list[float] = []

    @property
    def is_done(self) -> bool:
        return len(self._taken_s) >= self.batches

    def steps(self, is_ready: Callable[[int], bool], take: Callable[[int], None]) -> Activity:
        """``is_ready``: whether batch n is; ``take`` is told when it is taken, and the one before let go."""
        for number in range(self.batches):
            asked_s = self._cores.now_s
            yield Until(lambda number=number: is_ready(number))
            yield Compute(self._cost.trainer_s)
            take(number)
            self._taken_s.append(self._cores.now_s)
            self._waited_s.append(self._cores.now_s - asked_s)
            yield Wait(self._load.step_s)

    def outcome(self, gauge: Gauge) -> Outcome:
        # The first third fills what is ahead and starts workers: it is no measure of what follows.
        turn = self._at_a_time
        count = max(1, (len(self._taken_s) - 1) * 2 // 3 // turn * turn)
        first = len(self._taken_s) - 1 - count
        spent_s = self._taken_s[-1] - self._taken_s[first]
        return Outcome(
            samples_per_s=count * self._load.batch_size / spent_s if spent_s > 0 else float("inf"),
            first_batch_s=self._taken_s[0],
            growth_bytes=int(gauge.most_batches + gauge.most_private) + trainer_bytes(self._load, self._cost),
            batches_bytes=int(gauge.most_batches),
            workers_bytes=int(gauge.most_private),
            most_batches_bytes=int(gauge.peak_batches),
            most_workers_bytes=int(gauge.peak_private),
            wait_fraction=sum(self._waited_s[first + 1 :]) / spent_s if spent_s > 0 else 0.0,
        )


def trainer_bytes(load: Load, cost: LoaderCost) -> int:
    """What the loader takes in a training process that has not loaded before."""
    least_bytes = _STARTING_BYTES * bool(load.workers) + _INDEX_BYTES * (load.profile.length or 0)
    return max(least_bytes, cost.trainer_bytes)


def fetch(piece: Piece, cost: LoaderCost) -> Activity:
    """What a worker does for a few samples."""
    if piece.wait_s:
        yield Wait(piece.wait_s)
    yield Compute(piece.cpu_s + piece.rows * cost.sample_s)
