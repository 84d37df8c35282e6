"""The number of workers that a loader starts with if ``num_workers="auto"`` leaves the number to penstock.

In:  a dataset and the arguments of its loader.
Out: ``FirstWorkers``: a number of workers, and the plan that gives this number.
Runs in: trainer, and a child process that the trainer starts and ends.

The plan comes from a short probe of some samples. A separate process reads the samples, so that random numbers, open
files and anything that the dataset counts stay unchanged in the trainer. An error in that process does not prevent the
loader from being made: the loader gets one worker for each core, and raises the error when it is iterated.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import IterableDataset

from penstock.lab.dataset.sample_probe import ProbeResult, probe
from penstock.lab.planning import find_facts
from penstock.loader.rules import LoaderRules
from penstock.planner.choices import worker_counts
from penstock.planner.plans import Facts, Plan, make_plans
from penstock.planner.profile import OURS_USUAL, Profile
from penstock.workers.setup import can_split

_PROBE_S, _WITHIN_S = 1.0, 4.0
"""How long the probe reads samples, and how long it may take before it is ended without a result."""
_MOST_WORKERS = 32
"""The most workers that a loader starts with, however many cores there are: a worker takes memory from its start."""
_USUAL_ROWS = 32
_COPIED_BYTES_PER_S = 4e9
"""The rate at which a worker writes into a batch."""


@dataclass(frozen=True, kw_only=True)
class LoaderRequest:
    """The arguments of the loader that decide the number of workers."""

    dataset: Any
    batch_size: int | None
    """The number of samples in a batch; None if the batch sampler decides, or if samples are not batched."""
    batch_sampler: Any
    """The sampler of batches; None if samples are not batched."""
    collate_fn: Callable[[Any], Any] | None
    """The user's own collate function; None for torch's."""
    memory_bytes: int
    """The memory budget of the loader."""
    binds_workers: bool
    """Whether a batch depends on the worker that makes it, as with seeding="worker"."""
    has_threads: bool
    """Whether the workers are threads."""

    @property
    def rows(self) -> int:
        if self.batch_sampler is None:
            return 1
        rows = self.batch_size or getattr(self.batch_sampler, "batch_size", None)
        return rows if isinstance(rows, int) and rows > 0 else _USUAL_ROWS

    def collate(self, samples: list[Any]) -> Any:
        if self.collate_fn is None:
            # Workers write rows directly into the batch, so that no samples have to be collated.
            return None
        return self.collate_fn(samples[0] if self.batch_sampler is None else samples)


@dataclass(frozen=True, kw_only=True)
class FirstWorkers:
    """The number of workers that a loader starts with."""

    workers: int
    """The number of workers; 0 only if no worker can be started."""
    plan: Plan | None = None
    """The plan with its predictions; None if nothing was measured."""


def first_workers(request: LoaderRequest) -> FirstWorkers:
    """The number of workers for this loader on this machine."""
    process = multiprocessing.current_process()
    if process.daemon and not request.has_threads:
        # A daemonic process, such as a worker of another loader, may not start workers of its own.
        return FirstWorkers(workers=0)
    if isinstance(request.dataset, IterableDataset) or getattr(process, "_inheriting", False):
        # If a stream does not ask for the worker's number, each of several workers would deliver the whole stream. And
        # a process that is just starting imports the user's program again: a loader that is made during this import is
        # not used.
        return FirstWorkers(workers=1)
    facts = find_facts()
    if request.binds_workers:
        # A measured number of workers could differ between runs, and so would the batches.
        return _one_per_core(facts)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
            probed = probe(
                request.dataset, request.rows, request.collate, seconds=_PROBE_S, within_s=_WITHIN_S,
                on_progress=lambda done: None, tries_threads=request.has_threads,
            )  # fmt: skip
    except Exception:
        return _one_per_core(facts)
    plan = _plan(request, facts, probed)
    # A loader needs no more workers than the dataset has samples.
    return FirstWorkers(workers=max(1, min(plan.workers, len(request.dataset))), plan=plan)


def _one_per_core(facts: Facts) -> FirstWorkers:
    return FirstWorkers(workers=max(1, min(_MOST_WORKERS, int(facts.cores))))


def _plan(request: LoaderRequest, facts: Facts, probed: ProbeResult) -> Plan:
    if request.has_threads and probed.holds_gil:
        facts = replace(facts, cores=min(1.0, facts.cores))
    known = Profile(
        name=type(request.dataset).__name__,
        length=None,
        samples=probed.samples,
        is_splittable=request.batch_sampler is not None and can_split(request.dataset),
        has_collate=request.collate_fn is not None,
    )
    copying_s = known.sample_bytes / _COPIED_BYTES_PER_S
    usual = OURS_USUAL
    cost = replace(usual, sample_s=usual.sample_s + copying_s, batch_s=usual.batch_s + probed.collate_s)
    known = replace(known, ours=cost)
    most = min(_MOST_WORKERS, worker_counts(known, facts.cores)[-1])
    table = make_plans(
        known, facts, request.rows, rules=LoaderRules(), budget_bytes=request.memory_bytes, most_workers=most
    )
    return table.recommended
