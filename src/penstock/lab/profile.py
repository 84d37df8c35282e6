"""A dataset's profile: short runs of it that say what a long one will take.

In:  a dataset, a batch size, a few seconds.
Out: ``Profile``.
Runs in: trainer, and workers it starts and ends.

First samples are read one by one, in a process of its own. Then torch's loader and ours run for a moment with two
workers and a training loop that does nothing: what they take beyond the samples' own is what loading costs here. Both
run with more workers than two besides, and ours with a few again: what grows with them is theirs, what does not is the
training process's, and how much more processor time a sample takes of many is how they crowd each other. The same runs
are played through in thought, and what they took more than there is a worker's own memory.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, default_collate

from penstock.lab.dataset.sample_probe import is_picklable, look
from penstock.lab.short_runs import ShortRuns
from penstock.loader.dataloader import DataLoader
from penstock.meter import headroom_bytes, limits
from penstock.planner.costs import Run, our_cost, their_cost
from penstock.planner.profile import Profile
from penstock.planner.simulate.pipeline import Load
from penstock.workers.setup import can_split

_FEW, _MANY = 2, 6
"""Workers of the runs. Ours changes from one number to the other while it runs, torch's begins anew."""
_PREFETCH = 2
_LOOK_SHARE, _THEIR_SHARE, _THEIR_MANY_SHARE, _OUR_SHARE = 0.22, 0.29, 0.10, 0.39
"""Of the time there is: samples, torch's loader with few workers and with many, ours with few, many and a few again."""
_FEW_SHARE, _SETTLE_SHARE, _MANY_SHARE, _AGAIN_SHARE = 0.15, 0.40, 0.25, 0.20
"""Of our loader's time. Many make pages at first that they use again later, which takes a while."""
_SOME_BATCHES, _MANY_BATCHES = 8, 24
_LEAST_BATCHES, _LATE = 12, 1.5
"""Batches that runs wait for at the least, two in each of their stretches, and how many times what is left of the time
that may take."""
_SLOW_BYTES_PER_S = 1e9


def profile(
    dataset: Any,
    batch_size: int,
    *,
    collate_fn: Callable[[Any], Any] | None = None,
    name: str = "the dataset",
    seconds: float = 9.0,
    on_progress: Callable[[str, float], None] = lambda what, done: None,
) -> Profile:
    """Spend about so many seconds on it; ``on_progress`` hears what is done and how much. Raises DataError.

    Where samples take so long that no loader can be run in that time, none is: they cost what is usual then.
    """
    collate, began_s = collate_fn or default_collate, time.monotonic()
    share_s = _LOOK_SHARE * seconds
    seen = look(
        dataset,
        batch_size,
        collate,
        seconds=share_s,
        least_s=seconds,
        on_progress=lambda done: on_progress("reading samples", _LOOK_SHARE * done),
    )
    cores = limits().cpu_usable
    is_iterable = isinstance(dataset, IterableDataset)
    known = Profile(
        name=name,
        length=None if is_iterable else len(dataset),
        samples=seen.samples,
        is_splittable=not is_iterable and can_split(dataset),
        has_collate=collate_fn is not None,
        is_collated=seen.is_collated,
        is_picklable=is_picklable(dataset),
        holds_gil=seen.holds_gil,
        is_repeated=seen.is_repeated,
    )
    run_s = _THEIR_SHARE * seconds
    # Of torch's, many small batches: what its workers' heaps gain with each is seen over many only.
    their_rows = _rows_for(known, batch_size, run_s, _MANY_BATCHES)
    our_rows = _rows_for(known, batch_size, run_s, _SOME_BATCHES)
    least_s = _LEAST_BATCHES * max(their_rows, our_rows) * (known.wait_s + known.cpu_s)
    if least_s > _LATE * max(run_s, seconds - (time.monotonic() - began_s)):
        # Beside what such samples take, what a loader does hardly counts.
        on_progress("done", 1.0)
        return replace(known, has_runs=False)
    given = {"collate_fn": collate_fn, "persistent_workers": True}
    if not is_iterable:
        given |= {"shuffle": True, "drop_last": len(dataset) >= batch_size}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
        on_progress("torch's DataLoader", _LOOK_SHARE)
        theirs = _run_torchs(dataset, their_rows, _FEW, given, run_s)
        their_many = None
        if _fits_torchs(_MANY, their_rows * known.sample_bytes):
            their_many = _run_torchs(dataset, their_rows, _MANY, given, _THEIR_MANY_SHARE * seconds)
        on_progress("penstock's DataLoader", 1 - _OUR_SHARE)
        our_s = _OUR_SHARE * seconds
        with DataLoader(dataset, our_rows, num_workers=_FEW, **given) as loader, ShortRuns(loader) as runs:
            few = runs.go(_FEW_SHARE * our_s)
            loader.resize(workers=_MANY)
            runs.go(_SETTLE_SHARE * our_s)
            many = runs.go(_MANY_SHARE * our_s)
            shared_batches = loader.stats().shared_batches
            loader.resize(workers=_workers_again(cores))
            again = runs.go(_AGAIN_SHARE * our_s)
    known = replace(known, is_splittable=known.is_splittable and shared_batches)
    load = Load(profile=known, cores=cores, batch_size=batch_size, workers=_FEW)
    known = replace(known, ours=our_cost(few, many, again, load))
    torchs = their_cost(theirs, their_many, replace(load, profile=known), _PREFETCH, tensors=seen.tensors)
    known = replace(known, torchs=torchs)
    on_progress("done", 1.0)
    return known


def _workers_again(cores: float) -> int:
    """Workers of the last run: one more than the cores, if many are more still. Where many keep all cores busy, only as
    few as these show how long a worker waits for a core."""
    beyond = math.ceil(cores) + 1
    return beyond if _FEW < beyond < _MANY else _FEW


def _fits_torchs(workers: int, batch_bytes: float) -> bool:
    """Whether there is room for what torch's loader takes with so many workers, and as much again."""
    here = limits()
    shm_bytes = math.inf if here.shm_size_bytes is None else here.shm_size_bytes - (here.shm_used_bytes or 0)
    sent_bytes = workers * _PREFETCH * batch_bytes
    return 2 * sent_bytes < shm_bytes and 2 * (sent_bytes + workers * batch_bytes) < headroom_bytes()


def _run_torchs(dataset: Any, rows: int, workers: int, given: dict[str, Any], seconds: float) -> Run:
    loader = TorchDataLoader(dataset, rows, num_workers=workers, prefetch_factor=_PREFETCH, **given)
    with ShortRuns(loader) as runs:
        # Workers that persist go with the last one who has it.
        del loader
        return runs.go(seconds)


def _rows_for(known: Profile, batch_size: int, run_s: float, batches: int) -> int:
    """How many samples to a batch, so that there are about so many batches in the time there is."""
    sample_s = known.wait_s + known.cpu_s + known.sample_bytes / _SLOW_BYTES_PER_S
    rows = max(2, min(batch_size, int(_FEW * run_s / sample_s / batches)))
    return min(rows, batch_size) if known.length is None else max(1, min(rows, batch_size, known.length // (2 * _FEW)))
