"""Admission: which batches may take memory, and which batches make room when memory is short.

In:  batches drawn from the sampler; workers that ask for room; memory that comes back from the user.
Out: batches opened in order; answers to workers.
Runs in: trainer, under the engine's lock.

Three rules keep the engine going and inside its budget:
- Batches are opened in order, and only if their bytes fit into the budget together with everything that is open, ready
  or lent. The batch that is due next is always opened; if it is larger than the whole budget, it passes alone.
- A need that exceeds the promised memory waits, unless its batch is due: then later batches make room. These batches
  are fetched again afterwards, with the same randomness.
- Batches that the user still holds while waiting for the next one become the user's own, outside the budget.
"""

from __future__ import annotations

import sys
from collections import deque

from penstock.arena.arena import Arena
from penstock.arena.layout import layout_of
from penstock.arena.segment import Segment
from penstock.errors import BudgetError
from penstock.loader.engine.batch import Batch, Task
from penstock.loader.engine.estimates import Shapes
from penstock.loader.engine.worker_set import WorkerEntry
from penstock.loader.notices import Notices
from penstock.loader.rules import LoaderRules
from penstock.units import format_bytes
from penstock.workers.protocol import NO_SEGMENT, Need, Room


class Admission:
    def __init__(self, arena: Arena, rules: LoaderRules, *, refetches: bool) -> None:
        """``refetches``: whether a batch may be dropped and fetched again."""
        self.arena = arena
        self.shapes = Shapes(rules)
        self.notices = Notices()
        self.upcoming: deque[Batch] = deque()
        """Batches that were drawn but are not open yet, in order."""
        self.open: dict[int, Batch] = {}
        """Open batches, in order: those being filled, and those that are ready but not taken."""
        self.failure: BaseException | None = None
        """An error that ends the epoch; the following next() raises it."""
        self.trainer_waits = False
        self.user_holds = 1
        """The number of batches that the user held at the latest next(); a for loop holds one batch."""
        self._refetches = refetches
        self._waiting: list[tuple[WorkerEntry, Task]] = []
        """Workers that wait for room, each with its task. A task that got its answer has no ``need`` any more."""
        self._owing: set[Batch] = set()
        """Open batches that have not taken all the memory that was promised to them."""
        self._warned_alone = False

    @property
    def due(self) -> Batch | None:
        """The batch that is to be delivered next, or None if it is not open. After it was evicted, later batches may be
        open."""
        first = next(iter(self.open.values()), None)
        if first is not None and self.upcoming and self.upcoming[0].number < first.number:
            return None
        return first

    @property
    def is_next_due(self) -> bool:
        """Whether the first batch that is not open is the batch to be delivered next."""
        return bool(self.upcoming) and self.due is None

    def most_open(self, rows: int) -> int:
        """How many batches of ``rows`` rows fit the budget together with the batches that the user holds."""
        expected = self.shapes.expected_bytes(rows)
        return max(1, self.arena.limit_bytes // expected - self.user_holds) if expected else sys.maxsize

    def fail(self, error: BaseException) -> None:
        """End the epoch with ``error``, unless another error has ended it already."""
        if self.failure is None:
            self.failure = error

    # -- opening ------------------------------------------------------------------------

    def open_next(
        self, *, slots: int, start_blind: int, copies: int, rows_ahead: bool, private_bytes: int
    ) -> Batch | None:
        """Open the next batch if it is admitted.

        ``slots`` limits the batches that are open or lent; ``start_blind`` limits the batches opened before any size is
        known. ``copies``: how many times the batch's bytes exist at once while the batch is made. ``rows_ahead``:
        whether the batch's rows get a segment now. ``private_bytes``: by how many bytes the batch's worker will grow.
        """
        if not self.upcoming:
            return None
        batch, is_due = self.upcoming[0], self.is_next_due
        if not is_due and len(self.open) + self.arena.lent_count >= slots:
            return None
        expected = self.shapes.expected_bytes(batch.rows)
        if expected is None and not is_due and len(self.open) >= start_blind:
            return None
        need = copies * (expected or 0)
        if batch.failure is None:
            wanted = need + private_bytes
            if not self.arena.fits(wanted, promised_bytes=self._owed()) and not (is_due and self._make_room(wanted)):
                return None
            batch.open(need)
            if not (self._lay_out(batch, need, is_due) if rows_ahead else self._promise(batch, need)):
                return None
        self.upcoming.popleft()
        is_last = not self.open or batch.number > next(reversed(self.open))
        self.open[batch.number] = batch
        batch.ready = batch.failure is not None
        if not is_last:
            # The batch was evicted and later batches were not: restore the order.
            self.open = dict(sorted(self.open.items()))
        return batch

    def _lay_out(self, batch: Batch, need: int, is_due: bool) -> bool:
        """Take the segment for the rows now, if the layout of samples is known."""
        if self.shapes.template is None or not batch.rows:
            return self._promise(batch, need)
        batch.template = self.shapes.template
        row_bytes = layout_of(batch.template, batch.rows).total_bytes
        if row_bytes:
            batch.rows_segment = self._take(batch, row_bytes, is_due)
            if batch.rows_segment is None:
                return False
        self._lay_out_texts(batch)
        return True

    def _lay_out_texts(self, batch: Batch) -> None:
        """Take the segment for the texts, if texts are long. Without this segment, workers ask for room when they have
        the texts."""
        row_bytes = self.shapes.text_row_bytes
        segment = self.arena.take(row_bytes * batch.rows) if row_bytes else None
        if segment is not None:
            batch.text_segment, batch.text_row_bytes = segment, row_bytes
            batch.extra[segment.number] = segment

    def _promise(self, batch: Batch, need: int) -> bool:
        if need:
            self._owing.add(batch)
        return True

    def _make_room(self, need_bytes: int, batch: Batch | None = None) -> bool:
        """Make room for the due ``batch``; None if the due batch is not open yet."""
        # While the user computes, the loop variable still holds the last batch, whose memory comes back by itself.
        while self.trainer_waits and not self.arena.fits(need_bytes) and self.arena.hand_over_oldest():
            pass
        return self._take_from_others(batch, need_bytes)

    # -- asking for room ------------------------------------------------------------------

    def ask(self, worker: WorkerEntry, need: Need) -> None:
        """Note that a worker holds samples and waits for room."""
        task = worker.tasks[need.task]
        task.need = need
        if not self._answer(worker, task, need):
            self._waiting.append((worker, task))

    def answer_waiting(self) -> None:
        if not self._waiting:
            return
        for worker, task in self._waiting:
            # The answer to an earlier worker may have made this worker drop its samples.
            if task.need is not None:
                self._answer(worker, task, task.need)
        self._unblock_due()
        self._waiting = [(worker, task) for worker, task in self._waiting if task.need is not None]

    def _unblock_due(self) -> None:
        """Make workers drop their samples if they wait for room for a later batch and have a task of the due batch
        queued behind it. Otherwise each of the two batches would wait for the other."""
        due = self.due
        if due is None or not self._refetches:
            return
        for worker, task in self._waiting:
            if task.batch is not due and task.need is not None and any(t.batch is due for t in worker.tasks.values()):
                worker.drop(task)

    def room_ahead(self, task: Task, worker: WorkerEntry) -> int:
        """The segment for the objects that a task will encode, if their size can be estimated and fits. The worker then
        need not ask for room."""
        expected = self.shapes.expected_bytes(task.batch.rows)
        if not expected or not self.arena.fits(expected, promised_bytes=self._owed(besides=task.batch)):
            return NO_SEGMENT
        segment = self._take(task.batch, expected, False)
        if segment is None:
            return NO_SEGMENT
        self._make_own(task, worker, segment)
        return segment.number

    def may_collate(self, batch: Batch, private_bytes: int) -> bool:
        """Whether there is room for the collated batch and for the ``private_bytes`` by which its worker grows."""
        return self._fits_now(batch, private_bytes + (self.shapes.expected_bytes(batch.rows) or 0))

    def drop_latest(self, due: Batch | None) -> None:
        """Find the workers that wait for room for batches other than ``due``, and make the worker with the latest batch
        drop its samples."""
        later = [(w, t) for w, t in self._waiting if t.need is not None and t.batch is not due]
        if later:
            worker, task = max(later, key=lambda pair: pair[1].batch.number)
            worker.drop(task)

    def forget_worker(self, worker: WorkerEntry) -> None:
        """Forget that the worker waits for room: it has crashed."""
        self._waiting = [(w, t) for w, t in self._waiting if w is not worker]

    def _answer(self, worker: WorkerEntry, task: Task, need: Need) -> bool:
        """Give a worker room, or make the worker drop its samples; False if the worker has to wait."""
        batch = task.batch
        if batch.evicted:
            worker.drop(task)
            return True
        self.release_room(task)
        other = need.template is not None and batch.template not in (None, need.template)
        if other and need.need_bytes and batch.rows_segment is not None and not batch.old_layouts:
            self._lay_out_anew(batch)
        segment = batch.rows_segment if need.template is not None else None
        if segment is None and need.need_bytes:
            if not self._fits_now(batch, need.need_bytes):
                return False
            segment = self._take(batch, need.need_bytes, batch is self.due)
            if segment is None:
                return False
            if need.template is None:
                self._make_own(task, worker, segment)
        if need.template is not None:
            batch.template = batch.template or need.template
            batch.rows_segment = segment
            self.shapes.note_size(need.need_bytes)
            self.shapes.note_sample(need.template.row_bytes)
        if segment is not None:
            worker.show(segment)
        task.need = None
        worker.peer.post(Room(need.task, NO_SEGMENT if segment is None else segment.number, batch.template))
        return True

    def _lay_out_anew(self, batch: Batch) -> None:
        """Set the batch's layout aside, because its samples differ from the layout; the next need decides. Rows that
        other workers wrote stay for now."""
        self.shapes.note_mismatch()
        assert batch.template is not None
        if batch.alone and batch.rows_segment is not None:
            self.arena.release(batch.rows_segment)
            batch.rows_segment = None
        batch.set_layout_aside()

    def keep_layout(self, batch: Batch) -> None:
        """Release the row segments that hold no rows: no worker writes rows of this batch any more."""
        for segment in batch.unused_row_segments():
            self.arena.release(batch.drop_row_segment(segment))

    def _fits_now(self, batch: Batch, need_bytes: int) -> bool:
        if self.arena.fits(need_bytes, promised_bytes=self._owed(besides=batch)):
            return True
        return batch is self.due and self._make_room(need_bytes, batch)

    def _take_from_others(self, batch: Batch | None, need_bytes: int) -> bool:
        """Make room for the due batch: ignore promises to other batches, then evict later batches. False if the due
        batch has to wait."""
        stuck: list[Batch] = []
        while not self.arena.fits(need_bytes):
            others = [b for b in self.open.values() if b is not batch and b not in stuck and b.held_bytes]
            if others and self._refetches:
                self.evict(others[-1])
                if others[-1].running:
                    if not self._is_stuck(others[-1]):
                        return False
                    stuck.append(others[-1])
            elif self.arena.is_returning or (self.arena.lent_count and not self.trainer_waits):
                return False
            else:
                self._passes_alone(need_bytes)
                break
        return True

    def _is_stuck(self, batch: Batch) -> bool:
        """Whether each task of the batch is queued at a worker that waits for room: the batch and these workers would
        wait for each other."""
        blocked = [worker for worker, first in self._waiting if first.need is not None]
        return sum(task.batch is batch for worker in blocked for task in worker.tasks.values()) >= batch.running

    # -- releasing memory -----------------------------------------------------------------

    def keep_within(self) -> None:
        """Evict the latest batches, but never the due batch, until the rest fits the budget, which may have shrunk."""
        while self._refetches and self.arena.in_use_bytes > self.arena.limit_bytes:
            later = [b for b in self.open.values() if b is not self.due and b.held_bytes and not b.evicted]
            if not later:
                return
            self.evict(later[-1])

    def evict(self, batch: Batch) -> None:
        """Release the batch's memory for a batch that is due sooner; the evicted batch is fetched again later."""
        batch.evicted = True
        batch.todo.clear()
        batch.wants_collate = False
        for worker, task in self._waiting:
            if task.batch is batch and task.need is not None:
                worker.drop(task)
        if not batch.running:
            self.start_over(batch)

    def start_over(self, batch: Batch) -> None:
        """Put an evicted batch back among the upcoming batches; none of its tasks is running any more."""
        self.release(batch)
        del self.open[batch.number]
        batch.evicted = batch.ready = False
        # Iterate over a copy made in one step, because the training thread adds batches without the lock.
        self.upcoming.insert(sum(b.number < batch.number for b in list(self.upcoming)), batch)

    def release(self, batch: Batch) -> None:
        """Release every segment of a batch."""
        for segment in batch.segments:
            self.arena.release(segment)
        batch.rows_segment = batch.text_segment = None
        batch.extra.clear()
        self.settled(batch)

    def settled(self, batch: Batch) -> None:
        """Note that the batch will take no more memory."""
        self._owing.discard(batch)

    def release_room(self, task: Task) -> None:
        """Release the room that a task was given but did not use."""
        if task.room is not None:
            self.arena.release(task.batch.extra.pop(task.room.number))
            task.room = None

    # -- inside ---------------------------------------------------------------------------

    def _take(self, batch: Batch, need_bytes: int, is_due: bool) -> Segment | None:
        segment = self.arena.take(need_bytes)
        if segment is None and is_due:
            wanted = f"batch {batch.number} needs {format_bytes(need_bytes)}, and this machine or container"
            refusal = self.arena.refusal
            if refusal is None:
                self.fail(
                    BudgetError(
                        f"{wanted} has {format_bytes(self.arena.headroom_bytes())} left; lower batch_size or "
                        "num_workers, or raise the container's memory limit"
                    )
                )
            else:
                self.fail(
                    BudgetError(
                        f"{wanted} refuses more shared memory ({refusal}); close files, or raise the limit on open "
                        "files (ulimit -n)"
                    )
                )
        return segment

    def _make_own(self, task: Task, worker: WorkerEntry, segment: Segment) -> None:
        task.room = segment
        task.batch.extra[segment.number] = segment
        worker.show(segment)

    def _owed(self, besides: Batch | None = None) -> int:
        return sum(b.owed_bytes for b in self._owing if b is not besides)

    def _passes_alone(self, need: int) -> None:
        if self._warned_alone or not need:
            return
        self._warned_alone = True
        self.notices.add(
            f"a batch needs {format_bytes(need)}, and the workers leave {format_bytes(self.arena.limit_bytes)} of the "
            "memory budget for batches, so batches pass one at a time; raise memory=, or lower batch_size or "
            "num_workers"
        )
