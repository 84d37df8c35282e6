"""Admission: which batches may take memory, and who makes room when it is short.

In:  batches drawn from the sampler, workers asking for room, memory coming back from the user.
Out: batches opened in order; answers to workers.
Runs in: trainer, under the engine's lock.

Three rules keep the pipeline alive and inside its budget:
- Batches are opened in order, and only if their bytes fit next to everything open, ready or lent. The batch that
  is due next is always opened; if it is larger than all of the budget it passes alone.
- A need that grows beyond what was promised waits, unless its batch is due: then later batches make room. They
  are fetched again afterwards, with the same randomness.
- What the user goes on holding while asking for more becomes the user's own, outside the budget.
"""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable

from penstock.arena.arena import Arena
from penstock.arena.segment import Segment
from penstock.errors import BudgetError
from penstock.loader.engine.batch import Batch
from penstock.loader.engine.estimates import Shapes
from penstock.loader.engine.rules import LoaderRules
from penstock.loader.engine.seat import Seat, Task
from penstock.units import format_bytes
from penstock.workers.protocol import NO_SEGMENT, Need, Room


class Admission:
    def __init__(
        self, arena: Arena, rules: LoaderRules, *, refetches: bool, fail: Callable[[BaseException], None]
    ) -> None:
        """``refetches``: whether a batch may be dropped and fetched again; ``fail`` ends the epoch with an error."""
        self.arena = arena
        self.shapes = Shapes(rules)
        self.upcoming: deque[Batch] = deque()
        """Drawn and not opened, in order."""
        self.open: dict[int, Batch] = {}
        """Being filled, or ready and not taken, in order."""
        self.trainer_waits = False
        self.user_holds = 1
        """Batches the user still held when last asking for one; a for loop holds one."""
        self._refetches = refetches
        self._fail = fail
        self._waiting: list[tuple[Seat, Task]] = []
        """Workers that wait for room, and with which task; answered ones have no need any more."""
        self._owing: set[Batch] = set()
        """Open batches that were promised memory they have not taken yet."""
        self._warned_alone = False

    @property
    def due(self) -> Batch | None:
        """The batch to be delivered next, if it is open: one that was evicted may not be, while later ones are."""
        first = next(iter(self.open.values()), None)
        if first is not None and self.upcoming and self.upcoming[0].number < first.number:
            return None
        return first

    @property
    def is_next_due(self) -> bool:
        """Whether the first of those not opened yet is the one to be delivered next."""
        return bool(self.upcoming) and self.due is None

    def most_open(self, rows: int) -> int:
        """How many batches of ``rows`` rows the budget has room for, besides what the user holds."""
        expected = self.shapes.expected_bytes(rows)
        return max(1, self.arena.limit_bytes // expected - self.user_holds) if expected else sys.maxsize

    # -- opening ------------------------------------------------------------------------

    def open_next(
        self, *, slots: int, start_blind: int, copies: int, rows_ahead: bool, private_bytes: int
    ) -> Batch | None:
        """Open the next batch if it may be.

        ``slots`` bounds batches open or lent, ``start_blind`` those opened before any size is known, ``copies``
        is how often the batch exists at once while it is made, ``rows_ahead`` whether rows are laid out now,
        ``private_bytes`` what its worker will take besides.
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
            if not self.arena.fits(wanted, promised_bytes=self._owed()) and not (is_due and self._make_way(wanted)):
                return None
            batch.open(need)
            if not (self._lay_out(batch, need, is_due) if rows_ahead else self._promise(batch, need)):
                return None
        self.upcoming.popleft()
        is_last = not self.open or batch.number > next(reversed(self.open))
        self.open[batch.number] = batch
        batch.ready = batch.failure is not None
        if not is_last:
            # It had been evicted, and later ones were not: they wait behind it again.
            self.open = dict(sorted(self.open.items()))
        return batch

    def _lay_out(self, batch: Batch, need: int, is_due: bool) -> bool:
        """Set the rows' segment aside now, if samples are known well enough."""
        if self.shapes.template is None or not batch.rows:
            return self._promise(batch, need)
        batch.template = self.shapes.template
        if need:
            batch.rows_segment = self._take(batch, need, is_due)
        return not need or batch.rows_segment is not None

    def _promise(self, batch: Batch, need: int) -> bool:
        if need:
            self._owing.add(batch)
        return True

    def _make_way(self, need: int) -> bool:
        """Room for the batch that is due and not open yet."""
        # While the user computes, the loop variable still holds the last batch; it comes back by itself.
        while self.trainer_waits and not self.arena.fits(need) and self.arena.hand_over_oldest():
            pass
        return self._take_from_others(None, need)

    # -- asking for room ------------------------------------------------------------------

    def ask(self, seat: Seat, need: Need) -> None:
        """A worker holds samples and waits for room."""
        task = seat.tasks[need.task]
        task.need = need
        if not self._answer(seat, task, need):
            self._waiting.append((seat, task))

    def answer_waiting(self) -> None:
        if not self._waiting:
            return
        for seat, task in self._waiting:
            # Answering one may have meant telling another to drop its samples.
            if task.need is not None:
                self._answer(seat, task, task.need)
        self._clear_the_way()
        self._waiting = [(seat, task) for seat, task in self._waiting if task.need is not None]

    def _clear_the_way(self) -> None:
        """Workers that wait for room for a later batch, with the due one queued behind, let go: it would wait for them
        and they for it."""
        due = self.due
        if due is None or not self._refetches:
            return
        for seat, task in self._waiting:
            if task.batch is not due and task.need is not None and any(t.batch is due for t in seat.tasks.values()):
                seat.drop(task)

    def room_ahead(self, task: Task, seat: Seat) -> int:
        """Room for what a task will encode, if its size can be guessed and fits: saves the worker asking."""
        guess = self.shapes.expected_bytes(task.batch.rows)
        if not guess or not self.arena.fits(guess, promised_bytes=self._owed(besides=task.batch)):
            return NO_SEGMENT
        segment = self._take(task.batch, guess, False)
        if segment is None:
            return NO_SEGMENT
        self._make_own(task, seat, segment)
        return segment.number

    def may_collate(self, batch: Batch, private_bytes: int) -> bool:
        """Whether there is room for what the batch becomes, and for ``private_bytes`` its collator takes besides."""
        return self._fits_now(batch, private_bytes + (self.shapes.expected_bytes(batch.rows) or 0))

    def let_go_later(self, due: Batch | None) -> None:
        """Have one worker that waits for a batch other than ``due`` let go: the latest."""
        later = [(s, t) for s, t in self._waiting if t.need is not None and t.batch is not due]
        if later:
            seat, task = max(later, key=lambda pair: pair[1].batch.number)
            seat.drop(task)

    def forget_seat(self, seat: Seat) -> None:
        """Its worker is dead and waits for nothing any more."""
        self._waiting = [(s, t) for s, t in self._waiting if s is not seat]

    def _answer(self, seat: Seat, task: Task, need: Need) -> bool:
        """Give a worker room, or tell it to drop its samples; False if it has to wait."""
        batch = task.batch
        if batch.evicted:
            seat.drop(task)
            return True
        self.return_room(task)
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
                self._make_own(task, seat, segment)
        if need.template is not None:
            batch.template = batch.template or need.template
            batch.rows_segment = segment
            self.shapes.note_size(need.need_bytes)
            self.shapes.note_sample(need.template.row_bytes)
        if segment is not None:
            seat.show(segment)
        task.need = None
        seat.handle.post(Room(need.task, NO_SEGMENT if segment is None else segment.number, batch.template))
        return True

    def _lay_out_anew(self, batch: Batch) -> None:
        """Its samples do not look as expected: the next need decides. What others have written stays for now."""
        self.shapes.note_mismatch()
        assert batch.template is not None
        if batch.alone and batch.rows_segment is not None:
            self.arena.release(batch.rows_segment)
            batch.rows_segment = None
        batch.set_layout_aside()

    def keep_layout(self, batch: Batch) -> None:
        """All its rows are at rest: take back the segments for rows that none were written to."""
        for segment in batch.unused_row_segments():
            self.arena.release(batch.drop_row_segment(segment))

    def _fits_now(self, batch: Batch, need_bytes: int) -> bool:
        if self.arena.fits(need_bytes, promised_bytes=self._owed(besides=batch)):
            return True
        if batch is not self.due:
            return False
        while self.trainer_waits and not self.arena.fits(need_bytes) and self.arena.hand_over_oldest():
            pass
        return self._take_from_others(batch, need_bytes)

    def _take_from_others(self, batch: Batch | None, need_bytes: int) -> bool:
        """Room for the due batch: others' promises do not count, then their memory. False if it has to wait."""
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
        """Whether all its tasks are behind others whose workers wait for room: they would wait for each other."""
        blocked = [seat for seat, first in self._waiting if first.need is not None]
        return sum(task.batch is batch for seat in blocked for task in seat.tasks.values()) >= batch.running

    # -- giving memory back ---------------------------------------------------------------

    def keep_within(self) -> None:
        """The budget has shrunk: the latest batches go back until the rest fits, the due one excepted."""
        while self._refetches and self.arena.in_use_bytes > self.arena.limit_bytes:
            later = [b for b in self.open.values() if b is not self.due and b.held_bytes and not b.evicted]
            if not later:
                return
            self.evict(later[-1])

    def evict(self, batch: Batch) -> None:
        """Give the batch's memory to one that is due sooner; it is fetched again later."""
        batch.evicted = True
        batch.todo.clear()
        batch.wants_collate = False
        for seat, task in self._waiting:
            if task.batch is batch and task.need is not None:
                seat.drop(task)
        if not batch.running:
            self.start_over(batch)

    def start_over(self, batch: Batch) -> None:
        """An evicted batch whose tasks have all come to rest goes back to where it came from."""
        self.release(batch)
        del self.open[batch.number]
        batch.evicted = batch.ready = False
        self.upcoming.insert(sum(1 for b in self.upcoming if b.number < batch.number), batch)

    def release(self, batch: Batch) -> None:
        """Take back every segment of a batch."""
        for segment in batch.segments:
            self.arena.release(segment)
        batch.rows_segment = None
        batch.extra.clear()
        self.settled(batch)

    def settled(self, batch: Batch) -> None:
        """The batch has all the memory it will ever have."""
        self._owing.discard(batch)

    def return_room(self, task: Task) -> None:
        """A task did not use the room it was given."""
        if task.room is not None:
            self.arena.release(task.batch.extra.pop(task.room.number))
            task.room = None

    # -- inside ---------------------------------------------------------------------------

    def _take(self, batch: Batch, need_bytes: int, is_due: bool) -> Segment | None:
        segment = self.arena.take(need_bytes)
        if segment is None and is_due:
            self._fail(
                BudgetError(
                    f"batch {batch.number} needs {format_bytes(need_bytes)} and this machine or container has "
                    f"{format_bytes(self.arena.headroom_bytes())} left; lower batch_size or num_workers, or raise the "
                    "container's memory limit"
                )
            )
        return segment

    def _make_own(self, task: Task, seat: Seat, segment: Segment) -> None:
        task.room = segment
        task.batch.extra[segment.number] = segment
        seat.show(segment)

    def _owed(self, besides: Batch | None = None) -> int:
        return sum(b.owed_bytes for b in self._owing if b is not besides)

    def _passes_alone(self, need: int) -> None:
        if self._warned_alone or not need:
            return
        self._warned_alone = True
        warnings.warn(
            f"a batch needs {format_bytes(need)} and the workers leave {format_bytes(self.arena.limit_bytes)} of the "
            "memory budget for batches: they pass one at a time; raise memory=, or lower batch_size or num_workers",
            RuntimeWarning,
            stacklevel=2,
        )
