"""The dispatcher: which batch is opened when, which worker gets which rows, and what comes of it.

In:  batches drawn from the sampler, messages from workers, memory coming back from the user.
Out: tasks for workers; batches that are ready, in order.
Runs in: trainer. Every method is called under the engine's lock, by the training thread or the engine's own.

Three rules keep it alive and inside its budget:
- Batches are opened in order, and only if their bytes fit next to everything open, ready or lent. The batch that
  is due next is always opened; if it is larger than all of the budget it passes alone.
- A need that grows beyond what was promised waits, unless its batch is due: then later batches make room. They
  are fetched again afterwards, with the same randomness.
- A worker never holds memory that others could wait for: a worker asked to drop its samples does so at once.
"""

from __future__ import annotations

import signal
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.arena.pool import Arena
from penstock.arena.segment import Segment
from penstock.arena.template import Template, layout_of
from penstock.errors import BudgetError, WorkerError
from penstock.loader.batch import Batch
from penstock.loader.pace import Pace
from penstock.units import format_bytes
from penstock.workers.messages import (
    DROP,
    NO_SEGMENT,
    Collate,
    Done,
    Fetch,
    Learn,
    Need,
    Outcome,
    Room,
    Started,
)
from penstock.workers.pool import Handle
from penstock.workers.seeds import stretch_rows

_DEATHS_IN_A_ROW = 4
_RECENT_SIZES = 8
_AGREE_AFTER_CHANGE = 3
"""After samples changed shape once, this many batches must agree before rows are laid out in advance again."""


@dataclass(eq=False)
class Task:
    """Work handed to one worker."""

    number: int
    batch: Batch
    rows: range | None
    """Rows to fetch; None to collate the batch."""
    segment: Segment | None
    """Room given with the task for encoded objects, its own until used."""


@dataclass(eq=False)
class Seat:
    """One worker and what it has in hand."""

    handle: Handle
    tasks: dict[int, Task] = field(default_factory=dict)
    exhausted: bool = False
    has_unsent: bool = False
    """Whether its socket is full and being watched for room."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """How this pipeline hands out work; fixed for an epoch."""

    rows: bool
    """Rows are written in place, under torch's default collate."""
    splittable: bool
    """Several workers may fetch rows of one batch."""
    bound: bool
    """Batches belong to workers in turn, as in torch: iterable datasets and seeding="worker"."""
    in_order: bool
    batch_rows: int
    """Nominal batch length, for estimates."""


