"""Settlement: how messages and crashes of workers change the workers' batches.

In:  messages from workers; crashes.
Out: batches that are ready, in order; the layout, sizes and speed learnt from the messages.
Runs in: trainer, under the engine's lock.
"""

from __future__ import annotations

import time
from typing import Any

from penstock.errors import WorkerError
from penstock.loader.engine.batch import Batch, Task
from penstock.loader.engine.budget import MemoryBudget
from penstock.loader.engine.crashes import CrashCounter, how_it_ended
from penstock.loader.engine.engine_parts import EngineParts
from penstock.loader.engine.worker_set import WorkerEntry
from penstock.workers.protocol import NO_SEGMENT, Done, Need, Notice, Resume, Room, Started

_REAP_S = 0.5
"""How long a worker that has closed its socket may take to end by itself. A killed worker would not show its own exit
status."""


class Settlement:
    def __init__(self, parts: EngineParts, crashes: CrashCounter, budget: MemoryBudget) -> None:
        self._workers, self._admission = parts.workers, parts.admission
        self._pace, self._order = parts.pace, parts.order
        self._crashes, self._budget = crashes, budget
        self._noticed: set[str] = set()
        """The notices of workers that the user has received already."""

    # -- messages and crashes ---------------------------------------------------------------

    def on_message(self, worker: WorkerEntry, message: Any) -> None:
        if isinstance(message, Done):
            self._on_done(worker, message)
            return
        self._workers.has_changed = True
        if isinstance(message, Notice):
            # Every worker sends such a notice, but the user needs it once.
            if message.text not in self._noticed:
                self._noticed.add(message.text)
                self._admission.notices.add(message.text)
        elif isinstance(message, Need):
            worker.peer.private_bytes = max(worker.peer.private_bytes, message.private_bytes)
            self._on_need(worker, message)
        elif isinstance(message, Started):
            worker.peer.started = True
            worker.peer.private_bytes = worker.base_bytes = message.private_bytes
            worker.peer.trace_fd = message.trace_fd
            self._crashes.note_start()

    def on_crash(self, worker: WorkerEntry) -> None:
        """Handle the end of a worker: its tasks are assigned again."""
        self._admission.forget_worker(worker)
        # Until the worker is reaped, it might still write into rows that are assigned to another worker next.
        status = worker.peer.reap(time.monotonic() + _REAP_S)
        worker.ending = how_it_ended(worker.pid, status)
        in_hand = self._workers.in_hand(worker)
        if status == 1 and not worker.peer.started and self._workers.imports_main:
            error = self._crashes.count_failed_import(worker)
        else:
            error = self._crashes.count(worker, in_hand, worker.ending, workers=self._workers.count)
        if error is not None:
            self._admission.fail(error)
        tasks, worker.tasks = list(worker.tasks.values()), {}
        for task in tasks:
            self._undo(task)
        self._workers.remove(worker, replace=not worker.leaving)

    def on_failed_start(self, worker_id: int, problem: Exception) -> None:
        self._admission.fail(WorkerError(f"worker {worker_id} could not be started: {problem}"))

    # -- ready batches ----------------------------------------------------------------------

    def take_ready(self) -> Batch | None:
        """The batch to deliver now, or None. Turns of exhausted workers are skipped."""
        batches = self._admission.open
        while batches:
            batch = self._admission.due
            if not self._order.in_order and (batch is None or not batch.ready):
                batch = next((b for b in batches.values() if b.ready), None)
            if batch is None or not batch.ready:
                return None
            del batches[batch.number]
            if batch.result is None or batch.result.kind != "exhausted":
                return batch
        return None

    @property
    def is_over(self) -> bool:
        """Whether no further batch will come."""
        if self._admission.failure is not None:
            return False
        batches = self._admission.open
        if not batches and not self._admission.upcoming:
            return True
        return self._workers.all_exhausted and not any(
            b.running or b.error or (b.result is not None and b.result.kind != "exhausted") or b.pieces
            for b in batches.values()
        )  # fmt: skip

    # -- inside -----------------------------------------------------------------------------

    def _on_need(self, worker: WorkerEntry, need: Need) -> None:
        admission, task = self._admission, worker.tasks[need.task]
        if not need.is_guess:
            admission.ask(worker, need)
            return
        if admission.shapes.expected_bytes(task.batch.rows) is None:
            # Samples may share most of the memory that they hold, so no guess is as good as a need.
            admission.shapes.note_guess(min(need.need_bytes, admission.arena.limit_bytes // 2))
            self._pace.builds_whole = self._budget.lets_build_whole()
            task.private_bytes = self._budget.task_bytes(task.batch)
            if self._pace.splits and not task.batch.evicted:
                # When the batch was assigned, its size was unknown. It starts over, and the workers share it.
                admission.evict(task.batch)
        if task.batch.evicted:
            worker.drop(task)
        else:
            worker.peer.post(Room(need.task, NO_SEGMENT, None))

    def _on_done(self, worker: WorkerEntry, done: Done) -> None:
        task = worker.tasks.pop(done.task)
        self._crashes.note_done(task)
        if not self._order.rows or done.private_bytes not in (0, worker.peer.private_bytes):
            self._workers.has_changed = True
        if done.private_bytes:
            worker.peer.private_bytes = done.private_bytes
        if task.rows is not None:
            worker.rows_done += len(task.rows)
        batch, outcome = task.batch, done.outcome
        if self._order.bound:
            worker.resume = Resume(worker.resume.batches + 1, done.memo)
            batch.memo = done.memo
        if batch.evicted or outcome.kind == "dropped":
            self._undo(task)
            return
        batch.running -= 1
        if task.room is not None and task.room.number not in outcome.segments:
            self._admission.release_room(task)
        if done.error is not None:
            batch.note_error(0 if task.rows is None else task.rows.start, done.error)
        elif outcome.kind == "cannot travel":
            self._pace.may_split = False
            self._admission.evict(batch)
            return
        elif outcome.kind == "exhausted":
            worker.exhausted = True
            batch.result = outcome
        elif outcome.kind in ("rows", "part"):
            assert task.rows is not None
            self._pace.note(len(task.rows), done.fetch_s)
            if not batch.alone:
                self._pace.note_part(len(task.rows), done.fetch_s, is_first=worker.at_batch != batch.number)
                worker.at_batch = batch.number
            batch.pieces[task.rows.start] = (task.rows, outcome)
        else:
            if task.rows is not None:
                self._pace.note(len(task.rows), done.fetch_s + done.collate_s)
            batch.result = outcome
        if batch.at_rest:
            self._settle(batch)

    def _settle(self, batch: Batch) -> None:
        """Make a batch ready, or mark it for collation, when all of its tasks are done."""
        result, shapes = batch.result, self._admission.shapes
        if batch.error is not None:
            self._admission.release(batch)
        elif result is not None:
            # The encoded result stays; the rows and parts of which it was made are released.
            kept = batch.extra.pop(result.segment, None)
            self._admission.release(batch)
            if kept is not None:
                batch.extra[kept.number] = kept
            if result.kind != "exhausted":
                shapes.note_size(result.used_bytes)
                if self._order.rows:
                    self._pace.in_place = False
                    shapes.note_mismatch()
        else:
            self._admission.keep_layout(batch)
            if not batch.is_rows:
                batch.wants_collate = True
                return
            self._pace.in_place = True
            if batch.template is not None:
                was_known = shapes.template is not None
                shapes.note_texts(batch.text_bytes, batch.row_count())
                shapes.note_match(batch.template, batch.rows)
                self._workers.has_changed |= not was_known
        batch.ready = True
        self._admission.settled(batch)

    def _undo(self, task: Task) -> None:
        """Return the work of a task that was not done: its rows, or the collation, must be assigned again."""
        batch = task.batch
        batch.running -= 1
        self._admission.release_room(task)
        if batch.evicted:
            if not batch.running:
                self._admission.start_over(batch)
        elif batch.error is not None:
            # If a batch cannot be completed, its remaining rows are not fetched.
            batch.todo.clear()
            if batch.at_rest:
                self._settle(batch)
        elif task.rows is None:
            batch.wants_collate = True
        else:
            batch.todo.appendleft(task.rows)
