"""A timed run: a training loop takes the batches of a loader while memory is measured.

In:  a loader, a gauge of memory, a training step.
Out: a ``Timing`` for each measurement of the run.
Runs in: trainer, and workers that the loader starts.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from torch.utils.data import IterableDataset, RandomSampler

from penstock.lab.dataset.sample_probe import NoDataError
from penstock.lab.shown_once import shown_once
from penstock.meter import Watcher

_Gauge = TypeVar("_Gauge")
_WITHOUT_END = 1 << 40


class Timing:
    """The times of all batches of one measurement."""

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.ends_s: list[float] = []
        """The times at which the training loop finished each batch."""
        self.wait_s = self.step_s = 0.0
        """The time in the loader and the time in the training step, each for all batches together."""
        self.first_batch_s = 0.0
        """The time until the first batch arrived."""

    @property
    def batches(self) -> int:
        return len(self.ends_s)

    @property
    def elapsed_s(self) -> float:
        return self.ends_s[-1] - self.began_s if self.ends_s else 0.0

    def note(self, asked_s: float, came_s: float, done_s: float) -> None:
        if not self.ends_s:
            self.first_batch_s = came_s - asked_s
        self.ends_s.append(done_s)
        self.wait_s += came_s - asked_s
        self.step_s += done_s - came_s


class TimedRun(Generic[_Gauge]):
    """Takes batches of one loader, epoch after epoch, and times them. The workers end when the ``with`` block ends, so
    that their end is in no measurement."""

    def __init__(
        self,
        loader: Iterable[Any],
        gauge: Callable[[], _Gauge],
        *,
        measures: Sequence[str],
        every_s: float,
        step: Callable[[Any], object] | None = None,
        on_batch: Callable[[], None] = lambda: None,
    ) -> None:
        """``gauge`` is read every ``every_s`` seconds. The training loop calls ``step`` with each batch. ``on_batch``
        is called after each batch; an exception from ``on_batch`` ends the run."""
        self._loader: Iterable[Any] | None = loader
        self._gauge, self._measures, self._every_s = gauge, measures, every_s
        self._step, self._on_batch = step, on_batch
        self._batches: Generator[Any, None, None] | None = None

    def __enter__(self) -> Self:
        gc.collect()
        self.watch = Watcher(self._gauge, measures=self._measures, every_s=self._every_s).__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_epoch()
        self.watch.__exit__(kind, error, trace)
        # Persistent workers end with their loader, and no worker may be left when the next run starts.
        self._loader = None

    def end_epoch(self) -> None:
        """End the epoch, so that the next batch begins a new one."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def measure(self, goes_on: Callable[[Timing], bool]) -> Timing:
        """Take batches while ``goes_on`` returns True; at least one batch is taken."""
        timing = Timing()
        while True:
            asked_s = time.perf_counter()
            if self._batches is None:
                assert self._loader is not None
                self._batches = _endless(self._loader)
            # The generator holds each batch while the next batch is built, as training loops do.
            batch = next(self._batches)
            came_s = time.perf_counter()
            if self._step is not None:
                self._step(batch)
            del batch
            timing.note(asked_s, came_s, time.perf_counter())
            self._on_batch()
            if not goes_on(timing):
                return timing


def _endless(loader: Iterable[Any]) -> Generator[Any, None, None]:
    """The batches of epoch after epoch; raises NoDataError if an epoch is empty."""
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            raise NoDataError("the dataset is empty: an epoch has no batch")


def endless_arguments(dataset: Any) -> dict[str, Any]:
    """The loader arguments for an epoch in random order that is longer than any measurement. A stream has no arguments
    for this and starts again when it ends."""
    if isinstance(dataset, IterableDataset):
        return {}
    if not len(dataset):
        raise NoDataError("the dataset is empty: it has no sample to load")
    return {"sampler": RandomSampler(dataset, replacement=True, num_samples=_WITHOUT_END)}


@contextmanager
def without_warnings() -> Iterator[None]:
    """Hide torch's warnings about settings that are measured on purpose: more workers than cores, pinning without a
    GPU, forking with threads. Warnings of the user's code are shown once."""
    with shown_once():
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*pin_memory", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
        yield
