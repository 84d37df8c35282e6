"""One live loader whose settings are changed and measured while it runs.

In:  a dataset, a budget, ``Setting``s to measure.
Out: ``Trial``s.
Runs in: trainer, and workers it starts and ends.
"""

from __future__ import annotations

import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Self

from torch.utils.data import IterableDataset

from penstock.errors import BudgetError
from penstock.lab.dataset.endless import endless, endless_arguments
from penstock.loader.dataloader import DataLoader
from penstock.meter import Watcher, require_tree_parts
from penstock.planner.search import LEAST_NOISE, Setting, Trial

_BLOCKS, _FEWEST_BLOCKS = 6, 3
_LEAST_BATCHES, _FEWEST_BATCHES = 2 * _BLOCKS, 2 * _FEWEST_BLOCKS
"""Batches a measurement takes, and those it makes do with where they take long: fewer say nothing of their noise."""
_SETTLE_SHARE = 0.25
"""Of a measurement's length: new workers start and what was ahead under the old setting is used up."""
_MOST_TIMES = 3
_SLOWER = 1.5
"""How many times what the model says a batch may take."""
_MISSED = 0.01
"""Share of the budget by which memory may be misread: pages are counted while they come and go."""


class LiveLoader:
    """Measures settings one after the other, on workers that stay."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        collate_fn: Callable[[Any], Any] | None,
        memory_bytes: int,
        step_s: float,
        trial_s: float,
        on_batch: Callable[[], None],
        is_repeated: bool = False,
    ) -> None:
        """``step_s``: how long the training loop is busy with a batch. ``trial_s``: about how long one measurement is.
        ``on_batch`` may raise to end it all. ``is_repeated``: every worker gives all samples, so that each counts once
        in as many."""
        self._batch_size, self._step_s, self._trial_s = batch_size, step_s, trial_s
        self._memory_bytes, self._on_batch = memory_bytes, on_batch
        self._restarts = isinstance(dataset, IterableDataset)
        self._is_repeated = is_repeated
        self._watch = Watcher(require_tree_parts, measures=["total_bytes"], every_s=0.04)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
            self._loader = DataLoader(
                dataset, batch_size, num_workers=1, collate_fn=collate_fn, memory=memory_bytes,
                persistent_workers=True, **endless_arguments(dataset),
            )  # fmt: skip
        self._stream: Generator[Any, None, None] | None = None
        self._safe: Setting | None = None
        """The latest setting that kept to the budget."""
        self._most = Setting(0, 0)
        """The most workers and the most batches ahead that these workers and their arena have seen."""

    def __enter__(self) -> Self:
        self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_stream()
        self._loader.close()
        self._watch.__exit__(kind, error, trace)

    @staticmethod
    def needs_s(setting: Setting, batch_s: float) -> float:
        """What a measurement takes at least, where a batch takes so long."""
        return (setting.depth + 1 + _FEWEST_BATCHES) * batch_s

    def measure(self, setting: Setting, *, batch_s: float) -> Trial:
        """Turn the valves and see what comes of it. What goes over the budget is left at once.

        ``batch_s``: about how long a batch will take, so that those that take long are waited for.
        """
        if setting.workers < self._most.workers or setting.depth < self._most.depth:
            # An arena keeps what was in use once, and heaps what they have grown to: that is the larger setting's.
            self._start_anew()
        self._most = Setting(max(self._most.workers, setting.workers), max(self._most.depth, setting.depth))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
            warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
            self._loader.resize(workers=setting.workers, depth=setting.depth)
            if self._restarts:
                # Workers of a stream own their share of it, so that another number of them means another epoch.
                self._end_stream()
            try:
                trial = self._measure(setting, batch_s)
            except BudgetError:
                trial = self._over(setting)
        if trial.is_over:
            self._retreat()
        else:
            self._safe = setting
        return trial

    def _measure(self, setting: Setting, batch_s: float) -> Trial:
        ahead = setting.depth + 1
        settle_s, slow_s = _SETTLE_SHARE * self._trial_s, _SLOWER * batch_s
        most_s = max(_MOST_TIMES * settle_s, ahead * slow_s)
        if self._run(settle_s, most_s, least_batches=ahead, noise=None).is_over:
            return self._over(setting)
        self._watch.forget_peaks()
        most_s = max(_MOST_TIMES * self._trial_s, _FEWEST_BATCHES * slow_s)
        run = self._run(self._trial_s, most_s, least_batches=_LEAST_BATCHES, noise=LEAST_NOISE)
        if run.is_over:
            return self._over(setting)
        times = setting.workers if self._is_repeated else 1
        return Trial(
            setting=setting,
            samples_per_s=run.batches * self._batch_size / times / run.elapsed_s,
            noise=run.noise,
            memory_bytes=self._peak_bytes,
            wait_fraction=run.wait_s / run.elapsed_s if self._step_s else None,
        )

    def _run(self, seconds: float, most_s: float, *, least_batches: int, noise: float | None) -> _Run:
        """Take batches for so long; longer until they are enough and noise is low, but no longer than ``most_s``."""
        run = _Run()
        while True:
            asked_s = time.perf_counter()
            if self._stream is None:
                self._stream = endless(self._loader)
            batch = next(self._stream)
            run.wait_s += time.perf_counter() - asked_s
            if self._step_s:
                time.sleep(self._step_s)
            del batch
            run.ends_s.append(time.perf_counter())
            self._on_batch()
            if self._peak_bytes > self._memory_bytes * (1 + _MISSED):
                run.is_over = True
                return run
            enough = run.batches >= least_batches and (noise is None or run.noise <= noise)
            if (run.elapsed_s >= seconds and enough) or run.elapsed_s >= most_s:
                return run

    @property
    def _peak_bytes(self) -> int:
        """The most that batches and workers took: what the budget is about."""
        peak = self._watch.peak("total_bytes")
        return max(0, peak.shared_bytes - self._watch.start.shared_bytes) + peak.workers_bytes

    def _over(self, setting: Setting) -> Trial:
        return Trial(setting=setting, samples_per_s=0.0, noise=1.0, memory_bytes=self._peak_bytes, is_over=True)

    def _retreat(self) -> None:
        safe = self._safe or Setting(1, 1)
        self._loader.resize(workers=safe.workers, depth=safe.depth)
        self._start_anew()
        self._watch.forget_peaks()

    def _start_anew(self) -> None:
        """With other workers and an empty arena."""
        self._end_stream()
        self._loader.close()
        self._most = Setting(0, 0)

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class _Run:
    """Batches as they came."""

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.ends_s: list[float] = []
        self.wait_s = 0.0
        self.is_over = False

    @property
    def batches(self) -> int:
        return len(self.ends_s)

    @property
    def elapsed_s(self) -> float:
        return self.ends_s[-1] - self.began_s

    @property
    def noise(self) -> float:
        """Standard error of the rate, as a share of it. Over blocks: batches come in bursts, and single ones would say
        that nothing is certain."""
        blocks = min(_BLOCKS, self.batches // 2)
        if blocks < _FEWEST_BLOCKS:
            return 1.0
        size = self.batches // blocks
        marks = [self.began_s, *self.ends_s[size - 1 : size * blocks : size]]
        spans = [later - earlier for earlier, later in itertools.pairwise(marks)]
        return statistics.stdev(spans) / statistics.fmean(spans) / len(spans) ** 0.5
