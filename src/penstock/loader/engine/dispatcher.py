"""The dispatcher decides which worker gets which rows of which batch, and how many batches may be ahead.

In:  batches drawn from the sampler; workers that can take tasks.
Out: tasks for workers.
Runs in: trainer. Every method is called under the engine's lock, by the training thread or the engine's own.

A free worker gets the next rows of the first batch that has unassigned rows; when all rows are assigned, admission
opens the next batch. So a slow sample delays its own batch and no other work. Batches of iterable datasets and all
batches under seeding="worker" are different: they belong to workers in turn, as in torch.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from penstock.loader.engine.ahead import Ahead
from penstock.loader.engine.batch import Batch, Task
from penstock.loader.engine.budget import MemoryBudget
from penstock.loader.engine.engine_parts import EngineParts
from penstock.loader.engine.worker_set import WorkerEntry
from penstock.workers.protocol import NO_SEGMENT, Collate, Fetch, Outcome, Resume
from penstock.workers.stretches import stretch_rows

_MOST_BOUND_TASKS = 2
"""The most tasks of a worker that has batches of its own: the current task and a queued task."""
_MANY_QUEUED = 4
"""The number of queued tasks that counts as many. A worker with fewer queued tasks soon waits if its next tasks are
shorter than most tasks."""


class Dispatcher:
    def __init__(
        self, parts: EngineParts, budget: MemoryBudget, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._workers, self._admission, self._budget = parts.workers, parts.admission, budget
        self._pace, self._order, self._rules = parts.pace, parts.order, parts.rules
        self.depth = 2
        """The number of batches that may be ahead of the user now."""
        self.depth_wanted: int | None = None
        """The depth that the user has set; None if the engine decides."""
        self.depth_ceiling: int | None = None
        self.paused = False
        self._ahead = Ahead(self._rules)
        self._facts: tuple[Any, ...] | None = None
        self._worths = 0, 0
        """The latest result of ``_worth``. It is computed from ``_facts``, and only again when they change, because
        this saves time."""
        self._idle_workers = 0
        """The number of workers to which the depth left nothing to do at the latest turn."""
        self._turn_s = self._asked_s = clock()
        """When the latest turn was, and when the training loop last asked for a batch."""
        self._slots = 3
        self._most_queued = 1
        self._next_task = 0

    def offer(self, batch: Batch) -> None:
        """Add a batch drawn from the sampler; called without the lock."""
        self._pace.note_drawn(batch.rows)
        self._admission.upcoming.append(batch)

    def progress(self) -> None:
        """Assign everything that can be assigned now."""
        self._admission.arena.collect_returned()
        self._admission.answer_waiting()
        if self.paused or self._admission.failure is not None:
            return
        if not self._workers.count:
            self._abandon_unfinished()
            return
        self._note_time()
        if self._order.bound:
            self._decide_pace()
            self._assign_bound()
        elif self._is_worth_assigning():
            self._decide_pace()
            self._assign_free()
        self._count_idle()

    @property
    def queues_many(self) -> bool:
        """Whether tasks are so short that workers have many tasks queued. Reports may then gather without an idle
        worker."""
        return self._most_queued >= _MANY_QUEUED

    def take_for_trainer(self) -> Batch | None:
        """The next batch that the training thread itself fetches when there are no workers."""
        if self._workers.count or not self._admission.is_next_due:
            return None
        return self._admission.upcoming.popleft()

    # -- epochs -----------------------------------------------------------------------------

    def release_idle(self) -> None:
        """Release the memory, because the user has asked for no batch for a while. Finished batches are fetched again
        when the user asks for them."""
        if not self._order.bound:
            self.abandon()
        self.paused = True
        self._admission.arena.close_free()
        self._workers.return_kept()

    def abandon(self) -> None:
        """Drop all open batches; each batch is dropped only when its running tasks have ended."""
        self.paused = True
        for batch in reversed(list(self._admission.open.values())):
            self._admission.evict(batch)

    @property
    def is_idle(self) -> bool:
        return not self._workers.has_tasks and not self._workers.has_starting

    def begin_epoch(self) -> None:
        """Start again with the same workers, once ``abandon`` is complete or the last batch is delivered."""
        self._admission.open.clear()
        self._admission.upcoming.clear()
        self._admission.failure = None
        self.paused = False
        for worker in self._workers.members:
            worker.exhausted = False
            worker.resume = Resume(0, worker.resume.memo if self._order.keeps_generators else None)

    # -- depth ------------------------------------------------------------------------------

    def _decide_pace(self) -> None:
        """Decide rows per task, tasks per worker and depth from the latest times; once per turn, because the result
        changes too little to be worth a second calculation."""
        order, pace = self._order, self._pace
        pace.most_open = self._admission.most_open(pace.batch_rows)
        pace.builds_whole = self._budget.lets_build_whole()
        # There must be memory for one batch of each worker, and for the batch that is ready at the same time.
        pace.keeps_together = pace.gains_together and self._allowed(self._worth()[0]) > self._workers.count
        rows = pace.rows_per_task(pace.batch_rows, self._workers.count)
        self._most_queued = pace.tasks_queued(rows, in_order=order.in_order)
        self.depth = self._decide_depth()
        self._slots = self._rules.slots(self.depth, user_holds=self._admission.user_holds)
        self._budget.set_slots(self._slots)

    def _decide_depth(self) -> int:
        order, pace, count = self._order, self._pace, self._workers.count
        if self.depth_wanted:
            return self._allowed(self.depth_wanted)
        most, cheap = self._worth()
        least = pace.depth(pace.batch_rows, count, in_order=order.in_order, cheap=cheap)
        if order.bound and not order.in_order:
            # A slow worker gets its share of the batches ahead instead of all these batches.
            least = max(least, _MOST_BOUND_TASKS * count)
        batch_bytes = self._admission.shapes.expected_bytes(pace.batch_rows) or 0
        price = self._rules.ahead_price(batch_bytes, self._batch_s)
        return self._ahead.bound(self._allowed(least), self._allowed(most), price)

    def _allowed(self, depth: int) -> int:
        return depth if self.depth_ceiling is None else max(1, min(depth, self.depth_ceiling))

    def _worth(self) -> tuple[int, int]:
        """Two depths: how far the depth may grow where that helps, within the user's ceiling if there is a ceiling; and
        how far batches ahead are cheap."""
        order, rules, count = self._order, self._rules, self._workers.count
        template, limit_bytes = self._admission.shapes.template, self._admission.arena.limit_bytes
        batch_bytes = self._admission.shapes.expected_bytes(self._pace.batch_rows)
        if batch_bytes is None:
            return 0, 0
        facts = (batch_bytes, limit_bytes, count, self.depth_ceiling, template is None)
        if facts != self._facts:
            per_worker = rules.bound_per_worker if order.bound else 0
            if not order.rows or template is None or any(leaf.kind == "text" for leaf in template.leaves):
                # Texts and small objects travel in messages, whose bytes are not counted.
                per_worker = rules.ahead_per_worker
            cheap = rules.cheap_ahead(batch_bytes, limit_bytes, count, per_worker=per_worker)
            most = self.depth_ceiling or rules.most_ahead(batch_bytes, limit_bytes, count, per_worker=per_worker)
            self._facts, self._worths = facts, (most, cheap)
        return self._worths

    @property
    def has_ready(self) -> bool:
        """Whether the due batch is ready."""
        due = self._admission.due
        return due is not None and due.ready

    def note_asked(self) -> None:
        """Note that the training loop asks for a batch."""
        now_s, has_ready = self._clock(), self.has_ready
        self._pace.note_asked(waits=not has_ready)
        ready = 0
        if has_ready:
            batches = itertools.islice(self._admission.open.values(), self._ahead.most_spare)
            ready = sum(1 for _ in itertools.takewhile(attrgetter("ready"), batches))
        self._ahead.note_taken((now_s - self._asked_s) / self._batch_s, ready)
        self._asked_s = now_s

    def note_answer(self, late_s: float) -> None:
        """Note that a worker's report of a task was read ``late_s`` after it was sent."""
        self._pace.note_answer(late_s)

    @property
    def is_starved(self) -> bool:
        """Whether a worker has nothing to do because of the depth, and the depth may grow."""
        return self._idle_workers > 0 and self.depth_wanted is None and self._ahead.may_grow

    @property
    def _batch_s(self) -> float:
        """How many seconds all workers together take for a batch."""
        return max((self._pace.row_s or 0.0) * self._pace.batch_rows / max(1, self._workers.count), 1e-6)

    def _note_time(self) -> None:
        """Note how much of the time since the latest turn the workers had nothing to do and the training loop
        waited."""
        now_s, before_s = self._clock(), self._turn_s
        self._turn_s = now_s
        if self._idle_workers:
            idle_s = (now_s - before_s) * self._idle_workers / max(1, self._workers.count)
            self._ahead.note_idle(idle_s / self._batch_s)
        if self._admission.trainer_waits:
            self._ahead.note_wait((now_s - max(before_s, self._asked_s)) / self._batch_s)

    def _count_idle(self) -> None:
        """Count the workers to which the depth leaves nothing to do."""
        is_full = bool(self._admission.upcoming) and len(self._admission.open) >= self.depth
        self._idle_workers = sum(not w.tasks and w.peer.started for w in self._workers.members) if is_full else 0

    # -- assigning --------------------------------------------------------------------------

    def _abandon_unfinished(self) -> None:
        """Leave batches that workers have not begun to the training thread: there are no workers any more."""
        for batch in reversed(list(self._admission.open.values())):
            if not batch.evicted and batch.has_work:
                self._admission.evict(batch)

    def _is_worth_assigning(self) -> bool:
        """Whether to look for tasks now. Many short tasks are not assigned one by one, but together when a worker has
        half of its queue left."""
        due, half = self._admission.due, self._most_queued // 2
        if due is None or due.has_work:
            return True
        return any(len(worker.tasks) <= half for worker in self._workers.members)

    def _assign_free(self) -> None:
        """Give the next rows of the first batches to the workers with the fewest tasks."""
        begun = deque(b for b in self._admission.open.values() if b.todo or b.wants_collate)
        if self._admission.is_next_due and begun and (due := self._open_next()) is not None:
            begun.appendleft(due)
        while (worker := self._workers.idlest(self._most_queued)) is not None:
            while begun and not begun[0].has_work:
                begun.popleft()
            if not begun:
                batch = self._open_next()
                if batch is None:
                    return
                begun.append(batch)
            elif begun[0].wants_collate:
                # The largest worker collates, so that not every worker grows in turn.
                largest = max(self._workers.idle(self._most_queued), key=lambda w: w.peer.private_bytes)
                growth_bytes = largest.growth_bytes(begun[0].collate_bytes, self._budget.fetch_bytes())
                if self._admission.may_collate(begun[0], growth_bytes):
                    self._assign_collate(largest, begun[0])
                else:
                    begun.popleft()
            else:
                self._assign_rows(worker, begun[0])
        # No worker is free. If the due batch has rows that no worker has, a worker that waits for room for a later
        # batch drops that batch.
        due = self._admission.due
        if due is None or due.has_work:
            self._admission.drop_latest(due)

    def _assign_bound(self) -> None:
        """Open batches for the workers in turn; each worker gets its own batches."""
        while self._open_next() is not None:
            pass
        for worker in self._workers.members:
            self._assign_own(worker)

    def _assign_own(self, worker: WorkerEntry) -> None:
        """Give a worker the batches that belong to it."""
        for batch in self._admission.open.values():
            if len(worker.tasks) >= max(_MOST_BOUND_TASKS, self._most_queued) or not worker.peer.started:
                return
            if batch.worker_id != worker.worker_id or not batch.todo:
                continue
            if worker.exhausted:
                batch.todo.clear()
                batch.result, batch.ready = Outcome("exhausted"), True
            else:
                self._assign_rows(worker, batch)

    def _open_next(self) -> Batch | None:
        admission, splits_rows = self._admission, self._pace.splits
        # A batch that was evicted may be due while later batches are ready.
        if not admission.upcoming or (len(admission.open) >= self.depth and not admission.is_next_due):
            return None
        upcoming = admission.upcoming[0]
        splits = splits_rows and self._pace.rows_per_task(upcoming.rows, self._workers.count) < upcoming.rows
        batch = admission.open_next(
            slots=self._slots,
            # Workers that write rows ask for room as soon as they hold one sample, so each worker may start one batch
            # of unknown size.
            start_blind=self._workers.count if self._order.rows and not splits else 1,
            # Parts and the batch made of these parts exist at the same time for a moment.
            copies=2 if splits and not self._pace.in_place else 1,
            rows_ahead=self._order.rows,
            private_bytes=self._most_growth_bytes(upcoming),
        )
        if batch is not None and self._order.bound:
            batch.worker_id = batch.number % self._workers.count if self._order.in_order else self._least_loaded()
        return batch

    def _most_growth_bytes(self, batch: Batch) -> int:
        """The most bytes by which any free worker would grow while it builds ``batch`` alone."""
        task_bytes = self._budget.task_bytes(batch)
        if not task_bytes:
            return 0
        fetch_bytes = self._budget.fetch_bytes()
        free = self._workers.idle(self._most_queued)
        return max((worker.growth_bytes(task_bytes, fetch_bytes) for worker in free), default=0)

    def _least_loaded(self) -> int:
        """The worker with the fewest batches of its own. Without an order of batches, a slow worker thus gets no more
        batches than the others."""
        exhausted = {worker.worker_id for worker in self._workers.members if worker.exhausted}
        loads = {worker_id: 0 for worker_id in range(self._workers.count) if worker_id not in exhausted}
        for batch in self._admission.open.values():
            if not batch.ready and batch.worker_id in loads:
                loads[batch.worker_id] += 1
        return min(loads, key=lambda worker_id: loads[worker_id], default=0)

    def _assign_collate(self, worker: WorkerEntry, batch: Batch) -> None:
        batch.wants_collate = False
        task = self._new_task(worker, batch, None, batch.collate_bytes)
        for segment in batch.segments:
            worker.show(segment)
        parts = batch.parts()
        room = self._admission.room_ahead(task, worker)
        worker.peer.post(Collate(task.number, parts, batch.seed, room, batch.forecast_position))

    def _assign_rows(self, worker: WorkerEntry, batch: Batch) -> None:
        rows_per_task = self._pace.rows_per_task(batch.rows, self._workers.count)
        rows = batch.take_rows(rows_per_task, stretch_rows(batch.rows))
        task = self._new_task(worker, batch, rows, self._budget.task_bytes(batch))
        segment = NO_SEGMENT
        if batch.text_segment is not None:
            worker.show(batch.text_segment)
        if batch.template is not None:
            worker.teach(batch.template)
            if batch.rows_segment is not None:
                worker.show(batch.rows_segment)
                segment = batch.rows_segment.number
        elif batch.alone and not self._pace.in_place:
            segment = self._admission.room_ahead(task, worker)
        worker.peer.post(
            Fetch(
                task=task.number,
                indices=batch.indices_of(rows),
                first_row=rows.start,
                batch_rows=batch.rows,
                seed=batch.seed,
                forecast_position=batch.forecast_position,
                segment=segment,
                by_template=batch.template is not None,
                text_room=batch.text_room(rows),
                alone=batch.alone,
                careful=batch.careful,
            )
        )

    def _new_task(self, worker: WorkerEntry, batch: Batch, rows: range | None, private_bytes: int) -> Task:
        task = Task(self._next_task, batch, rows, time.monotonic(), private_bytes=private_bytes)
        worker.tasks[task.number] = task
        self._next_task += 1
        batch.running += 1
        if private_bytes:
            self._budget.limit_arena()
        return task
