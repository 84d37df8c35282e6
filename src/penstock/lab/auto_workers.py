"""The number of workers a loader starts with where ``num_workers="auto"`` leaves that to penstock.

In:  a dataset and the arguments of its loader.
Out: ``FirstWorkers``: a number of workers, and the plan it comes from.
Runs in: trainer, and a child it starts and ends.

The plan comes from a short probe of some samples. A process of its own reads them, so that random numbers, open files
and anything the dataset counts stay unchanged in the trainer. An error in that process does not prevent the loader from
being made: the loader gets one worker for each core, and raises the error when it is iterated.
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
"""How long the probe reads samples, and after how long it is ended without a result."""
_MOST_WORKERS = 32
"""A loader never starts with more, however many cores there are: each takes memory before it has proved useful."""
_USUAL_ROWS = 32
_COPIED_BYTES_PER_S = 4e9
"""The rate at which a worker writes into a batch."""


@dataclass(frozen=True, kw_only=True)
class LoaderRequest:
    """The arguments of the loader that decide the number of workers."""

    dataset: Any
    batch_size: int | None
    """Samples in a batch; None: the batch sampler decides, or samples are not batched."""
    batch_sampler: Any
    """None: samples are not batched."""
    collate_fn: Callable[[Any], Any] | None
    """The user's own; None: torch's own."""
    memory_bytes: int
    """The loader's budget."""
    binds_workers: bool
    """Whether a batch depends on the worker it comes from, as with seeding="worker"."""
    has_threads: bool
    """Whether workers are threads."""

    @property
    def rows(self) -> int:
        if self.batch_sampler is None:
            return 1
        rows = self.batch_size or getattr(self.batch_sampler, "batch_size", None)
        return rows if isinstance(rows, int) and rows > 0 else _USUAL_ROWS

    def collate(self, samples: list[Any]) -> Any:
        if self.collate_fn is None:
            # Workers write rows straight into the batch: there is nothing left to collate.
            return None
        return self.collate_fn(samples[0] if self.batch_sampler is None else samples)


@dataclass(frozen=True, kw_only=True)
class FirstWorkers:
    """The workers a loader starts with."""

    workers: int
    """0 only where no worker can be started."""
    plan: Plan | None = None
    """The plan with its predictions; None: nothing was measured."""


def first_workers(request: LoaderRequest) -> FirstWorkers:
    """The workers for this loader on this machine."""
    process = multiprocessing.current_process()
    if process.daemon and not request.has_threads:
        # This is a daemonic process, such as a worker of another loader: it may not start workers of its own.
        return FirstWorkers(workers=0)
    if isinstance(request.dataset, IterableDataset) or getattr(process, "_inheriting", False):
        # Several workers of a stream that does not ask for the worker's number would each deliver all of it. And a
        # process that is just starting imports the user's program again: the loader made during that import is unused.
        return FirstWorkers(workers=1)
    facts = find_facts()
    if request.binds_workers:
        # A measured number could differ between runs, and the batches with it.
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
    # A worker without a sample has nothing to do.
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
