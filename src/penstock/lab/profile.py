"""A dataset's profile: measurements of short runs, from which the planner predicts a long run.

In:  a dataset, a batch size, a few seconds.
Out: ``Profile``.
Runs in: trainer, and workers that the trainer starts and ends.

First the probe reads samples one by one in a process of its own. Then torch's loader and penstock's run for a moment
with two workers and an empty training loop; the time that a loader takes beyond the time of its samples is its cost on
this machine. penstock's loader also runs with more workers: the memory that grows with the number of workers belongs to
the workers, and the rest belongs to the training process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, default_collate

from penstock.lab.dataset.sample_probe import is_picklable, probe
from penstock.lab.timed_run import TimedRun, without_warnings
from penstock.loader.dataloader import DataLoader
from penstock.loader.gauges import workers_now
from penstock.loader.rules import LoaderRules
from penstock.loader.stats import StageTimes
from penstock.meter import TreeParts, limits, tree_parts
from penstock.planner.costs import LoaderRun, penstocks_cost, torchs_cost
from penstock.planner.profile import Profile
from penstock.planner.simulate.pipeline import Load
from penstock.workers.setup import can_split

_FEW, _MANY = 2, 6
"""The numbers of workers of the runs. penstock's loader changes from the first number to the second while it runs."""
_PREFETCH = 2
_PROBE_SHARE, _TORCHS_SHARE, _FEW_SHARE, _SETTLE_SHARE, _MANY_SHARE = 0.22, 0.29, 0.08, 0.16, 0.10
"""Shares of the time: for reading samples, for torch's loader, for penstock's loader with few workers, for a pause in
which many workers create the pages that they reuse later, and for penstock's loader with many workers. The rest is a
reserve."""
_SOME_BATCHES, _MANY_BATCHES = 8, 24
_LEAST_BATCHES, _LATE = 12, 1.5
"""The fewest batches of a run, and how many times the remaining time these batches may take."""
_SLOW_BYTES_PER_S = 1e9
_WARM_SHARE, _MOST_WARM_SHARE = 0.2, 0.6
"""The share of a run that passes before the measurement starts, and the largest share that may pass while workers are
still starting."""


def profile(
    dataset: Any,
    batch_size: int,
    *,
    collate_fn: Callable[[Any], Any] | None = None,
    name: str = "the dataset",
    seconds: float = 9.0,
    on_progress: Callable[[str, float], None] = lambda what, done: None,
) -> Profile:
    """Measure a dataset for at most about ``seconds``. ``on_progress`` gets the current step and the share of the work
    that is done. Raises DataError.

    If samples take so long that no loader can run in that time, the usual costs of the loaders replace measured costs.
    """
    began_s, is_iterable = time.monotonic(), isinstance(dataset, IterableDataset)
    probed = probe(
        dataset,
        batch_size,
        collate_fn or default_collate,
        seconds=_PROBE_SHARE * seconds,
        least_s=seconds,
        on_progress=lambda done: on_progress("reading samples", _PROBE_SHARE * done),
    )
    known = Profile(
        name=name,
        length=None if is_iterable else len(dataset),
        samples=probed.samples,
        is_splittable=not is_iterable and can_split(dataset),
        has_collate=collate_fn is not None,
        is_collated=probed.is_collated,
        is_picklable=is_picklable(dataset),
        holds_gil=probed.holds_gil,
        is_repeated=probed.is_repeated,
    )
    run_s = _TORCHS_SHARE * seconds
    torchs_rows = _rows_for(known, batch_size, run_s, _MANY_BATCHES)
    our_rows = _rows_for(known, batch_size, run_s, _SOME_BATCHES)
    least_s = _LEAST_BATCHES * max(torchs_rows, our_rows) * (known.wait_s + known.cpu_s)
    if least_s > _LATE * max(run_s, seconds - (time.monotonic() - began_s)):
        # Compared with samples that take so long, the loader's own work is negligible.
        on_progress("done", 1.0)
        return replace(known, has_runs=False)
    given: dict[str, Any] = {"num_workers": _FEW, "collate_fn": collate_fn, "persistent_workers": True}
    if not is_iterable:
        given |= {"shuffle": True, "drop_last": len(dataset) >= batch_size}
    with without_warnings():
        on_progress("torch's DataLoader", _PROBE_SHARE)
        with _LoaderRuns(TorchDataLoader(dataset, torchs_rows, prefetch_factor=_PREFETCH, **given)) as runs:
            torchs = runs.run(run_s)
        on_progress("penstock's DataLoader", _PROBE_SHARE + _TORCHS_SHARE)
        with DataLoader(dataset, our_rows, **given) as loader, _LoaderRuns(loader) as runs:
            few = runs.run(_FEW_SHARE * seconds)
            loader.resize(workers=_MANY)
            runs.run(_SETTLE_SHARE * seconds)
            many, stats = runs.run(_MANY_SHARE * seconds), loader.stats()
    known = replace(known, is_splittable=known.is_splittable and stats.shared_batches)
    load = Load(profile=known, rules=LoaderRules(), cores=limits().cpu_usable, batch_size=batch_size, workers=_FEW)
    known = replace(known, ours=penstocks_cost(few, many, load, stats.workers))
    load = replace(load, profile=known)
    on_progress("done", 1.0)
    return replace(known, torchs=torchs_cost(torchs, load, _PREFETCH, tensors=probed.tensors))


