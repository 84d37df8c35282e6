"""The costs of a loader, from short runs of this loader.

In:  runs, and simulations of the same runs.
Out: ``LoaderCost`` of torch's loader and of penstock's.
Runs in: anywhere; pure.

A simulation that leaves out one cost shows the figure that the samples alone explain; the measured excess over this
figure is the cost of the loader.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.planner.profile import LoaderCost
from penstock.planner.simulate.penstock_pipeline import simulate_penstock
from penstock.planner.simulate.pipeline import Load, Simulation
from penstock.planner.simulate.torch_pipeline import simulate_torch

_LEAST_WORKER_BYTES = 2 << 20
_MOST_COPIES = 4.0
TORCHS_EXTRA_BYTES = 4_000_000
"""How much more memory a worker of torch's takes than a penstock worker for the same dataset: numpy.random, which
torch's worker imports, and torch's queues. Short runs over 5 datasets gave 3.9 to 8 MB, and 33 MB for samples of 8 MiB,
where heaps grew as well."""
_REMEMBERED = 128
"""The number of latest tensors of which torch's workers keep small records. Two holes in the heap cannot be joined
while such a record lies between them."""


@dataclass(frozen=True, kw_only=True)
class LoaderRun:
    """The measurements of a short run of a loader whose training loop does nothing."""

    rows: int
    """The number of samples in a batch of this run."""
    batches: int
    first_batch_s: float
    workers_cpu_s: float
    trainer_cpu_s: float
    deliver_s: float | None
    """The part of the trainer's time in which the training loop waited for a batch that was ready; None if all of it
    was."""
    collate_s: float
    """The part of the workers' time that went into batches rather than their samples, if the loader reports it."""
    shared_bytes: int
    """The most memory that batches in flight took."""
    own_bytes: int
    """The largest total growth of the heaps of the trainer and its workers."""

    @property
    def samples(self) -> int:
        return self.batches * self.rows


def torchs_cost(run: LoaderRun, load: Load, prefetch_factor: int, *, tensors: int) -> LoaderCost:
    """The cost of torch's loader, from a run with the workers of ``load``, for batches of the size of ``load``.

    ``tensors`` is the number of tensors in a batch. Memory outside batches is derived from the memory of penstock's
    loader, because one short run cannot separate a worker's own memory from a growing heap.
    """
    ours, scale = load.profile.ours, load.batch_size / run.rows
    cost = LoaderCost(
        worker_bytes=ours.worker_bytes + TORCHS_EXTRA_BYTES,
        sample_s=0.0,
        batch_s=_extra_s(run, load) * run.rows,
        trainer_s=run.trainer_cpu_s / run.batches,
        start_s=0.0,
        creep_batches=max(1, _REMEMBERED // max(1, tensors)),
        trainer_bytes=ours.trainer_bytes,
    )
    ran = replace(load, batch_size=run.rows, profile=replace(load.profile, torchs=cost))
    simulated = simulate_torch(ran, prefetch_factor, batches=0)
    return replace(
        cost,
        batch_s=cost.batch_s * scale,
        trainer_s=cost.trainer_s * scale,
        start_s=max(0.0, run.first_batch_s - simulated.first_batch_s) / load.workers,
        copies=_copies(run, simulated),
    )


def penstocks_cost(few: LoaderRun, many: LoaderRun, load: Load, many_workers: int) -> LoaderCost:
    """The cost of penstock's loader, from a run with the workers of ``load`` and a run with ``many_workers``. A stream
    keeps the number of workers that it began with."""
    scale, is_whole = load.batch_size / few.rows, not load.profile.is_splittable
    # The first batches of a loader create memory pages that later batches reuse, so the cheaper of the two runs shows
    # the lasting cost of a batch.
    cheap = min((few, many), key=lambda run: run.workers_cpu_s / run.samples)
    extra_s = _extra_s(cheap, load)
    collate_s = 0.0 if is_whole else min(cheap.collate_s / cheap.samples, extra_s)
    extra_s -= collate_s
    if load.profile.has_collate and not is_whole:
        # Samples are written twice: by the workers that fetch them, and by the worker that makes the batch.
        extra_s /= 2
        collate_s += extra_s
    deliver_s = cheap.trainer_cpu_s if cheap.deliver_s is None else min(cheap.deliver_s, cheap.trainer_cpu_s)
    cost = LoaderCost(
        worker_bytes=0,
        sample_s=0.0 if is_whole else extra_s,
        batch_s=(extra_s if is_whole else collate_s) * few.rows,
        trainer_s=deliver_s / cheap.batches,
        beside_s=(cheap.trainer_cpu_s - deliver_s) / cheap.batches,
        start_s=0.0,
    )
    ran = replace(load, batch_size=few.rows, profile=replace(load.profile, ours=cost))
    simulated, simulated_many = simulate_penstock(ran), simulate_penstock(replace(ran, workers=many_workers))
    worker_bytes, fixed_bytes = _slope_and_start(
        (load.workers, few.own_bytes - simulated.most_workers_bytes),
        (many_workers, many.own_bytes - simulated_many.most_workers_bytes),
    )
    return replace(
        cost,
        worker_bytes=max(_LEAST_WORKER_BYTES, int(worker_bytes)),
        batch_s=cost.batch_s * scale,
        trainer_bytes=int(fixed_bytes),
        start_s=max(0.0, few.first_batch_s - simulated.first_batch_s) / load.workers,
        copies=(_copies(few, simulated) + _copies(many, simulated_many)) / 2,
    )


def _slope_and_start(few: tuple[int, int], many: tuple[int, int]) -> tuple[float, float]:
    """The slope and the start of a line through two points. If the line would start below 0, the nearest line that does
    not start below 0 is taken."""
    slope = (many[1] - few[1]) / (many[0] - few[0]) if many[0] > few[0] else few[1] / few[0]
    start = few[1] - few[0] * slope
    if start >= 0:
        return slope, start
    return (few[0] * few[1] + many[0] * many[1]) / (few[0] ** 2 + many[0] ** 2), 0.0


def _extra_s(run: LoaderRun, load: Load) -> float:
    """The processor time that a worker takes for a sample beyond the dataset's own time. Batches that are ahead at the
    start of the measurement cancel out batches that are ahead at the end."""
    return max(0.0, run.workers_cpu_s / run.samples - load.profile.cpu_s)


def _copies(run: LoaderRun, simulated: Simulation) -> float:
    if not simulated.most_batches_bytes:
        return 1.0
    return min(_MOST_COPIES, max(1.0, run.shared_bytes / simulated.most_batches_bytes))
