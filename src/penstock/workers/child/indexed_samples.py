"""Fetches the samples of a dataset with indices, in row order; each stretch of rows has its own seed.

In:  tasks.
Out: groups of samples; the current row, on the board.
Runs in: worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import getitem
from typing import Any

from penstock.workers.child.sample_threads import SampleThreads
from penstock.workers.child.views import Views
from penstock.workers.protocol import Fetch, Notice
from penstock.workers.rng import GeneratorUsed, seed_stretch
from penstock.workers.setup import Setup, is_read_by_index
from penstock.workers.stretches import stretch_rows

_USES_GENERATORS = (
    "{} draws from Python's, numpy's or torch's global random generator, so its samples are fetched one after the "
    "other, and threads_per_worker= has no effect; otherwise batches would depend on timing. Draw random numbers in "
    "collate_fn, which runs while no other thread fetches a sample, or leave threads_per_worker= out."
)
_GIVE_UP_AFTER = 3
"""Threads end once this many tasks in a row have used a generator. A smaller number of such tasks may be an accident,
such as the random delay before a request is repeated."""


class IndexedSamples:
    def __init__(self, setup: Setup, views: Views, send: Callable[[object], None]) -> None:
        self._setup = setup
        self._views = views
        self._send = send
        self._threads = SampleThreads(setup.threads) if setup.fetches_in_threads else None
        """None if there are no threads, and also once the dataset is seen to use the global generators."""
        self._tasks_in_vain = 0
        """The number of latest tasks in a row that used a generator."""

    def groups(self, task: Fetch, most: Callable[[], int], lend_next: Callable[[], None]) -> Iterator[list[Any]]:
        """Samples of the task in row order, a few at a time. ``most`` returns how many samples may be held at a time,
        as far as is known by now. As many samples as there are threads are always allowed. ``lend_next`` is called
        before samples are fetched one after the other."""
        dataset, indices = self._setup.dataset, task.indices
        # A cached dataset seeds the load of every key by that key, so seeding here is unnecessary. A subclass is
        # different: it may draw random numbers itself.
        self_seeded = None if task.seed is None else vars(type(dataset)).get("get_self_seeded")
        get = partial(self_seeded or getitem, dataset)
        begun = 0
        if self._threads is not None and not task.careful and len(indices) > 1:
            for sample in self._in_threads(get, task, most):
                begun += 1
                yield [sample]
                del sample
        by_list = None if is_read_by_index(dataset) else dataset.__getitems__
        step = stretch_rows(task.batch_rows)
        while begun < len(indices):
            self.at_row(task.first_row + begun)
            if self_seeded is None:
                # The generators are seeded in the middle of a stretch too: the rows before came from threads and used
                # no generator.
                self.seed(task, (task.first_row + begun) // step)
            stretch = indices[begun : begun // step * step + step]
            if by_list:
                begun += len(stretch)
                yield by_list(stretch)
                continue
            end = begun + len(stretch)
            while begun < end:
                self.at_row(task.first_row + begun)
                group = indices[begun : min(begun + most(), end)]
                begun += len(group)
                lend_next()
                yield [get(index) for index in group]

    def _in_threads(self, get: Callable[[Any], Any], task: Fetch, most: Callable[[], int]) -> Iterator[Any]:
        """The samples of the task's first rows, in row order: all of these rows, or the rows before the dataset used a
        global generator."""
        threads = self._threads
        assert threads is not None
        self.at_row(task.first_row)
        samples = threads.in_order(get, task.indices, most)
        try:
            for row, sample in enumerate(samples, task.first_row + 1):
                yield sample
                del sample
                self.at_row(row)
        except GeneratorUsed:
            threads.rest()
            self._tasks_in_vain += 1
            if self._tasks_in_vain == _GIVE_UP_AFTER:
                self._threads = None
                threads.end()
                self._send(Notice(_USES_GENERATORS.format(type(self._setup.dataset).__name__)))
        else:
            threads.rest()
            self._tasks_in_vain = 0

    def rest(self) -> None:
        """Wait until no sample is being fetched: such a sample would disturb the next task's generators and take
        memory."""
        if self._threads is not None:
            self._threads.rest()

    def at_row(self, row: int) -> None:
        if self._views.place is not None:
            self._views.place.at_row(row)

    def seed(self, task: Fetch, stretch: int) -> None:
        if task.seed is not None:
            seed_stretch(task.seed, stretch)