def _rows_for(known: Profile, batch_size: int, run_s: float, batches: int) -> int:
    """The number of samples in a batch with which about ``batches`` batches can be loaded in ``run_s``."""
    sample_s = known.wait_s + known.cpu_s + known.sample_bytes / _SLOW_BYTES_PER_S
    rows = max(2, min(batch_size, int(_FEW * run_s / sample_s / batches)))
    return min(rows, batch_size) if known.length is None else max(1, min(rows, batch_size, known.length // (2 * _FEW)))


class _LoaderRuns(TimedRun[TreeParts | None]):
    """Runs of one loader that measure processor time, memory and the time of the first batch."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader, tree_parts, measures=["shared_bytes", "heap_bytes"], every_s=0.03)
        self._ours = loader if isinstance(loader, DataLoader) else None
        self._rows = loader.batch_size or 1

    def run(self, seconds: float) -> LoaderRun:
        """Take batches for about ``seconds``. The measurement starts when all workers run, because starting a worker
        takes as much processor time as many samples do."""
        self.watch.forget_peaks()
        warm = self.measure(
            lambda timing: (
                timing.elapsed_s < _WARM_SHARE * seconds
                or (timing.elapsed_s < _MOST_WARM_SHARE * seconds and not self._are_all_at_work())
            )
        )
        before_s, trainer_s, before = _workers_cpu_s(), self._trainer_cpu_s(), self._stages()
        timing = self.measure(lambda timing: timing.elapsed_s < (1 - _WARM_SHARE) * seconds)
        after = self._stages()
        return LoaderRun(
            rows=self._rows,
            batches=timing.batches,
            first_batch_s=warm.first_batch_s,
            workers_cpu_s=sum(cpu_s - before_s.get(pid, 0.0) for pid, cpu_s in _workers_cpu_s().items()),
            trainer_cpu_s=max(0.0, self._trainer_cpu_s() - trainer_s),
            deliver_s=after.deliver_s - before.deliver_s if before and after else None,
            collate_s=after.collate_s - before.collate_s if before and after else 0.0,
            shared_bytes=self.watch.peak_growth("shared_bytes") or 0,
            own_bytes=self.watch.peak_growth("heap_bytes") or 0,
        )

    def _are_all_at_work(self) -> bool:
        if self._ours is None:
            return True
        at_work = sum(worker.samples > 0 and not worker.leaving for worker in workers_now(self._ours))
        return at_work >= self._ours.stats().workers

    def _stages(self) -> StageTimes | None:
        return None if self._ours is None else self._ours.stats().stages

    def _trainer_cpu_s(self) -> float:
        return time.process_time() - self.watch.cpu_s


def _workers_cpu_s() -> dict[int, float]:
    """The processor time of each child of this process."""
    found = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            found[child.pid] = times.user + times.system
    return found
