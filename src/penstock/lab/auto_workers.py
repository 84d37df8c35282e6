"""The number of workers that a loader starts with if ``num_workers="auto"``.

In:  a dataset, what its loader was given.
Out: a ``Beginning``: a number of workers, and the plan it is from.
Runs in: trainer, and a child it starts and ends.

The number comes from a plan, for which some samples are read. A separate process reads them, so that random numbers,
open files and counters of the dataset stay unchanged. If reading fails, the loader gets one worker per core, and raises
the error when it is iterated.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import IterableDataset

from penstock.lab.dataset.sample_probe import Seen, look
from penstock.lab.planning import find_facts
from penstock.loader.rules import LoaderRules
from penstock.planner.choices import worker_counts
from penstock.planner.plans import Facts, Plan, make_plans
from penstock.planner.profile import OURS_USUAL, Profile
from penstock.workers.setup import can_split

_LOOK_S, _WITHIN_S = 1.0, 4.0
"""How long samples are read, and the time limit after which reading is given up."""
_MOST_WORKERS = 32
"""The most workers to start with, on any number of cores: each takes memory before it has shown its use."""
_USUAL_ROWS = 32
_COPIED_BYTES_PER_S = 4e9
"""The bytes that a worker writes into a batch."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The arguments of the loader that matter here."""

    dataset: Any
    batch_size: int | None
    """Samples in a batch; None: the batch sampler decides, or samples are not batched."""
    batch_sampler: Any
    """None: samples are not batched."""
    collate_fn: Callable[[Any], Any] | None
    """The user's own; None: torch's."""
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
            # Each row is written to its place as soon as it is fetched.
            return None
        return self.collate_fn(samples[0] if self.batch_sampler is None else samples)


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What a loader begins with."""

    workers: int
    """0 only where no worker can be started."""
    plan: Plan | None = None
    """What was predicted; None: nothing was measured."""


def first_workers(wanted: Wanted) -> Beginning:
    """For this machine."""
    process = multiprocessing.current_process()
    if process.daemon and not wanted.has_threads:
        # This process is a worker itself, and workers may not start workers.
        return Beginning(workers=0)
    if isinstance(wanted.dataset, IterableDataset) or getattr(process, "_inheriting", False):
        # If a stream does not ask which worker reads it, every worker would deliver all of it. Also, a spawned process
        # runs the user's program again up to its main part, and does not use the loader that it creates there.
        return Beginning(workers=1)
    facts = find_facts()
    if wanted.binds_workers:
        # The same number in every run, or no run could be repeated.
        return _one_a_core(facts)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
            seen = look(
                wanted.dataset, wanted.rows, wanted.collate, seconds=_LOOK_S, within_s=_WITHIN_S,
                on_progress=lambda done: None, tries_threads=wanted.has_threads,
            )  # fmt: skip
    except Exception:
        return _one_a_core(facts)
    plan = _planned(wanted, facts, seen)
    # A worker without a sample has nothing to do.
    return Beginning(workers=max(1, min(plan.workers, len(wanted.dataset))), plan=plan)


def _one_a_core(facts: Facts) -> Beginning:
    return Beginning(workers=max(1, min(_MOST_WORKERS, int(facts.cores))))


def _planned(wanted: Wanted, facts: Facts, seen: Seen) -> Plan:
    if wanted.has_threads and seen.holds_gil:
        facts = replace(facts, cores=min(1.0, facts.cores))
    known = Profile(
        name=type(wanted.dataset).__name__,
        length=None,
        samples=seen.samples,
        is_splittable=wanted.batch_sampler is not None and can_split(wanted.dataset),
        has_collate=wanted.collate_fn is not None,
    )
    copying_s = known.sample_bytes / _COPIED_BYTES_PER_S
    usual = OURS_USUAL
    cost = replace(usual, sample_s=usual.sample_s + copying_s, batch_s=usual.batch_s + seen.collate_s)
    known = replace(known, ours=cost)
    most = min(_MOST_WORKERS, worker_counts(known, facts.cores)[-1])
    table = make_plans(
        known, facts, wanted.rows, rules=LoaderRules(), budget_bytes=wanted.memory_bytes, most_workers=most
    )
    return table.recommended
