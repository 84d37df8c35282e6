"""A live loader: its settings are changed and measured while it runs.

In:  a dataset, a budget, ``Setting``s to measure.
Out: ``Trial``s.
Runs in: trainer, and workers that the trainer starts and ends.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from torch.utils.data import IterableDataset

from penstock.errors import BudgetError
from penstock.lab.timed_run import TimedRun, Timing, endless_arguments, without_warnings
from penstock.loader.dataloader import DataLoader
from penstock.meter import TreeParts, require_tree_parts
from penstock.planner.search import LEAST_NOISE, Setting, Trial

_BLOCKS, _FEWEST_BLOCKS = 6, 3
_LEAST_BATCHES, _FEWEST_BATCHES = 2 * _BLOCKS, 2 * _FEWEST_BLOCKS
"""The number of batches of a measurement, and the fewest if batches take long: the noise of fewer batches cannot be
estimated."""
_SETTLE_SHARE = 0.25
"""The share of a measurement that does not count, in which new workers start and batches made with the old setting are
used up."""
_MOST_TIMES = 3
_SLOWER = 1.5
"""A measurement allows a batch this many times the predicted time."""
_MISSED = 0.01
"""The share of the budget by which a reading of memory may be wrong, because pages come and go while they are
counted."""


class LiveLoader:
    """Measures one setting after the other on the same workers."""

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
        """``step_s`` is the time that the training loop is busy with a batch; ``trial_s`` is about the time that one
        measurement takes. An exception from ``on_batch`` ends the measurement. ``is_repeated`` means that every worker
        delivers every sample, so that each sample counts only once."""
        self._batch_size, self._step_s, self._trial_s = batch_size, step_s, trial_s
        self._memory_bytes = memory_bytes
        self._restarts, self._is_repeated = isinstance(dataset, IterableDataset), is_repeated
        with without_warnings():
            self._loader = DataLoader(
                dataset, batch_size, num_workers=1, collate_fn=collate_fn, memory=memory_bytes,
                persistent_workers=True, **endless_arguments(dataset),
            )  # fmt: skip
        self._run: TimedRun[TreeParts] = TimedRun(
            self._loader, require_tree_parts, measures=["total_bytes"], every_s=0.04,
            step=(lambda batch: time.sleep(step_s)) if step_s else None, on_batch=on_batch,
        )  # fmt: skip
        self._safe: Setting | None = None
        """The latest setting that stayed within the budget."""
        self._most = Setting(0, 0)
        """The most workers and the most batches ahead since the workers and the arena were created."""

    def __enter__(self) -> Self:
        self._run.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run.end_epoch()
        self._loader.close()
        self._run.__exit__(kind, error, trace)

    @staticmethod
    def needs_s(setting: Setting, batch_s: float) -> float:
        """The least time for a measurement if a batch takes ``batch_s``."""
        return (setting.depth + 1 + _FEWEST_BATCHES) * batch_s

    def measure(self, setting: Setting, *, batch_s: float) -> Trial:
        """Change to a setting and measure it. The measurement ends at once if the setting exceeds the budget.

        ``batch_s`` is about the time that a batch takes, so that the measurement waits for slow batches.
        """
        if setting.workers < self._most.workers or setting.depth < self._most.depth:
            # The arena keeps free segments and heaps stay large, so the measured memory would be that of the larger
            # setting.
            self._start_anew()
        self._most = Setting(max(self._most.workers, setting.workers), max(self._most.depth, setting.depth))
        with without_warnings():
            self._loader.resize(workers=setting.workers, depth=setting.depth)
            if self._restarts:
                # Each worker of a stream reads its share of the epoch, so a new number of workers needs a new epoch.
                self._run.end_epoch()
            try:
                trial = self._measure(setting, batch_s)
            except BudgetError:
                trial = None
        if trial is None:
            trial = Trial(setting=setting, samples_per_s=0.0, noise=1.0, memory_bytes=self._peak_bytes, is_over=True)
            self._retreat()
        else:
            self._safe = setting
        return trial

    def _measure(self, setting: Setting, batch_s: float) -> Trial | None:
        """The measurement of a setting; None if the setting exceeds the budget."""
        ahead, slow_s = setting.depth + 1, _SLOWER * batch_s
        settle_s = _SETTLE_SHARE * self._trial_s
        self._take(settle_s, max(_MOST_TIMES * settle_s, ahead * slow_s), lambda timing: timing.batches >= ahead)
        if self._is_over:
            return None
        self._run.watch.forget_peaks()
        timing = self._take(
            self._trial_s,
            max(_MOST_TIMES * self._trial_s, _FEWEST_BATCHES * slow_s),
            lambda timing: timing.batches >= _LEAST_BATCHES and _noise(timing) <= LEAST_NOISE,
        )
        if self._is_over:
            return None
        times = setting.workers if self._is_repeated else 1
        return Trial(
            setting=setting,
            samples_per_s=timing.batches * self._batch_size / times / timing.elapsed_s,
            noise=_noise(timing),
            memory_bytes=self._peak_bytes,
            wait_fraction=timing.wait_s / timing.elapsed_s if self._step_s else None,
        )

    def _take(self, seconds: float, most_s: float, is_enough: Callable[[Timing], bool]) -> Timing:
        """Take batches for ``seconds``, and for up to ``most_s`` if they are not enough yet; end at once if memory
        exceeds the budget."""

        def goes_on(timing: Timing) -> bool:
            if self._is_over or timing.elapsed_s >= most_s:
                return False
            return timing.elapsed_s < seconds or not is_enough(timing)

        return self._run.measure(goes_on)

    @property
    def _is_over(self) -> bool:
        return self._peak_bytes > self._memory_bytes * (1 + _MISSED)

    @property
    def _peak_bytes(self) -> int:
        """The most memory that batches and workers took, which is the memory that the budget limits."""
        watch = self._run.watch
        peak = watch.peak("total_bytes")
        return max(0, peak.shared_bytes - watch.start.shared_bytes) + peak.workers_bytes

    def _retreat(self) -> None:
        safe = self._safe or Setting(1, 1)
        self._loader.resize(workers=safe.workers, depth=safe.depth)
        self._start_anew()
        self._run.watch.forget_peaks()

    def _start_anew(self) -> None:
        """Continue with new workers and an empty arena."""
        self._run.end_epoch()
        self._loader.close()
        self._most = Setting(0, 0)


def _noise(timing: Timing) -> float:
    """The standard error of the rate, as a share of the rate. It is computed from blocks of batches: batches come in
    bursts, so single batches would make every rate look uncertain."""
    blocks = min(_BLOCKS, timing.batches // 2)
    if blocks < _FEWEST_BLOCKS:
        return 1.0
    size = timing.batches // blocks
    marks = [timing.began_s, *timing.ends_s[size - 1 : size * blocks : size]]
    spans = [later - earlier for earlier, later in itertools.pairwise(marks)]
    return statistics.stdev(spans) / statistics.fmean(spans) / len(spans) ** 0.5
