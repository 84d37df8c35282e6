"""The parts that the simulations of both loaders share: the load, the samples, the training loop, the memory in use.

In:  a profile, a machine's cores, a batch size, the length of a training step, the loader's rules.
Out: ``Load``, which describes what to simulate, and ``Simulation``, which holds the result.
Runs in: anywhere; pure.

A simulation tracks the memory that a loader takes and releases. The simulated training loop takes batches as a ``for``
loop does: it holds each batch until it has the next one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from penstock.planner.profile import LoaderCost, Profile, SeenSample
from penstock.planner.simulate.cores import Activity, Compute, Cores, Until, Wait
from penstock.planner.simulate.rules import Rules

_STARTING_BYTES, _INDEX_BYTES = 3 << 19, 45
"""The least memory that a training process takes to start workers, and the memory for each index of a shuffled order,
because torch creates the whole order at once. A process that has already run a loader, such as a profiling process, can
reuse memory for a part of both."""
_LEAST_BATCHES, _MOST_BATCHES = 30, 240
_PLENTY = 1 << 40
"""The number of batches that memory has room for if nothing limits memory."""
_MOST_DRAWN = 256
"""The most rows of a batch that are drawn at random; the other rows have the mean size and take the mean time."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """A description of the loading: the dataset, the number of workers, the cores and the training loop."""

    profile: Profile
    rules: Rules
    """The rules of penstock's loader. A simulation of torch's loader takes only the size of a simulated step from these
    rules."""
    cores: float
    """The number of cores that this training may use."""
    batch_size: int
    workers: int
    step_s: float = 0.0
    """How long the training loop is busy with a batch; 0 if the loop only takes batches."""

    @property
    def batch_bytes(self) -> float:
        return self.profile.sample_bytes * self.batch_size

    @property
    def row_s(self) -> float:
        """The time that one of penstock's workers takes for a sample."""
        return max(self.profile.wait_s + self.profile.cpu_s + self.profile.ours.sample_s, 1e-9)

    @property
    def rows_per_task(self) -> int:
        """The number of rows of a batch that one of penstock's workers gets at a time."""
        return self.rules.rows_per_task(self.row_s, self.batch_size) if self.profile.is_splittable else self.batch_size

    @property
    def usual_depth(self) -> int:
        """The fewest batches ahead that keep penstock's workers busy."""
        return self.depth_within(0)

    def depth_within(self, room: float) -> int:
        """The number of batches ahead with which penstock's loader begins if its memory has room for ``room``
        batches."""
        cheap = self.rules.cheap_ahead(1, int(min(room, _PLENTY)), self.workers, per_worker=self._most_per_worker)
        return self.rules.depth(self.row_s, self.batch_size, self.workers, rows=self.rows_per_task, cheap=cheap)

    def most_ahead(self, room: float) -> int:
        """The most batches ahead that penstock's loader prepares if more batches ahead help."""
        return self.rules.most_ahead(1, int(min(room, _PLENTY)), self.workers, per_worker=self._most_per_worker)

    @property
    def _most_per_worker(self) -> int:
        if self.profile.has_collate:
            return self.rules.ahead_per_worker
        return 0 if self.profile.is_splittable else self.rules.bound_per_worker


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The result of simulating a loader."""

    samples_per_s: float
    first_batch_s: float
    growth_bytes: int
    """The most memory that the loader and its workers take beyond the memory of the process before."""
    batches_bytes: int
    """The part of ``growth_bytes`` in batches that are being built, ready or held."""
    workers_bytes: int
    """The part of ``growth_bytes`` in the workers' private memory."""
    most_batches_bytes: int
    """The most memory that batches take at any moment, whatever workers take at that moment."""
    most_workers_bytes: int
    """The most memory that workers take at any moment, whatever batches take at that moment."""
    wait_fraction: float
    """The share of the training loop's time spent waiting for data."""


class SimulatedMemory:
    """The bytes that are in use now, and their peak."""

    def __init__(self) -> None:
        self._batches = self._private = 0.0
        self.most_batches = self.most_private = 0.0
        """The memory of batches and of workers at the moment when their sum was largest."""
        self.peak_batches = self.peak_private = 0.0
        """The peak of batches and the peak of workers, which may be at different moments."""

    def add(self, *, batches: float = 0.0, private: float = 0.0) -> None:
        self._batches += batches
        self._private += private
        self.peak_batches = max(self.peak_batches, self._batches)
        self.peak_private = max(self.peak_private, self._private)
        if self._batches + self._private > self.most_batches + self.most_private:
            self.most_batches, self.most_private = self._batches, self._private


class Piece(NamedTuple):
    """The total size and time of some rows of a batch."""

    rows: int
    size_bytes: int
    largest_bytes: int
    """The bytes of the largest sample."""
    wait_s: float
    cpu_s: float


