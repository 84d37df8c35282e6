"""``penstock.plan``: a dataset is measured for a few seconds, and plans are made from the measurements.

In:  a dataset, a batch size, a budget, the length of a step.
Out: ``PlanTable``.
Runs in: trainer, and workers that the trainer starts and ends.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from penstock.environment import local_ranks
from penstock.errors import ConfigError, DataError
from penstock.lab.dataset.containers import find_containers
from penstock.lab.profile import profile
from penstock.loader.rules import LoaderRules
from penstock.meter import gpus, limits
from penstock.planner.plans import Facts, PlanTable, allowed_bytes, make_plans
from penstock.planner.profile import is_amount

_WARM_UP, _LEAST_STEPS, _MOST_STEPS = 2, 3, 50
_BATCHES = 2


def plan(
    dataset: Any,
    batch_size: int,
    memory: str | int | float = "auto",
    step_s: float | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    seconds: float = 9.0,
    *,
    name: str | None = None,
    on_progress: Callable[[str, float], None] = lambda what, done: None,
) -> PlanTable:
    """Settings for a dataset on this machine: five plans, one of which is recommended.

    Args:
        memory: the memory budget of one rank's loader, as in ``DataLoader(memory=...)``.
        step_s: how long the training is busy with a batch; without this time, plans are for loading as fast as
        possible. collate_fn: the collate function of the loader. seconds: how long to measure. on_progress: a function
        that gets the name of the current step and the share of the work that is done, 0 to 1.
    """
    _check_given(batch_size, step_s, collate_fn, seconds, name, on_progress)
    if not isinstance(dataset, IterableDataset):
        lacks = [name for name in ("__getitem__", "__len__") if not hasattr(type(dataset), name)]
        if lacks:
            raise ConfigError(
                f"{type(dataset).__name__} is not a dataset: it has no {' and no '.join(lacks)}; give an object "
                "with __getitem__ and __len__, or an IterableDataset"
            )
    # The facts are read before anything runs: later, the samples that were read would count as used memory.
    facts, rules = find_facts(), LoaderRules()
    budget_bytes = allowed_bytes(memory, facts.available_bytes, facts.ranks, rules)
    named = name or type(dataset).__name__
    measured = profile(
        dataset, batch_size, collate_fn=collate_fn, name=named, seconds=seconds, on_progress=on_progress
    )  # fmt: skip
    measured = replace(measured, containers_bytes=find_containers(dataset).per_worker_bytes)
    return make_plans(measured, facts, batch_size, rules=rules, budget_bytes=budget_bytes, step_s=step_s)


def _check_given(batch_size: Any, step_s: Any, collate_fn: Any, seconds: Any, name: Any, on_progress: Any) -> None:
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch_size={batch_size!r} is not a whole number of at least 1")
    if step_s is not None and not is_amount(step_s):
        raise ConfigError(f"step_s={step_s!r} is not a length of time; give seconds, or leave it out")
    if not (is_amount(seconds) and seconds):
        raise ConfigError(f"seconds={seconds!r} is not a length of time; give at least 1 second")
    if collate_fn is not None and not callable(collate_fn):
        raise ConfigError(f"collate_fn={collate_fn!r} cannot be called; give a function that makes a batch of samples")
    if not isinstance(name, str | None):
        raise ConfigError(f"name={name!r} is not a text; give the dataset's name, or leave it out")
    if not callable(on_progress):
        raise ConfigError(
            f"on_progress={on_progress!r} cannot be called; give a function that accepts a text and a share"
        )


def find_facts() -> Facts:
    """The cores and the memory of one rank on this machine."""
    here, ranks = limits(), local_ranks()
    sizes = [gpu.memory_total_bytes for gpu in gpus() if gpu.memory_total_bytes]
    return Facts(
        cores=here.cpu_usable / ranks,
        available_bytes=here.memory_available_bytes,
        gpu_bytes=min(sizes, default=None),
        ranks=ranks,
    )


def time_step(
    step: Callable[[Any], Any],
    dataset: Any,
    batch_size: int,
    *,
    collate_fn: Callable[[Any], Any] | None = None,
    seconds: float = 1.0,
    on_progress: Callable[[str, float], None] = lambda what, done: None,
) -> float:
    """The median time of ``step(batch)`` over a few real batches, after a warm-up.

    Call this function last: workers that are forked after a step on a GPU would inherit the GPU's context.
    """
    on_progress("reading batches", 0.0)
    batches = _some_batches(dataset, batch_size, collate_fn or default_collate, seconds)
    if not batches:
        raise DataError("the dataset delivered no batch with which to time a step")
    taken_s: list[float] = []
    began_s = time.perf_counter()
    for number in range(_WARM_UP + _MOST_STEPS):
        then_s = time.perf_counter()
        step(batches[number % len(batches)])
        # Work that a step queued on the GPU is part of the step's time. If CUDA was never used, no work is queued.
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now_s = time.perf_counter()
        if number >= _WARM_UP:
            taken_s.append(now_s - then_s)
        on_progress("timing a step", min(1.0, (now_s - began_s) / seconds))
        if len(taken_s) >= _LEAST_STEPS and now_s - began_s > seconds:
            break
    return sorted(taken_s)[len(taken_s) // 2]


def _some_batches(dataset: Any, batch_size: int, collate: Callable[[Any], Any], seconds: float) -> list[Any]:
    """Two batches. If samples take long, one batch repeats the few samples that were read in time: a step takes equally
    long with any batch of the same shape."""
    stream = iter(dataset) if isinstance(dataset, IterableDataset) else (dataset[at] for at in range(len(dataset)))
    samples: list[Any] = []
    began_s, is_late = time.perf_counter(), False
    for sample in itertools.islice(stream, _BATCHES * batch_size):
        samples.append(sample)
        is_late = time.perf_counter() - began_s > seconds
        if is_late:
            break
    if is_late:
        samples = list(itertools.islice(itertools.cycle(samples), batch_size))
    return [collate(samples[at : at + batch_size]) for at in range(0, len(samples), batch_size)]