class Dispatcher:
    def __init__(
        self,
        *,
        arena: Arena,
        pace: Pace,
        order: Order,
        replace: Callable[[Seat], Seat],
        max_slots: int | None,
    ) -> None:
        """``replace`` buries a dead worker and starts another in its seat."""
        self.arena = arena
        self.pace = pace
        self.order = order
        self.seats: list[Seat] = []
        self.depth = 2
        """Batches that may be ahead of the user now."""
        self._slots = 3
        """Batches the arena may have, open or lent: the user's are besides the ones ahead."""
        self._most_in_hand = 1
        self.depth_wanted: int | None = None
        self.depth_ceiling: int | None = None
        self.trainer_waits = False
        self.user_holds = 1
        """Batches the user still held when last asking for one; a for loop holds one."""
        self.paused = False
        self.upcoming: deque[Batch] = deque()
        self.open: dict[int, Batch] = {}
        self.restarts = 0
        self.failure: BaseException | None = None
        """Ends the epoch: raised by the next next()."""
        self._replace = replace
        self._max_slots = max_slots
        self._splittable = order.splittable
        self._next_task = 0
        self._tasks: dict[int, Seat] = {}
        self._waiting: list[tuple[Seat, Need]] = []
        self._owing: set[Batch] = set()
        """Open batches that were promised memory they have not taken yet."""
        self._sizes: deque[int] = deque(maxlen=_RECENT_SIZES)
        self._template: Template | None = None
        self._last_template: Template | None = None
        self._agreeing = 0
        self._shapes_changed = False
        self._deaths: dict[tuple[int, int], int] = {}
        """(batch, first row) -> workers that died with it in hand."""
        self._deaths_at_start = 0
        self._warned_alone = False

    # -- gauges -----------------------------------------------------------------------

    @property
    def shared_batches(self) -> bool:
        return self._splittable

    def _take_pace(self) -> None:
        """What the latest times mean for tasks and depth; once per turn, since it costs more than it changes."""
        rows = self._rows_per_task(self.order.batch_rows)
        self._most_in_hand = self.pace.tasks_queued(rows, in_order=self.order.in_order)
        depth = self.depth_wanted or self.pace.depth(
            self.order.batch_rows, len(self.seats), splittable=self._splittable, in_order=self.order.in_order
        )
        self.depth = depth if self.depth_ceiling is None else max(1, min(depth, self.depth_ceiling))
        slots = self.depth + self.user_holds
        self._slots = slots if self._max_slots is None else min(slots, self._max_slots)

    # -- what happens -------------------------------------------------------------------

    def on_message(self, seat: Seat, message: Any) -> None:
        if isinstance(message, Done):
            self._on_done(seat, message)
        elif isinstance(message, Need):
            if not self._answer(seat, message):
                self._waiting.append((seat, message))
        elif isinstance(message, Started):
            seat.handle.started = True
            seat.handle.private_bytes = message.private_bytes
            self._deaths_at_start = 0

    def on_death(self, seat: Seat) -> None:
        """A worker is gone. What it had in hand is fetched again by whoever is free."""
        tasks, seat.tasks = list(seat.tasks.values()), {}
        self._waiting = [(s, n) for s, n in self._waiting if s is not seat]
        started, pid = seat.handle.started, seat.handle.pid
        # Until it is reaped it might still write into the rows that are about to be given to somebody else.
        exit_code = seat.handle.bury(0.0)
        for position, task in enumerate(tasks):
            del self._tasks[task.number]
            if position == 0:
                self._count_death(task, pid, exit_code)
            self._undo(task)
        if not started and not tasks:
            self._deaths_at_start += 1
            if self._deaths_at_start >= _DEATHS_IN_A_ROW:
                self.failure = WorkerError(f"workers die while starting; the last one {_how(pid, exit_code)}")
        if self.order.bound:
            self.failure = WorkerError(
                f"DataLoader worker (pid(s) {pid}) exited unexpectedly: it {_how(pid, exit_code)}"
            )
        if self.failure is None:
            self.seats[self.seats.index(seat)] = self._replace(seat)
            self.restarts += 1
        else:
            self.seats.remove(seat)

    def progress(self) -> None:
        """Hand out everything that can be handed out now."""
        self.arena.collect_returned()
        self._answer_waiting()
        if self.paused or self.failure is not None:
            return
        self._take_pace()
        if self.order.bound:
            self._assign_bound()
        else:
            self._assign_free()
        self._unblock_due()

    def take_ready(self) -> Batch | None:
        """The batch to hand to the user now, if there is one. Exhausted turns are skipped."""
        while self.open:
            number, batch = next(iter(self.open.items()))
            if not batch.ready:
                if self.order.in_order:
                    return None
                number, batch = next(((n, b) for n, b in self.open.items() if b.ready), (number, batch))
                if not batch.ready:
                    return None
            del self.open[number]
            if batch.result is not None and batch.result.kind == "exhausted":
                continue
            return batch
        return None

    def release_idle(self) -> None:
        """Nobody has asked for a while: give the memory back. Work already done is done again on return."""
        self.paused = True
        if not self.order.bound:
            for batch in reversed(list(self.open.values())):
                self._evict(batch)
        self.arena.release_free()

    def abandon(self) -> None:
        """Forget the rest of the epoch; tasks already running come to rest first."""
        self.paused = True
        for batch in list(self.open.values()):
            self._evict(batch)

    @property
    def is_idle(self) -> bool:
        return not self._tasks

    def begin_epoch(self) -> None:
        """After ``abandon`` has come to rest, or after the last batch: as new, with the same workers."""
        self.open.clear()
        self.upcoming.clear()
        self.paused = False
        for seat in self.seats:
            seat.exhausted = False

    @property
    def all_exhausted(self) -> bool:
        """Whether no worker has anything more to give and nothing is left to hand out."""
        return (
            self.order.bound
            and all(seat.exhausted for seat in self.seats)
            and not any(b.running or (b.ready and b.result is not None and b.result.kind != "exhausted") or b.error
                        for b in self.open.values())
        )  # fmt: skip

    def release(self, batch: Batch) -> None:
        """Take back every segment of a batch that will not be handed out."""
        for segment in batch.segments:
            self.arena.give_back(segment)
        batch.rows_segment = None
        batch.extra.clear()

    # -- handing out ----------------------------------------------------------------------

    def _assign_free(self) -> None:
        while True:
            seat = self._idlest()
            if seat is None:
                return
            batch = self._batch_with_work() or self._open_next()
            if batch is None:
                return
            self._hand_out(seat, batch)

    def _assign_bound(self) -> None:
        """Open batches for workers in turn; each worker works off its own."""
        while (batch := self._open_next()) is not None:
            pass
        for seat in self.seats:
            for batch in self.open.values():
                if len(seat.tasks) >= 2 or not seat.handle.started:
                    break
                if batch.worker_id != seat.handle.worker_id or not batch.todo:
                    continue
                if seat.exhausted:
                    batch.todo.clear()
                    batch.result, batch.ready = Outcome("exhausted"), True
                    continue
                self._hand_out(seat, batch)

    def _idlest(self) -> Seat | None:
        best = None
        for seat in self.seats:
            in_hand = len(seat.tasks)
            if seat.handle.started and in_hand < self._most_in_hand and (best is None or in_hand < len(best.tasks)):
                best = seat
        return best

    def _rows_per_task(self, batch_rows: int) -> int:
        return self.pace.rows_per_task(batch_rows, len(self.seats)) if self._splittable else batch_rows

    def _batch_with_work(self) -> Batch | None:
        for batch in self.open.values():
            if not batch.evicted and (batch.todo or batch.wants_collate):
                return batch
        return None

    def _hand_out(self, seat: Seat, batch: Batch) -> None:
        if batch.wants_collate:
            batch.wants_collate = False
            task = self._new_task(seat, batch, None)
            segment = self._room_ahead(task)
            for number in {p for part in batch.parts() for p in (part.segment, part.extra_segment)} - {NO_SEGMENT}:
                self._show(seat, number)
            seat.handle.post(Collate(task.number, batch.parts(), batch.seed, segment))
            return
        rows = batch.take_rows(self._rows_per_task(batch.rows), stretch_rows(batch.rows))
        task = self._new_task(seat, batch, rows)
        by_template = batch.template is not None
        if batch.template is not None:
            segment = NO_SEGMENT
            if batch.rows_segment is not None:
                segment = batch.rows_segment.number
                self._show(seat, segment)
            if seat.handle.template is not batch.template:
                seat.handle.template = batch.template
                seat.handle.post(Learn(batch.template))
        else:
            segment = NO_SEGMENT if self.order.rows else self._room_ahead(task)
        indices = batch.indices if len(rows) == batch.rows else batch.indices[rows.start : rows.stop]
        seat.handle.post(
            Fetch(
                task=task.number,
                indices=indices,
                first_row=rows.start,
                batch_rows=batch.rows,
                seed=batch.seed,
                segment=segment,
                by_template=by_template,
                alone=batch.alone,
            )
        )

    def _new_task(self, seat: Seat, batch: Batch, rows: range | None) -> Task:
        task = Task(self._next_task, batch, rows, None)
        self._next_task += 1
        seat.tasks[task.number] = task
        self._tasks[task.number] = seat
        batch.running += 1
        return task

    def _room_ahead(self, task: Task) -> int:
        """Room for an encoded result, if its size can be guessed and fits: saves the worker asking."""
        batch = task.batch
        if not self._sizes or not (batch.alone or task.rows is None):
            return NO_SEGMENT
        guess = max(self._sizes)
        if not guess or not self.arena.fits(guess, promised_bytes=self._owed(besides=batch)):
            return NO_SEGMENT
        segment = self.arena.take(guess)
        if segment is None:
            return NO_SEGMENT
        task.segment = segment
        batch.extra[segment.number] = segment
        self._show(self._tasks[task.number], segment.number)
        return segment.number

    def _show(self, seat: Seat, number: int) -> None:
        """Make sure the worker has the segment mapped."""
        if not seat.handle.knows(number):
            seat.handle.attach(self.arena.segment(number))

    # -- admission ------------------------------------------------------------------------

    def _open_next(self) -> Batch | None:
        if not self.upcoming or len(self.open) >= self.depth:
            return None
        batch = self.upcoming[0]
        due = not self.open
        if not due and len(self.open) + self.arena.lent_count >= self._slots:
            return None
        if batch.failure is not None:
            self.upcoming.popleft()
            batch.ready = True
            self.open[batch.number] = batch
            return self._open_next()
        need = self._expected_bytes(batch)
        if need is None:
            # Nothing is known yet. Workers that write rows ask as soon as they hold one sample, so a few may start.
            if not due and (self._splittable or not self.order.rows or len(self.open) >= len(self.seats)):
                return None
            need = 0
        if not self.arena.fits(need, promised_bytes=self._owed()) and not (due and self._make_way(need)):
            return None
        batch.open(need)
        if self._template is not None and batch.rows:
            segment = self.arena.take(need) if need else None
            if need and segment is None:
                if due:
                    self.failure = self._no_memory(batch, need)
                return None
            batch.template, batch.rows_segment = self._template, segment
        elif need:
            self._owing.add(batch)
        self.upcoming.popleft()
        self.open[batch.number] = batch
        if self.order.bound:
            batch.worker_id = batch.number % len(self.seats)
        return batch

    def _make_way(self, need: int) -> bool:
        """Room for the batch that is due: what the user still holds becomes the user's, or it passes alone."""
        if not self.arena.lent_count and not self.open:
            self._passes_alone(need)
            return True
        # While the user computes, the loop variable still holds the last batch; it comes back by itself.
        if not self.trainer_waits:
            return False
        while not self.arena.fits(need, promised_bytes=self._owed()):
            if not self.arena.hand_over_oldest():
                self._passes_alone(need)
                break
        return True

    def _passes_alone(self, need: int) -> None:
        if self._warned_alone or not need:
            return
        self._warned_alone = True
        warnings.warn(
            f"a batch needs {format_bytes(need)} and the memory budget leaves {format_bytes(self.arena.limit_bytes)} "
            "for batches: such batches pass one at a time; raise memory= or lower batch_size",
            RuntimeWarning,
            stacklevel=2,
        )

    def _expected_bytes(self, batch: Batch) -> int | None:
        """What the batch will take, as far as known; None before anything is."""
        if self.order.rows and self._template is not None:
            return layout_of(self._template, batch.rows).total_bytes
        if not self._sizes:
            return None
        expected = max(self._sizes)
        # Parts and the batch made of them exist side by side for a moment.
        return expected if self.order.rows or not self._splits(batch) else 2 * expected

    def _splits(self, batch: Batch) -> bool:
        return self._splittable and self._rows_per_task(batch.rows) < batch.rows

    def _owed(self, besides: Batch | None = None) -> int:
        return sum(b.owed_bytes for b in self._owing if b is not besides)

    def _no_memory(self, batch: Batch, need: int) -> BudgetError:
        return BudgetError(
            f"batch {batch.number} needs {format_bytes(need)} and this machine or container has "
            f"{format_bytes(self.arena.headroom_bytes())} left; lower batch_size or num_workers, or raise the "
            "container's memory limit"
        )

    # -- needs ----------------------------------------------------------------------------

    def _answer(self, seat: Seat, need: Need) -> bool:
        """Give a worker the room it asks for, or tell it to drop its samples; False if it has to wait."""
        task = seat.tasks[need.task]
        batch = task.batch
        if batch.evicted:
            seat.handle.post(Room(need.task, DROP, None))
            return True
        if need.template is not None and batch.rows_segment is not None:
            self._give(seat, need, batch.rows_segment)
            return True
        if task.segment is not None:
            self.arena.give_back(batch.extra.pop(task.segment.number))
            task.segment = None
        if need.need_bytes == 0:
            batch.template = batch.template or need.template
            seat.handle.post(Room(need.task, NO_SEGMENT, batch.template))
            return True
        if not self._fits_now(batch, need.need_bytes):
            return False
        segment = self.arena.take(need.need_bytes)
        if segment is None:
            if batch is self._due():
                self.failure = self._no_memory(batch, need.need_bytes)
            return False
        if need.template is not None:
            batch.template, batch.rows_segment = need.template, segment
            self._sizes.append(need.need_bytes)
        else:
            batch.extra[segment.number] = segment
            task.segment = segment
        self._give(seat, need, segment)
        return True

    def _give(self, seat: Seat, need: Need, segment: Segment) -> None:
        self._show(seat, segment.number)
        seat.handle.post(Room(need.task, segment.number, seat.tasks[need.task].batch.template))

    def _fits_now(self, batch: Batch, need_bytes: int) -> bool:
        owed = self._owed(besides=batch)
        if self.arena.fits(need_bytes, promised_bytes=owed):
            return True
        if batch is not self._due():
            return False
        # The batch due next comes first: others' promises do not count, then their memory.
        while not self.arena.fits(need_bytes):
            if self.trainer_waits and self.arena.hand_over_oldest():
                continue
            others = [b for b in self.open.values() if b is not batch and b.held_bytes]
            if others and not self.order.bound:
                self._evict(others[-1])
                if others[-1].running:
                    return False
                continue
            if self.arena.lent_count and not self.trainer_waits:
                return False
            self._passes_alone(need_bytes)
            return True
        return True

    def _due(self) -> Batch | None:
        return next(iter(self.open.values()), None)

    def _answer_waiting(self) -> None:
        if self._waiting:
            self._waiting = [(seat, need) for seat, need in self._waiting if not self._answer(seat, need)]

    def _unblock_due(self) -> None:
        """If the due batch has work and every worker is waiting for room for later ones, one of them must let go."""
        due = self._due()
        if due is None or not self._waiting or not (due.todo or due.wants_collate) or self._idlest() is not None:
            return
        later = [(s, n) for s, n in self._waiting if s.tasks[n.task].batch is not due]
        if later:
            seat, need = max(later, key=lambda pair: pair[0].tasks[pair[1].task].batch.number)
            self._waiting.remove((seat, need))
            seat.handle.post(Room(need.task, DROP, None))

    def _evict(self, batch: Batch) -> None:
        """Give the batch's memory to one that is due sooner; it is fetched again later."""
        batch.evicted = True
        batch.todo.clear()
        batch.wants_collate = False
        self._answer_waiting_of(batch)
        if not batch.running:
            self._start_over(batch)

    def _answer_waiting_of(self, batch: Batch) -> None:
        kept = []
        for seat, need in self._waiting:
            if seat.tasks[need.task].batch is batch:
                seat.handle.post(Room(need.task, DROP, None))
            else:
                kept.append((seat, need))
        self._waiting = kept

    def _start_over(self, batch: Batch) -> None:
        self.release(batch)
        self._owing.discard(batch)
        del self.open[batch.number]
        batch.evicted = batch.ready = False
        place = sum(1 for b in self.upcoming if b.number < batch.number)
        self.upcoming.insert(place, batch)

    # -- results --------------------------------------------------------------------------

    def _on_done(self, seat: Seat, done: Done) -> None:
        task = seat.tasks.pop(done.task)
        del self._tasks[done.task]
        if done.private_bytes:
            seat.handle.private_bytes = done.private_bytes
        batch, outcome = task.batch, done.outcome
        self._deaths.pop(_place(task), None)
        if batch.evicted:
            batch.running -= 1
            if not batch.running:
                self._start_over(batch)
            return
        if outcome.kind == "dropped":
            self._undo(task)
            return
        batch.running -= 1
        self._drop_unused_room(task, outcome)
        if done.error is not None:
            batch.note_error(0 if task.rows is None else task.rows.start, done.error)
        elif outcome.kind == "cannot travel":
            self._splittable = False
            self._evict(batch)
            return
        elif outcome.kind == "exhausted":
            seat.exhausted = True
            batch.result = outcome
        elif outcome.kind in ("rows", "part"):
            assert task.rows is not None
            self.pace.note(outcome.rows if outcome.kind == "rows" else len(task.rows), done.fetch_s)
            batch.pieces[task.rows.start] = (task.rows, outcome)
        else:
            if task.rows is not None:
                self.pace.note(len(task.rows), done.fetch_s + done.collate_s)
            self._sizes.append(outcome.used_bytes)
            batch.result = outcome
        if batch.at_rest and not batch.wants_collate:
            self._settle(batch)

    def _settle(self, batch: Batch) -> None:
        """Every task of the batch is done: what became of it?"""
        if batch.error is not None or (batch.result is not None and batch.result.kind in ("exhausted", "inline")):
            self.release(batch)
            if batch.result is not None and batch.result.kind == "inline" and self.order.rows:
                self._note_mismatch()
        elif batch.result is not None:
            # The encoded result stays; rows and parts it was made of do not.
            keep = batch.extra.pop(batch.result.segment)
            self.release(batch)
            batch.extra[keep.number] = keep
            if self.order.rows:
                self._note_mismatch()
        elif batch.is_rows:
            self._note_match(batch)
        else:
            batch.wants_collate = True
            return
        batch.ready = True
        self._owing.discard(batch)

    def _drop_unused_room(self, task: Task, outcome: Outcome) -> None:
        if task.segment is not None and (
            outcome.kind not in ("object", "part") or outcome.segment != task.segment.number
        ):
            self.arena.give_back(task.batch.extra.pop(task.segment.number))
        task.segment = None

    def _undo(self, task: Task) -> None:
        """The task was never done: its rows, or the collation, are to be handed out again."""
        batch = task.batch
        batch.running -= 1
        if task.segment is not None:
            self.arena.give_back(batch.extra.pop(task.segment.number))
        if batch.evicted:
            if not batch.running:
                self._start_over(batch)
        elif task.rows is None:
            batch.wants_collate = True
        else:
            batch.todo.appendleft(task.rows)

    def _count_death(self, task: Task, pid: int | None, exit_code: int | None) -> None:
        deaths = self._deaths[_place(task)] = self._deaths.get(_place(task), 0) + 1
        if deaths >= _DEATHS_IN_A_ROW:
            batch, rows = task.batch, task.rows or range(task.batch.rows)
            indices = batch.indices if len(rows) == batch.rows else batch.indices[rows.start : rows.stop]
            self.failure = WorkerError(
                f"{deaths} workers in a row died while fetching batch {batch.number}, indices {indices}; the last one "
                f"{_how(pid, exit_code)}"
            )

    def _note_match(self, batch: Batch) -> None:
        if batch.template is None:
            return
        self._sizes.append(layout_of(batch.template, batch.rows).total_bytes)
        self._agreeing = self._agreeing + 1 if batch.template == self._last_template else 1
        self._last_template = batch.template
        if self._template is None and self._agreeing >= (_AGREE_AFTER_CHANGE if self._shapes_changed else 1):
            self._template = batch.template

    def _note_mismatch(self) -> None:
        self._shapes_changed = True
        self._template = None
        self._agreeing = 0


def _place(task: Task) -> tuple[int, int]:
    return task.batch.number, -1 if task.rows is None else task.rows.start


def _how(pid: int | None, exit_code: int | None) -> str:
    if exit_code is None or pid is None:
        return "could not be asked why"
    if exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = str(-exit_code)
        return f"(pid {pid}) was killed by signal {name}"
    return f"(pid {pid}) exited with status {exit_code}"
