"""Fetches several samples of one task at once in threads of the worker, for samples that wait for a network or a disk.

In:  indices, and the function that returns the sample of one index.
Out: the samples in the order of the indices, and whether the dataset used a global random generator.
Runs in: worker, in a process of its own.

Python's, numpy's and torch's global generators belong to the whole process: if two samples draw from them at once, the
numbers depend on timing. So the generators are watched while threads run, and a sample is given out only if no
generator was used by then. If the dataset uses a generator, its samples are fetched again, one after the other.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from penstock.workers import forecast_position
from penstock.workers.kept_generators import the_watch
from penstock.workers.rng import GeneratorUsed, note_beside_others


class _Job(NamedTuple):
    place: int
    get: Callable[[Any], Any]
    index: Any
    forecast_position: int


class _Ended(NamedTuple):
    place: int
    sample: Any
    error: BaseException | None


class SampleThreads:
    """The threads of one worker. They start with the first task that has work for them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        self._at_work = 0
        """The number of samples that were begun and whose end was not seen yet."""
        self._is_started = False

    def in_order(self, get: Callable[[Any], Any], indices: Sequence[Any], window: Callable[[], int]) -> Iterator[Any]:
        """The samples of ``indices``. At most ``window()`` samples are held at a time, or as many as there are threads
        if that is more. Raises a sample's exception in the sample's place, or GeneratorUsed; call ``rest`` afterwards
        in any case."""
        self._start()
        watch = the_watch()
        watch.begin()
        found: dict[int, _Ended] = {}
        begun = 0
        for place in range(len(indices)):
            while begun < min(len(indices), place + max(self.count, window())):
                self._jobs.put(_Job(begun, get, indices[begun], forecast_position.current()))
                self._at_work += 1
                begun += 1
            while place not in found:
                ended = self._ended.get()
                self._at_work -= 1
                found[ended.place] = ended
            if watch.used():
                raise GeneratorUsed
            # The sample is not stored in a variable: the caller drops it before it asks for the next sample.
            yield _sample_of(found, place)

    def rest(self) -> None:
        """Wait until no sample is being fetched, drop the samples that were not given out, and restore the generators.
        Does nothing if no sample was begun."""
        while self._at_work:
            self._ended.get()
            self._at_work -= 1
        if the_watch().is_on:
            the_watch().end()

    def _start(self) -> None:
        if not self._is_started:
            self._is_started = True
            for number in range(self.count):
                # These are daemon threads: a sample that waits for hours must not keep the process alive.
                threading.Thread(target=self._serve, name=f"penstock-sample-{number}", daemon=True).start()

    def end(self) -> None:
        """Make the threads end."""
        for _ in range(self.count if self._is_started else 0):
            self._jobs.put(None)

    def _serve(self) -> None:
        note_beside_others()
        while (job := self._jobs.get()) is not None:
            self._run(job)
            del job

    def _run(self, job: _Job) -> None:
        forecast_position.begin(job.forecast_position)
        try:
            ended = _Ended(job.place, job.get(job.index), None)
        except BaseException as error:  # sys.exit() in a sample ends the worker, as without threads
            ended = _Ended(job.place, None, error)
        self._ended.put(ended)


def _sample_of(found: dict[int, _Ended], place: int) -> Any:
    ended = found.pop(place)
    if ended.error is not None:
        raise ended.error
    return ended.sample
