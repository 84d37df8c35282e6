"""The watcher: a thread that samples a gauge while other code runs.

In:  a function that takes one sample, the names of the sample's measures.
Out: the first and the latest sample, the peak, the growth and the mean of each measure, the cost of sampling.
Runs in: trainer, command line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

_Sample = TypeVar("_Sample")

_MOST_DUTY = 0.1
"""The largest share of one processor that sampling takes, so that it does not slow down the measured code."""


class Watcher(Generic[_Sample]):
    """Takes a sample every ``every_s`` seconds inside its context, but less often if a sample takes long.

    A measure is an attribute of the samples. If a sample or its measure is None, the system does not provide the
    figure, and the sample does not count.
    """

    def __init__(
        self,
        sample: Callable[[], _Sample],
        *,
        measures: Sequence[str],
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._sample = sample
        self._every_s = every_s
        self._clock, self._cpu_clock = clock, cpu_clock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-watcher", daemon=True)
        self.start = self.latest = sample()
        """The sample from when the watcher was made, and the latest sample."""
        self._peaks = dict.fromkeys(measures, self.start)
        self._sums: dict[str, tuple[float, int]] = dict.fromkeys(measures, (0.0, 0))
        self.cpu_s = 0.0
        """The processor time that sampling has taken."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def peak(self, measure: str) -> _Sample:
        """The sample in which ``measure`` was largest since the last ``forget_peaks``."""
        return self._peaks[measure]

    def growth(self, measure: str) -> int | None:
        """``measure`` in the latest sample minus ``measure`` in the first sample; None if one of the two is unknown."""
        return _difference(self.latest, self.start, measure)

    def peak_growth(self, measure: str) -> int | None:
        """The largest ``measure`` minus ``measure`` in the first sample, at least 0; None if one of the two is
        unknown."""
        growth = _difference(self._peaks[measure], self.start, measure)
        return None if growth is None else max(0, growth)

    def mean(self, measure: str) -> float | None:
        """The mean of ``measure`` over all samples except the first; None if no sample has this measure."""
        total, count = self._sums[measure]
        return total / count if count else None

    def forget_peaks(self) -> None:
        """Forget the peaks so far, and begin to count peaks anew."""
        # A new sample is taken, because the latest sample may be old: samples are rare if there are many processes.
        self.latest = self._sample()
        self._peaks = dict.fromkeys(self._peaks, self.latest)

    def take(self) -> None:
        """Take one sample. The thread calls this function; code that has just changed the measured figures may call it
        too."""
        now = self.latest = self._sample()
        for measure, highest in self._peaks.items():
            value = _value(now, measure)
            if value is None:
                continue
            before = _value(highest, measure)
            if before is None or value > before:
                self._peaks[measure] = now
            total, count = self._sums[measure]
            self._sums[measure] = total + value, count + 1

    def _run(self) -> None:
        pause_s = self._every_s
        while not self._ended.wait(pause_s):
            began_s, began_cpu_s = self._clock(), self._cpu_clock()
            self.take()
            cpu_s = self._cpu_clock() - began_cpu_s
            self.cpu_s += cpu_s
            pause_s = max(self._every_s - (self._clock() - began_s), cpu_s * (1 / _MOST_DUTY - 1))


def _value(sample: object, measure: str) -> Any:
    return None if sample is None else getattr(sample, measure)


def _difference(later: object, earlier: object, measure: str) -> Any:
    high, low = _value(later, measure), _value(earlier, measure)
    return None if high is None or low is None else high - low
