"""The dispatcher: which worker gets which rows of which batch, and what comes of it.

In:  batches drawn from the sampler, messages from workers.
Out: tasks for workers; batches that are ready, in order.
Runs in: trainer. Every method is called under the engine's lock, by the training thread or the engine's own.

A worker that is free gets the next rows of the first batch that has any; when all rows are handed out, admission
opens the next batch. So a slow sample delays its own batch and nobody else's work. Batches of iterable datasets,
and all batches under seeding="worker", belong to workers in turn instead, as in torch.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from penstock.arena.arena import Arena
from penstock.errors import WorkerError
from penstock.loader.engine.admission import Admission
from penstock.loader.engine.batch import Batch
from penstock.loader.engine.crashes import DeathToll, how_it_died
from penstock.loader.engine.estimates import Pace
from penstock.loader.engine.order import Order
from penstock.loader.engine.roster import Roster, most_more
from penstock.loader.engine.rules import LoaderRules
from penstock.loader.engine.seat import Seat, Task
from penstock.workers.protocol import NO_SEGMENT, Collate, Done, Fetch, Need, Outcome, Resume, Started
from penstock.workers.stretches import stretch_rows

_REAP_S = 0.5
"""How long a worker that has hung up may take to be gone by itself, so that its exit status is its own."""
_BOUND_IN_HAND = 2
"""Tasks a worker with batches of its own may have: one in work and one waiting."""
_MANY_IN_HAND = 4
"""With fewer tasks ahead, a worker whose next ones are quicker than most soon waits for more."""


class Dispatcher:
    def __init__(
        self,
        *,
        arena: Arena,
        rules: LoaderRules,
        pace: Pace,
        order: Order,
        workers: int,
        memory_bytes: int,
        deaths: DeathToll,
    ) -> None:
        self._rules = rules
        self.pace = pace
        self.order = order
        self.roster = Roster(workers)
        self._memory_bytes = memory_bytes
        self.admission = Admission(arena, rules, refetches=not order.bound, fail=self._fail)
        self.depth = 2
        """Batches that may be ahead of the user now."""
        self.depth_wanted: int | None = None
        self.depth_ceiling: int | None = None
        self.paused = False
        self.failure: BaseException | None = None
        """Ends the epoch: raised by the next next()."""
        self._deaths = deaths
        self._slots = 3
        self._most_in_hand = 1
        self._tasks: dict[int, Task] = {}
        self._next_task = 0

    # -- what happens -------------------------------------------------------------------

    def on_message(self, seat: Seat, message: Any) -> None:
        if isinstance(message, Done):
            self._on_done(seat, message)
            return
        self.roster.has_changed = True
        if isinstance(message, Need):
            seat.handle.private_bytes = max(seat.handle.private_bytes, message.private_bytes)
            self.admission.ask(seat, message)
        elif isinstance(message, Started):
            seat.handle.started = True
            seat.handle.private_bytes = seat.base_bytes = message.private_bytes
            seat.handle.trace_fd = message.trace_fd
            self._deaths.note_start()

    def on_death(self, seat: Seat) -> None:
        """A worker is gone. What it had in hand is fetched again by whoever is free."""
        self.admission.forget_seat(seat)
        # Until it is reaped it might still write into the rows that are about to be given to somebody else.
        how = how_it_died(seat.handle.pid, seat.handle.reap(time.monotonic() + _REAP_S))
        seat.ending = how
        error = self._deaths.count(seat, how, workers=self.roster.workers)
        if error is not None:
            self._fail(error)
        tasks, seat.tasks = list(seat.tasks.values()), {}
        for task in tasks:
            del self._tasks[task.number]
            self._undo(task)
        self.roster.remove(seat, replace=self.failure is None and not seat.leaving)

    def could_not_start(self, worker_id: int, problem: Exception) -> None:
        self.roster.arriving.discard(worker_id)
        self._fail(WorkerError(f"worker {worker_id} could not be started: {problem}"))

    def progress(self) -> None:
        """Hand out everything that can be handed out now."""
        self.admission.arena.collect_returned()
        self.admission.answer_waiting()
        if self.paused or self.failure is not None:
            return
        if not self.roster.workers:
            self._give_up_unfinished()
            return
        if self.order.bound:
            self._take_pace()
            self._assign_bound()
        elif self._is_wanted():
            self._take_pace()
            self._assign_free()

    @property
    def memory_bytes(self) -> int:
        """The budget: the arena, and what workers take for themselves."""
        return self._memory_bytes

    def set_memory(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self.roster.has_changed = True

    def keep_within_memory(self) -> None:
        """Leave the arena what the workers do not take; the latest batches go back if that is less than they have."""
        if self.roster.has_changed:
            self._limit_arena()
        self.admission.keep_within()

    @property
    def queues_many(self) -> bool:
        """Whether tasks are so short that workers are given many ahead: none runs out while reports gather."""
        return self._most_in_hand >= _MANY_IN_HAND

    def take_for_trainer(self) -> Batch | None:
        """The next batch, for the training thread to fetch itself, when there are no workers to do it."""
        if self.roster.workers or not self.admission.is_next_due:
            return None
        return self.admission.upcoming.popleft()

    def take_ready(self) -> Batch | None:
        """The batch to hand to the user now, if there is one. Exhausted turns are skipped."""
        batches = self.admission.open
        while batches:
            batch = self.admission.due
            if not self.order.in_order and (batch is None or not batch.ready):
                batch = next((b for b in batches.values() if b.ready), None)
            if batch is None or not batch.ready:
                return None
            del batches[batch.number]
            if batch.result is None or batch.result.kind != "exhausted":
                return batch
        return None

    # -- epochs -----------------------------------------------------------------------------

    def release_idle(self) -> None:
        """Nobody has asked for a while: give the memory back. Work already done is done again on return."""
        if not self.order.bound:
            self.abandon()
        self.paused = True
        self.admission.arena.close_free()

    def abandon(self) -> None:
        """Stop work on everything open; tasks already running come to rest first."""
        self.paused = True
        for batch in reversed(list(self.admission.open.values())):
            self.admission.evict(batch)

    @property
    def is_idle(self) -> bool:
        return not self._tasks and not self.roster.arriving

    def begin_epoch(self) -> None:
        """After ``abandon`` has come to rest, or after the last batch: as new, with the same workers."""
        self.admission.open.clear()
        self.admission.upcoming.clear()
        self.paused = False
        for seat in self.roster.seats:
            seat.exhausted = False
            seat.resume = Resume(0, seat.resume.memo if self.order.keeps_generators else None)

    @property
    def is_over(self) -> bool:
        """Whether there will be no further batch."""
        if self.failure is not None:
            return False
        batches = self.admission.open
        if not batches and not self.admission.upcoming:
            return True
        return self.roster.all_exhausted and not any(
            b.running or b.error or (b.result is not None and b.result.kind != "exhausted") or b.pieces
            for b in batches.values()
        )  # fmt: skip

    # -- memory of the workers --------------------------------------------------------------

    def _limit_arena(self) -> None:
        self.roster.has_changed = False
        taken_bytes = self.roster.taken_bytes(self._fetch_bytes())
        if taken_bytes is not None:
            taken_bytes += self._rules.own_bytes(self._memory_bytes)
        self.admission.arena.set_limit(max(0, self._memory_bytes - (taken_bytes or 0)))

    def _fetch_bytes(self) -> int:
        """What a worker holds while it fetches its share of a batch."""
        shapes, rows = self.admission.shapes, self.order.batch_rows
        if self.order.rows:
            return shapes.sample_bytes
        if not self.pace.splits or not rows:
            return 0
        return (shapes.expected_bytes(rows) or 0) * self._rows_per_task(rows) // rows

    def _private_bytes_for(self, batch: Batch) -> int:
        """What a worker takes that builds ``batch`` alone under a collate function of the user's: samples, result."""
        if self.order.rows or self.pace.splits:
            return 0
        return 2 * (self.admission.shapes.expected_bytes(batch.rows) or 0)

    # -- handing out ------------------------------------------------------------------------

    def _take_pace(self) -> None:
        """What the latest times mean for tasks and depth; once per turn, since it costs more than it changes."""
        self.pace.most_open = self.admission.most_open(self.order.batch_rows)
        rows = self._rows_per_task(self.order.batch_rows)
        self._most_in_hand = self.pace.tasks_queued(rows, in_order=self.order.in_order)
        depth = self.depth_wanted or self.pace.depth(
            self.order.batch_rows, self.roster.workers, in_order=self.order.in_order
        )
        if self.order.bound and not self.order.in_order:
            # A slow worker fills its share of what is ahead, not all of it.
            depth = max(depth, _BOUND_IN_HAND * self.roster.workers)
        self.depth = depth if self.depth_ceiling is None else max(1, min(depth, self.depth_ceiling))
        self._slots = self._rules.slots(self.depth, user_holds=self.admission.user_holds)

    def _give_up_unfinished(self) -> None:
        """There are no workers any more: what they have not begun is the training thread's."""
        for batch in reversed(list(self.admission.open.values())):
            if not batch.evicted and batch.has_work:
                self.admission.evict(batch)

    def _is_wanted(self) -> bool:
        """Whether handing out is worth the look: many short tasks go out together when a worker has half of its queue
        left, instead of one by one."""
        due, half = self.admission.due, self._most_in_hand // 2
        if due is None or due.has_work:
            return True
        return any(len(seat.tasks) <= half for seat in self.roster.seats)

    def _assign_free(self) -> None:
        begun = deque(b for b in self.admission.open.values() if b.todo or b.wants_collate)
        if self.admission.is_next_due and begun and (due := self._open_next()) is not None:
            begun.appendleft(due)
        while (seat := self.roster.idlest(self._most_in_hand)) is not None:
            while begun and not begun[0].has_work:
                begun.popleft()
            if not begun:
                batch = self._open_next()
                if batch is None:
                    return
                begun.append(batch)
            elif begun[0].wants_collate:
                # One worker that is large already, rather than each in turn.
                large = max(self.roster.idle(self._most_in_hand), key=lambda s: s.handle.private_bytes)
                if self.admission.may_collate(
                    begun[0], most_more([large], begun[0].collate_bytes, self._fetch_bytes())
                ):
                    self._hand_out(large, begun[0])
                else:
                    begun.popleft()
            else:
                self._hand_out(seat, begun[0])
        # Nobody is free. Who waits for room for a later batch lets go, if the next one has work and nobody at it.
        due = self.admission.due
        if due is None or due.has_work:
            self.admission.let_go_later(due)

    def _assign_bound(self) -> None:
        """Open batches for workers in turn; each worker works off its own."""
        while self._open_next() is not None:
            pass
        for seat in self.roster.seats:
            for batch in self.admission.open.values():
                if len(seat.tasks) >= _BOUND_IN_HAND or not seat.handle.started:
                    break
                if batch.worker_id != seat.handle.worker_id or not batch.todo:
                    continue
                if seat.exhausted:
                    batch.todo.clear()
                    batch.result, batch.ready = Outcome("exhausted"), True
                else:
                    self._hand_out(seat, batch)

    def _open_next(self) -> Batch | None:
        # One that was evicted may be due while later ones are ready.
        if not self.admission.upcoming or (len(self.admission.open) >= self.depth and not self.admission.is_next_due):
            return None
        rows = self.admission.upcoming[0].rows
        private_bytes = self._private_bytes_for(self.admission.upcoming[0])
        splits = self.pace.splits and self._rows_per_task(rows) < rows
        batch = self.admission.open_next(
            slots=self._slots,
            # Workers that write rows ask as soon as they hold one sample, so one batch each may start blind.
            start_blind=self.roster.workers if self.order.rows and not splits else 1,
            # Parts and the batch made of them exist side by side for a moment.
            copies=2 if splits and not self.order.rows else 1,
            rows_ahead=self.order.rows,
            private_bytes=most_more(self.roster.idle(self._most_in_hand), private_bytes, self._fetch_bytes())
            if private_bytes
            else 0,
        )
        if batch is not None and self.order.bound:
            batch.worker_id = batch.number % self.roster.workers if self.order.in_order else self._least_loaded()
        return batch

    def _least_loaded(self) -> int:
        """The worker with the fewest batches of its own: out of order, a slow one is not given more than others."""
        exhausted = {seat.handle.worker_id for seat in self.roster.seats if seat.exhausted}
        loads = {worker_id: 0 for worker_id in range(self.roster.workers) if worker_id not in exhausted}
        for batch in self.admission.open.values():
            if not batch.ready and batch.worker_id in loads:
                loads[batch.worker_id] += 1
        return min(loads, key=lambda worker_id: loads[worker_id], default=0)

    def _rows_per_task(self, batch_rows: int) -> int:
        return self.pace.rows_per_task(batch_rows, self.roster.workers)

    def _hand_out(self, seat: Seat, batch: Batch) -> None:
        if batch.wants_collate:
            self._hand_out_collate(seat, batch)
        else:
            self._hand_out_rows(seat, batch)

    def _hand_out_collate(self, seat: Seat, batch: Batch) -> None:
        batch.wants_collate = False
        task = self._new_task(seat, batch, None, batch.collate_bytes)
        for segment in batch.segments:
            seat.show(segment)
        parts = batch.parts()
        room = self.admission.room_ahead(task, seat)
        seat.handle.post(Collate(task.number, parts, batch.seed, room, batch.forecast_position))

    def _hand_out_rows(self, seat: Seat, batch: Batch) -> None:
        rows = batch.take_rows(self._rows_per_task(batch.rows), stretch_rows(batch.rows))
        task = self._new_task(seat, batch, rows, self._private_bytes_for(batch))
        segment = NO_SEGMENT
        if batch.template is not None:
            seat.teach(batch.template)
            if batch.rows_segment is not None:
                seat.show(batch.rows_segment)
                segment = batch.rows_segment.number
        elif batch.alone and not self.order.rows:
            segment = self.admission.room_ahead(task, seat)
        seat.handle.post(
            Fetch(
                task=task.number,
                indices=batch.indices_of(rows),
                first_row=rows.start,
                batch_rows=batch.rows,
                seed=batch.seed,
                forecast_position=batch.forecast_position,
                segment=segment,
                by_template=batch.template is not None,
                alone=batch.alone,
                careful=batch.careful,
            )
        )

    def _new_task(self, seat: Seat, batch: Batch, rows: range | None, private_bytes: int) -> Task:
        task = Task(self._next_task, batch, rows, time.monotonic(), private_bytes=private_bytes)
        self._tasks[task.number] = seat.tasks[task.number] = task
        self._next_task += 1
        batch.running += 1
        if private_bytes:
            self._limit_arena()
        return task

    # -- results ----------------------------------------------------------------------------

    def _on_done(self, seat: Seat, done: Done) -> None:
        task = seat.tasks.pop(done.task)
        del self._tasks[done.task]
        self._deaths.note_done(task)
        if not self.order.rows or done.private_bytes not in (0, seat.handle.private_bytes):
            self.roster.has_changed = True
        if done.private_bytes:
            seat.handle.private_bytes = done.private_bytes
        if task.rows is not None:
            seat.rows_done += len(task.rows)
        batch, outcome = task.batch, done.outcome
        if self.order.bound:
            seat.resume = Resume(seat.resume.batches + 1, done.memo)
            batch.memo = done.memo
        if batch.evicted or outcome.kind == "dropped":
            self._undo(task)
            return
        batch.running -= 1
        if task.room is not None and (outcome.kind not in ("object", "part") or outcome.segment != task.room.number):
            self.admission.return_room(task)
        if done.error is not None:
            batch.note_error(0 if task.rows is None else task.rows.start, done.error)
        elif outcome.kind == "cannot travel":
            self.pace.splits = False
            self.admission.evict(batch)
            return
        elif outcome.kind == "exhausted":
            seat.exhausted = True
            batch.result = outcome
        elif outcome.kind in ("rows", "part"):
            assert task.rows is not None
            self.pace.note(len(task.rows), done.fetch_s)
            batch.pieces[task.rows.start] = (task.rows, outcome)
        else:
            if task.rows is not None:
                self.pace.note(len(task.rows), done.fetch_s + done.collate_s)
            batch.result = outcome
        if batch.at_rest:
            self._settle(batch)

    def _settle(self, batch: Batch) -> None:
        """Every task of the batch is done: what became of it?"""
        result, shapes = batch.result, self.admission.shapes
        if batch.error is not None:
            self.admission.release(batch)
        elif result is not None:
            # The encoded result stays; rows and parts it was made of do not.
            kept = batch.extra.pop(result.segment, None)
            self.admission.release(batch)
            if kept is not None:
                batch.extra[kept.number] = kept
            if result.kind != "exhausted":
                shapes.note_size(result.used_bytes)
                if self.order.rows:
                    shapes.note_mismatch()
        else:
            self.admission.keep_layout(batch)
            if not batch.is_rows:
                batch.wants_collate = True
                return
            if batch.template is not None:
                was_known = shapes.template is not None
                shapes.note_match(batch.template, batch.rows)
                self.roster.has_changed |= not was_known
        batch.ready = True
        self.admission.settled(batch)

    def _undo(self, task: Task) -> None:
        """The task was never done: its rows, or the collation, are to be handed out again."""
        batch = task.batch
        batch.running -= 1
        self.admission.return_room(task)
        if batch.evicted:
            if not batch.running:
                self.admission.start_over(batch)
        elif batch.error is not None:
            # Nothing more is fetched for a batch that cannot be whole.
            batch.todo.clear()
            if batch.at_rest:
                self._settle(batch)
        elif task.rows is None:
            batch.wants_collate = True
        else:
            batch.todo.appendleft(task.rows)

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
