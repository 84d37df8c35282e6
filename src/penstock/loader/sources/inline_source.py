"""The source of batches without workers: the training thread fetches each batch when it is due.

In:  indices drawn by the iterator.
Out: batches.
Runs in: trainer, in the training thread.

The iterator uses this source in place of an engine until there are workers. The source starts no thread and sets no
memory aside.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.loader.engine.batch import Batch, SamplerFailure
from penstock.loader.sources.inline_fetcher import InlineFetcher
from penstock.loader.stats import Counters

if TYPE_CHECKING:
    from penstock.loader.dataloader import DataLoader


class DrawnBatch:
    """A batch that was drawn from the sampler. Without workers the batch is fetched when it is due."""

    __slots__ = ("failure", "forecast_position", "indices", "number", "rows", "sampler_state")

    worker_id: int | None = None
    memo: Any = None
    ready = False

    def __init__(
        self,
        number: int,
        indices: Any,
        rows: int,
        forecast_position: int,
        failure: weakref.ref[SamplerFailure] | None,
        sampler_state: Any,
    ) -> None:
        self.number = number
        self.indices = indices
        self.rows = rows
        self.forecast_position = forecast_position
        self.failure = failure
        self.sampler_state = sampler_state

    @property
    def samples(self) -> int:
        return self.rows

    def for_engine(self, seed_of: Callable[[int], int] | None) -> Batch:
        seed = None if seed_of is None else seed_of(self.number)
        return Batch(
            self.number,
            self.indices,
            self.rows,
            seed,
            forecast_position=self.forecast_position,
            failure=self.failure,
            sampler_state=self.sampler_state,
        )

    def stop_passing(self) -> None:
        """Do nothing: the batch has no segments."""


class InlineSource:
    """Has the attributes and methods of an engine that the iterator and copies to a device use."""

    __slots__ = ("_counters", "_fetcher", "_poll_device", "seed_of", "waiting")

    def __init__(self, fetcher: InlineFetcher, counters: Counters) -> None:
        self._fetcher = fetcher
        self._counters = counters
        self._poll_device: Callable[[], Any] | None = None
        self.waiting: deque[DrawnBatch] = deque()
        self.seed_of: Callable[[int], int] | None = None
        """Returns a batch's seed by the batch's number; None if generators are not seeded."""

    @property
    def undelivered(self) -> int:
        return len(self.waiting)

    def offer(self, batch: DrawnBatch) -> None:
        """Add a batch drawn from the sampler, in order."""
        self.waiting.append(batch)

    def next_batch(self, timeout_s: float, draw: Callable[[], None]) -> DrawnBatch | None:
        """The next batch to deliver; None once every offered batch is taken."""
        if self._poll_device is not None:
            self._poll_device()
        return self.waiting.popleft() if self.waiting else None

    def try_next(self) -> DrawnBatch | None:
        """None: no batch is ready before it is due."""
        return None

    def deliver(self, batch: DrawnBatch, *, stays_on_host: Callable[[Any], bool] | None = None) -> Any:
        """Fetch the batch. Raises the exception of its sampler, dataset or collate function."""
        failure = batch.failure and batch.failure()
        if failure is not None:
            raise failure.error
        counters = self._counters
        began_s = counters.waits_since_s = counters.clock()
        try:
            return self._fetcher.fetch(batch.indices, self.seed_of, batch.number, batch.forecast_position)
        finally:
            counters.waits_since_s = None
            counters.note_wait(counters.clock() - began_s)

    def end_epoch(self) -> None:
        """Do nothing: no memory is set aside."""

    def watch_device(self, poll: Callable[[], bool]) -> None:
        """Note ``poll``, which releases memory that the device has read."""
        self._poll_device = poll

    def wake(self) -> None:
        """Do nothing: no thread waits."""


def fetcher_of(loader: DataLoader[Any], dataset: Any) -> InlineFetcher:
    """The fetcher of a loader. The loader keeps it, and what it has learnt about the dataset, from iteration to
    iteration."""
    kept = loader._fetcher
    if kept is None or not kept.serves(dataset, loader.collate_fn):
        kept = InlineFetcher(dataset, loader.collate_fn, auto_collation=loader._auto_collation)
        # This bypasses __setattr__: a call of it takes a tenth of the time of an iterator without workers.
        loader.__dict__["_fetcher"] = kept
    return kept
