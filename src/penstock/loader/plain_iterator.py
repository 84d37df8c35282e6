"""torch's own iterator without workers, with counters and a position.

In:  a DataLoader without workers over an iterable dataset or data pipe, or with seeding="worker".
Out: batches, exactly torch's.
Runs in: trainer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Any

from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from penstock.device.copy_stream import move
from penstock.loader.checkpoint import Generators, Position, Waypoint

if TYPE_CHECKING:
    from penstock.loader.dataloader import DataLoader


class PlainIterator(_SingleProcessDataLoaderIter):
    """For iterable datasets, data pipes and seeding="worker" without workers."""

    def __init__(self, loader: DataLoader[Any], state: dict[str, Any] | None = None) -> None:
        kept, before = Generators.begin(loader.generator, state)
        super().__init__(loader)
        self._collating = self._dataset_fetcher.collate_fn = _Collating(loader.collate_fn)
        self._counters = loader._counters
        self._device = loader._device
        self.position = Position(base_seed=int(self._base_seed), epoch=0, generators=before, draws_seed=True)
        self.position.waypoints.append(Waypoint(batches=0, turn=0, sampler=None, resume={}))
        if state is not None:
            self._go_past(state["batches"], has_own_state=state["dataset"] is not None)
            kept.restore_global()
        self._counters.begin_iteration()

    def _go_past(self, batches: int, *, has_own_state: bool) -> None:
        """Move past ``batches`` batches; a stream without a state of its own is read again up to there."""
        for _ in range(batches):
            if self._dataset_kind != _DatasetKind.Iterable:
                next(self._sampler_iter, None)
            elif not has_own_state:
                with contextlib.suppress(StopIteration):
                    super()._next_data()
        self._num_yielded = batches
        self._note(batches)

    def _note(self, batches: int) -> None:
        self.position.waypoints.append(Waypoint(batches=batches, turn=batches, sampler=None, resume={}))

    def _next_data(self) -> Any:
        began = self._counters.clock()
        try:
            data = super()._next_data()
        except StopIteration:
            self.position.finished = True
            self._counters.end_iteration()
            raise
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
