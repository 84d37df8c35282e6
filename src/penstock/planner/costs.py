"""What a loader costs, out of short runs of it.

In:  runs, and the same runs played through in thought.
Out: ``LoaderCost`` of torch's loader and of ours.
Runs in: anywhere; pure.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.planner.profile import LoaderCost
from penstock.planner.simulate.penstock_pipeline import play_ours
from penstock.planner.simulate.pipeline import MOST_LAG, Load, Outcome, trainer_bytes
from penstock.planner.simulate.torch_pipeline import HEAP_BYTES, play_torch

_LEAST_POINTS, _MOST_POINTS = 6, 64
"""Fewer tell nothing, more nothing new."""
_LEAST_WORKER_BYTES = 2 << 20
_MOST_COPIES = 4.0
_LARGE_CREEP, _DOES_CREEP, _CREPT_APART = 0.75, 0.5, 0.45
"""In samples: what heaps of large samples are taken to gain with every batch (14 short runs with samples of 4 and 8 MiB
gained from a half to one; the middle is off by a quarter at the most); what a heap gains at the least, if it is one
that creeps; and where samples are kept apart, come and go one by one (told from one dataset of bench_planner's)."""
_LARGE_BYTES = 2 << 20
"""Of such samples, one short run does not tell whether heaps creep in the next training."""
NUMPY_RANDOM_BYTES = 3 << 20
"""What each of torch's workers takes to load numpy.random, in a process that has not loaded it, as penstock has."""
_REMEMBERED = 128
"""Tensors torch's workers keep small records of: as long as one lies between them, holes in the heap are not joined."""
_MOST_CROWDING = 0.5
_TELLING_BEYOND = 1
"""Fewer workers beyond the cores are no crowd."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a loader took for a moment, with a training loop that does nothing."""

    workers: int
    rows: int
    """Samples in a batch of this run."""
    batches: int
    seconds: float
    first_batch_s: float
    workers_cpu_s: float
    trainer_cpu_s: float
    deliver_s: float | None
    """Of that, what the training loop waited for a batch that was ready; None: all of it."""
    collate_s: float
    """Of the workers' time, what batches took beyond their samples, as far as the loader says."""
    shared_bytes: int
    """At the most: batches on their way."""
    own_bytes: int
    """At the most: growth of everybody's heaps."""
    heaps: tuple[tuple[int, int], ...] = ()
    """That growth, batch by batch."""

    @property
    def samples(self) -> int:
        return self.batches * self.rows


def their_cost(run: Run, many: Run | None, load: Load, prefetch_factor: int, *, tensors: int) -> LoaderCost:
    """torch's loader, of a run with as many workers as ``load`` says, for batches of its size, and one with ``many``.

    ``tensors``: how many there are in a batch. What the training process takes is taken from what is known of ours, and
    so is how workers crowd each other, if there was no run with many. The first run must be the first of a loader in
    its process.
    """
    ours, scale = load.profile.ours, load.batch_size / run.rows
    cost = LoaderCost(
        worker_bytes=0,
        sample_s=0.0,
        batch_s=_extra_s(run, load) * run.rows,
        trainer_s=run.trainer_cpu_s / run.batches,
        start_s=0.0,
        crowding=ours.crowding if many is None else _crowding(run, many),
    )
    ran = replace(load, batch_size=run.rows, profile=replace(load.profile, torchs=cost))
    thought = play_torch(ran, prefetch_factor, batches=0)
    own_bytes = run.own_bytes - thought.most_workers_bytes - trainer_bytes(load, ours)
    # They crept before the clock began, too: every worker built some batches ahead.
    built = run.batches + load.workers * prefetch_factor
    crept_bytes, creep_bytes = _creep_bytes(run, load)
    # No worker of theirs is leaner than one of ours.
    worker_bytes = max(ours.worker_bytes, (own_bytes - crept_bytes * built) / load.workers)
    if not load.profile.is_collated:
        creep_bytes = min(creep_bytes, max(0.0, (own_bytes - load.workers * worker_bytes) / built))
    return replace(
        cost,
        worker_bytes=int(worker_bytes) + NUMPY_RANDOM_BYTES,
        batch_s=cost.batch_s * scale,
        trainer_s=cost.trainer_s * scale,
        trainer_bytes=ours.trainer_bytes,
        start_s=max(0.0, run.first_batch_s - thought.first_batch_s) / load.workers,
        creep_bytes=int(creep_bytes),
        creep_batches=max(1, _REMEMBERED // max(1, tensors)),
        copies=_copies(run, thought),
    )


def our_cost(few: Run, many: Run, again: Run, load: Load) -> LoaderCost:
    """Ours, of a run with as many workers as ``load`` says, one with many, and one with few ``again``, or just more
    than the cores. Streams keep the workers they began with."""
    scale, is_whole = load.batch_size / few.rows, not load.profile.is_splittable
    # The first batches of a loader make pages that later ones use again: the cheapest run says what it will be.
    cheap = min((few, many, again), key=lambda run: run.workers_cpu_s / run.samples)
    # What collating a batch takes is not its samples'.
    collate_s = 0.0 if is_whole else min(cheap.collate_s / cheap.samples, _extra_s(cheap, load))
    extra_s = _extra_s(cheap, load) - collate_s
    if load.profile.has_collate and not is_whole:
        # Samples are written twice: where they wait, and into the batch by whoever makes it.
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
        crowding=_crowding(cheap, many) if many.workers > load.workers else 0.0,
    )
    ran = replace(load, batch_size=few.rows, profile=replace(load.profile, ours=cost))
    ran_many = replace(ran, workers=many.workers)
    thought, thought_many = play_ours(ran), play_ours(ran_many)
    own_bytes = few.own_bytes - thought.most_workers_bytes
    own_many_bytes = many.own_bytes - thought_many.most_workers_bytes
    worker_bytes, fixed_bytes = _line((load.workers, own_bytes), (many.workers, own_many_bytes))
    return replace(
        cost,
        worker_bytes=max(_LEAST_WORKER_BYTES, int(worker_bytes)),
        batch_s=cost.batch_s * scale,
        trainer_bytes=int(fixed_bytes),
        start_s=max(0.0, few.first_batch_s - thought.first_batch_s) / load.workers,
        copies=(_copies(few, thought) + _copies(many, thought_many)) / 2,
        lag=0.0 if is_whole else _lag(again if _keeps_busy(ran_many) else many, ran),
    )


def _creep_bytes(run: Run, load: Load) -> tuple[float, float]:
    """What a heap gained with every batch of a run, and what one gains as a rule.

    Mostly one sample: a batch's samples leave a hole when they go, the next one's do not quite fit into it, and one has
    to lie elsewhere. So it was for samples of 0.2 to 12 MB but for a few sizes, which hardly creep. Of small samples, a
    short run tells those. Of large ones, whether heaps creep also depends on how the training process's own heap
    happens to be when workers are forked, and the next process need not be as this one.
    """
    sample_bytes = load.profile.sample_bytes
    if load.profile.largest_bytes > HEAP_BYTES:
        return 0.0, 0.0
    if not load.profile.is_collated:
        return _CREPT_APART * sample_bytes, _CREPT_APART * sample_bytes
    usual_bytes = sample_bytes * (_LARGE_CREEP if sample_bytes >= _LARGE_BYTES else 1)
    if len(run.heaps) < _LEAST_POINTS:
        return usual_bytes, usual_bytes
    crept_bytes = min(sample_bytes, max(0.0, rise(run.heaps)))
    does_creep = sample_bytes >= _LARGE_BYTES or crept_bytes > _DOES_CREEP * sample_bytes
    return crept_bytes, usual_bytes if does_creep else 0.0


def _line(few: tuple[int, int], many: tuple[int, int]) -> tuple[float, float]:
    """Slope and height at none of a line through two points that begins at nothing or above."""
    steep = (many[1] - few[1]) / (many[0] - few[0]) if many[0] > few[0] else few[1] / few[0]
    at_none = few[1] - few[0] * steep
    if at_none >= 0:
        return steep, at_none
    return (few[0] * few[1] + many[0] * many[1]) / (few[0] ** 2 + many[0] ** 2), 0.0


def rise(points: Sequence[tuple[int, int]]) -> float:
    """How steeply they rise from one to another, in the median of all pairs: some that lie far off change nothing."""
    some = points[:: -(-len(points) // _MOST_POINTS)]
    return statistics.median(
        (up - low) / (right - left) for (left, low), (right, up) in itertools.combinations(some, 2)
    )


def _extra_s(run: Run, load: Load) -> float:
    """Processor time of a worker for a sample, beyond the dataset's own. Batches workers were ahead by when the clock
    began and when it ended even out."""
    return max(0.0, run.workers_cpu_s / run.samples - load.profile.cpu_s)


def _copies(run: Run, thought: Outcome) -> float:
    if not thought.most_batches_bytes:
        return 1.0
    return min(_MOST_COPIES, max(1.0, run.shared_bytes / thought.most_batches_bytes))


def _crowding(alone: Run, many: Run) -> float:
    """How much longer work takes in a crowd. By processor time: rates would tell of other programs, too."""
    alone_s = alone.workers_cpu_s / alone.samples
    return min(_MOST_CROWDING, max(0.0, many.workers_cpu_s / many.samples / alone_s - 1)) if alone_s else 0.0


def _keeps_busy(load: Load) -> bool:
    """Whether so many workers have work for all cores: how long one of their samples takes makes no difference then."""
    profile, extra_s = load.profile, load.profile.ours.sample_s
    own_s = profile.wait_s + profile.cpu_s
    return load.workers * (profile.cpu_s + extra_s) >= load.cores * (own_s + extra_s)


def _lag(run: Run, load: Load) -> float:
    """How much longer a sample takes than cores that are shared evenly explain, for every worker that is more than they
    are, as a share of its own time: an operating system lets some wait at one core while another has nothing to do."""
    load = replace(load, workers=run.workers)
    own_s, beyond = load.profile.wait_s + load.profile.cpu_s, load.workers_beyond_cores
    if beyond < _TELLING_BEYOND or not own_s:
        return 0.0
    longer_s = run.workers * (run.seconds / run.samples - 1 / play_ours(load).samples_per_s)
    return min(MOST_LAG, max(0.0, longer_s / own_s)) / beyond