class Stream:
    """The samples of a run, drawn at random from the samples that were read. Every run draws the same samples."""

    def __init__(self, load: Load) -> None:
        self._chance, self._samples, self._profile = random.Random(0), load.profile.samples, load.profile
        self._rows = load.batch_size
        self._mean = SeenSample(
            size_bytes=int(load.profile.sample_bytes), wait_s=load.profile.wait_s, cpu_s=load.profile.cpu_s
        )

    def batch(self, rows_per_piece: int) -> list[Piece]:
        """The samples of one batch, in pieces."""
        return [self._piece(min(rows_per_piece, self._rows - at)) for at in range(0, self._rows, rows_per_piece)]

    def _piece(self, rows: int) -> Piece:
        # Only some rows are drawn, because drawing all rows of a large batch would take longer than loading the batch.
        count = min(rows, max(1, _MOST_DRAWN * rows // self._rows))
        drawn = [self._samples[self._chance.randrange(len(self._samples))] for _ in range(count)]
        rest, mean = rows - count, self._mean
        return Piece(
            rows=rows,
            size_bytes=sum(sample.size_bytes for sample in drawn) + rest * mean.size_bytes,
            largest_bytes=self._profile.largest_bytes if rest else max(sample.size_bytes for sample in drawn),
            wait_s=sum(sample.wait_s for sample in drawn) + rest * mean.wait_s,
            cpu_s=sum(sample.cpu_s for sample in drawn) + rest * mean.cpu_s,
        )


class Trainer:
    """The simulated training loop, and the times at which it got its batches."""

    def __init__(self, load: Load, cost: LoaderCost, cores: Cores, *, ahead: int, at_a_time: int = 1) -> None:
        """``ahead`` is the number of batches that may be ahead or being built; a run takes several times as many
        batches. ``at_a_time`` is the number of batches that become ready at the same time."""
        self._load, self._cost, self._cores = load, cost, cores
        self._at_a_time = at_a_time
        self.batches = max(_LEAST_BATCHES, 3 * at_a_time, min(_MOST_BATCHES, 6 * ahead + 12))
        self.asked: int | None = None
        """The number of the batch that the training loop waits for."""
        self._taken_s: list[float] = []
        self._waited_s: list[float] = []

    @property
    def is_done(self) -> bool:
        return len(self._taken_s) >= self.batches

    def steps(self, is_ready: Callable[[int], bool], take: Callable[[int], None]) -> Activity:
        """The steps of the training loop. ``is_ready`` returns whether batch n is ready. ``take`` is called when batch
        n is taken, which releases the batch before it."""
        for number in range(self.batches):
            asked_s = self._cores.now_s
            self.asked = number
            yield Until(lambda number=number: is_ready(number))
            self.asked = None
            yield Compute(self._cost.trainer_s)
            take(number)
            self._taken_s.append(self._cores.now_s)
            self._waited_s.append(self._cores.now_s - asked_s)
            yield Wait(self._load.step_s)

    def result(self, memory: SimulatedMemory) -> Simulation:
        # The first third of the run does not count, because workers start and batches ahead are filled in that time.
        count = max(1, (len(self._taken_s) - 1) * 2 // 3 // self._at_a_time * self._at_a_time)
        first = len(self._taken_s) - 1 - count
        spent_s = self._taken_s[-1] - self._taken_s[first]
        return Simulation(
            samples_per_s=count * self._load.batch_size / spent_s if spent_s > 0 else float("inf"),
            first_batch_s=self._taken_s[0],
            growth_bytes=int(memory.most_batches + memory.most_private) + trainer_bytes(self._load, self._cost),
            batches_bytes=int(memory.most_batches),
            workers_bytes=int(memory.most_private),
            most_batches_bytes=int(memory.peak_batches),
            most_workers_bytes=int(memory.peak_private),
            wait_fraction=sum(self._waited_s[first + 1 :]) / spent_s if spent_s > 0 else 0.0,
        )


def simulate_alone(load: Load) -> Simulation:
    """Simulate loading without workers, in the training loop itself. A batch and its samples exist at the same time
    while the batch is made."""
    cost, profile = load.profile.torchs, load.profile
    cpu_s = load.batch_size * (profile.cpu_s + cost.sample_s) + cost.batch_s + cost.trainer_s
    batch_s = load.batch_size * profile.wait_s + cpu_s / min(1.0, load.cores)
    batches_bytes = int(2 * cost.copies * load.batch_bytes)
    own_bytes = int(load.batch_bytes)
    return Simulation(
        samples_per_s=load.batch_size / max(1e-9, batch_s + load.step_s),
        first_batch_s=batch_s,
        growth_bytes=batches_bytes + own_bytes + trainer_bytes(load, cost),
        batches_bytes=batches_bytes,
        workers_bytes=own_bytes,
        most_batches_bytes=batches_bytes,
        most_workers_bytes=own_bytes,
        wait_fraction=batch_s / max(1e-9, batch_s + load.step_s),
    )


def trainer_bytes(load: Load, cost: LoaderCost) -> int:
    """The memory without batches that the loader takes in a training process which has not run a loader before."""
    least_bytes = _STARTING_BYTES * bool(load.workers) + _INDEX_BYTES * (load.profile.length or 0)
    return max(least_bytes, cost.trainer_bytes)


def fetch(piece: Piece, cost: LoaderCost) -> Activity:
    """The work of a worker for some samples."""
    if piece.wait_s:
        yield Wait(piece.wait_s)
    yield Compute(piece.cpu_s + piece.rows * cost.sample_s)
