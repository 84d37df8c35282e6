"""torch's own iterator without workers, with counters and a position.

In:  a DataLoader without workers over an iterable dataset or data pipe, or with seeding="worker".
Out: exactly the batches that torch gives.
Runs in: trainer.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from penstock.device.copy_stream import move
from penstock.loader.checkpoint import Generators, Position, Waypoint, next_epoch
from penstock.loader.epochs import brought_to, epoch_of, state_of

if TYPE_CHECKING:
    from penstock.loader.dataloader import DataLoader


class PlainIterator(_SingleProcessDataLoaderIter):
    """The iterator for iterable datasets, data pipes and seeding="worker" without workers."""

    def __init__(self, loader: DataLoader[Any], state: dict[str, Any] | None = None) -> None:
        kept, before = Generators.begin(loader.generator, state)
        super().__init__(loader)
        self._collating = self._dataset_fetcher.collate_fn = _Collating(loader.collate_fn)
        self._loader = weakref.ref(loader)
        self._counters = loader._counters
        self._device = loader._device
        self._drawn: list[Any] = []
        """The indices that were drawn to find out whether the sampler is at its end."""
        self._resumed = state
        """The state from which the first ``next()`` continues; None afterwards."""
        self._came_from: dict[str, Any] | None = None
        """The state from which this iteration continued; None after the first batch."""
        self.position = Position(base_seed=int(self._base_seed), epoch=0, generators=before, draws_seed=True)
        self.position.sampler_epoch = epoch_of(self._index_sampler)
        self._num_yielded = 0 if state is None else state["batches"]
        self._note(self._num_yielded)
        if state is not None:
            self._after_seed = Generators(None)
            kept.restore_global()
        self._counters.begin_iteration()

    def _continue(self, state: dict[str, Any]) -> None:
        """Move past the batches delivered before ``state`` was taken; a stream without a state of its own is read again
        up to that position."""
        self._resumed, self._came_from = None, state
        if (loader := self._loader()) is not None:
            loader.forget_state(state)
        kept = Generators(None)
        self._after_seed.restore_global()
        anew, by_state = brought_to(self._index_sampler, state["sampler"][0], self.position.sampler_epoch)
        self._sampler_iter = anew or self._sampler_iter
        self.position.sampler_epoch = epoch_of(self._index_sampler)
        for _ in range(0 if by_state else state["batches"]):
            if self._dataset_kind != _DatasetKind.Iterable:
                next(self._sampler_iter, None)
            elif state["dataset"][0] is None:
                with contextlib.suppress(StopIteration):
                    super()._next_data()
        if not state["batches"]:
            # The sampler draws from the generators before the caller does.
            self._draw()
        kept.go_on(state)

    def _begin_next(self) -> bool:
        """Begin the next epoch if nothing is left of the epoch in which the state was taken."""
        state, loader = self._came_from, self._loader()
        if state is None or not state["batches"] or loader is None:
            return False
        PlainIterator.__init__(self, loader, next_epoch(state))
        loader._position = self.position
        if self._resumed is not None:
            self._continue(self._resumed)
        return True

    def notice_end(self) -> None:
        """Find out whether the sampler is at its end, once as many batches are delivered as its length says."""
        try:
            most = len(self._index_sampler)  # type: ignore[arg-type]
        except TypeError:
            return
        if self._dataset_kind != _DatasetKind.Iterable and self._num_yielded >= most and not self._draw():
            self.position.finished = True

    def _draw(self) -> bool:
        """Draw one batch of indices ahead; False if the sampler has ended."""
        if not self._drawn:
            with contextlib.suppress(StopIteration):
                self._drawn.append(super()._next_index())
        return bool(self._drawn)

    def _next_index(self) -> Any:
        if not self._num_yielded and not self._drawn:
            # This happens before the first index is drawn, because that draw begins the sampler's epoch.
            self.position.sampler_epoch = epoch_of(self._index_sampler)
        return self._drawn.pop() if self._drawn else super()._next_index()

    def _note(self, batches: int) -> None:
        sampler = state_of(self._index_sampler)
        self.position.waypoints.append(Waypoint(batches=batches, turn=batches, sampler=sampler, resume={}))

    def __next__(self) -> Any:
        # torch's own __next__ takes as much time as a small batch, and only profilers and streams of known length need
        # it.
        profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        if profiled or self._IterableDataset_len_called is not None:
            return super().__next__()
        data = self._next_data()
        self._num_yielded += 1
        return data

    def _next_data(self) -> Any:
        if self._resumed is not None:
            self._continue(self._resumed)
        began = self._counters.clock()
        try:
            data = super()._next_data()
        except StopIteration:
            if self._begin_next():
                return self._next_data()
            self.position.finished = True
            self._counters.end_iteration()
            raise
        self._came_from = None
        self._counters.note_wait(self._counters.clock() - began)
        self._counters.note_batch(self._collating.samples if self._auto_collation else 1)
        self._note(self._num_yielded + 1)
        return data if self._device is None else move(data, self._device)


class _Collating:
    """The loader's collate function, which notes how many samples the latest batch was made of."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn
        self.samples = 0

    def __call__(self, samples: Any) -> Any:
        self.samples = len(samples) if isinstance(samples, Sized) else 1
        return self._collate_fn(samples)
