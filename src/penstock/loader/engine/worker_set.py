"""The workers of one engine, from their start until they have left or crashed and are reaped.

In:  the number of workers that there should be; the starter of one kind of worker.
Out: workers that can take tasks; the private memory that workers take; the current work of each worker.
Runs in: trainer, under the engine's lock; a start that takes a long time runs in a thread of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from penstock.arena.segment import Segment
from penstock.arena.template import Template
from penstock.loader.engine.batch import Task
from penstock.workers import stack_dump
from penstock.workers.protocol import DROP, KeepMemory, Learn, Resume, Room
from penstock.workers.worker import Worker, WorkerStarter, stop_deadline_s

_FROM_THE_START = Resume(0, None)

Doing = Literal["starting", "idle", "fetching", "collating", "waiting for memory"]


@dataclass(frozen=True, kw_only=True)
class WorkerNow:
    """The current work of one worker."""

    worker_id: int
    pid: int | None
    """The process id of the worker; None for a thread."""
    doing: Doing
    batch: int | None
    """The number, within its epoch, of the batch on which the worker works."""
    index: str | None
    """The index that the worker fetches, as the sampler gave it; None if it is unknown."""
    since_s: float | None
    """The seconds since the worker got its current task."""
    samples: int
    """The number of samples that the worker has fetched since its start."""
    restarts: int
    """How often a worker with this number crashed and was replaced."""
    private_bytes: int
    leaving: bool
    """Whether the worker stops as soon as its tasks are done."""


@dataclass(eq=False)
class WorkerEntry:
    """One worker of the set. The replacement of a crashed worker has the same ``worker_id`` but an entry of its own."""

    peer: Worker
    """The process or thread itself, and the connection to it."""
    tasks: dict[int, Task] = field(default_factory=dict)
    exhausted: bool = False
    """Whether the worker's copy of an iterable dataset has no more samples in this epoch."""
    resume: Resume = _FROM_THE_START
    """Where a replacement continues, if batches belong to workers in turn."""
    leaving: bool = False
    """Whether the worker gets no further tasks and stops when its tasks are done."""
    has_unsent: bool = False
    """Whether the worker's socket is full and is watched until it accepts more data."""
    base_bytes: int = 0
    """The worker's private memory before its first task."""
    may_keep: bool = False
    """Whether the worker may keep the memory of samples, according to the latest message to it."""
    at_batch: int = -1
    """The number of the shared batch of which the worker last fetched rows."""
    rows_done: int = 0
    """The number of samples that the worker has fetched."""
    ending: str = ""
    """How the worker crashed, in words; empty before a crash."""

    @property
    def worker_id(self) -> int:
        return self.peer.worker_id

    @property
    def pid(self) -> int | None:
        return self.peer.pid

    def expected_bytes(self, fetch_bytes: int) -> int:
        """The expected private memory: the measured memory or the need of the worker's tasks, whichever is larger."""
        ahead = max((task.private_bytes for task in self.tasks.values()), default=0)
        return max(self.peer.private_bytes, self.base_bytes + max(fetch_bytes, ahead))

    def growth_bytes(self, task_bytes: int, fetch_bytes: int) -> int:
        """How many bytes the worker would grow during a task that takes ``task_bytes`` of private memory."""
        return max(0, self.base_bytes + task_bytes - self.expected_bytes(fetch_bytes))

    def show(self, segment: Segment) -> None:
        """Make sure that the worker has mapped the segment."""
        if not self.peer.has_attached(segment.number):
            self.peer.attach(segment)

    def teach(self, template: Template) -> None:
        """Make sure that the worker uses this template."""
        if self.peer.template is not template:
            self.peer.template = template
            self.peer.post(Learn(template))

    def allow_keeping(self, allowed: bool) -> None:
        """Make sure that the worker keeps the memory of samples only if ``allowed``."""
        if self.may_keep != allowed:
            self.may_keep = allowed
            self.peer.post(KeepMemory(allowed))

    def drop(self, task: Task) -> None:
        """Make a worker that waits for room drop its samples."""
        task.need = None
        self.peer.post(Room(task.number, DROP, None))


class WorkerSet:
    def __init__(
        self,
        starter: WorkerStarter,
        count: int,
        *,
        selector: selectors.BaseSelector,
        lock: threading.RLock,
        wake: Callable[[], None],
        start_failed: Callable[[int, Exception], None],
        keeps_position: bool,
    ) -> None:
        """``selector`` gets every worker's socket, with the worker's entry as data. ``lock`` is the engine's. ``wake``
        is called without the lock when a worker has started in a thread. ``keeps_position``: whether a replacement
        continues from the position of the crashed worker."""
        self.count = count
        """The number of workers that there should be. Some may still be starting, others leaving."""
        self.members: list[WorkerEntry] = []
        """Workers that were started and have neither left nor crashed."""
        self.has_changed = True
        """Whether the workers' private memory may have changed since it was last summed up."""
        self._starter = starter
        self._selector = selector
        self._lock = lock
        self._wake = wake
        self._start_failed = start_failed
        self._keeps_position = keeps_position
        self._starting: set[int] = set()
        """The numbers of workers whose start is in progress."""
        self._start_threads: list[threading.Thread] = []
        """The threads that start one worker each."""
        self._crashed: list[WorkerEntry] = []
        """Crashed workers that are to be replaced."""
        self._unstarted: list[tuple[int, Resume | None, bool]] = []
        """The arguments of ``_start`` for workers that could not be started; each start is tried again."""
        self._departing: list[WorkerEntry] = []
        """Workers that were asked to stop and are not reaped yet."""

    # -- starting ---------------------------------------------------------------------------

    def free_ids(self) -> Iterator[int]:
        """Numbers for new workers, lowest first."""
        taken = {worker.worker_id for worker in [*self.members, *self._crashed]} | self._starting
        taken |= {worker_id for worker_id, _, _ in self._unstarted}
        return (number for number in itertools.count() if number not in taken)

    def start_first(self, resume_at: dict[int, Resume]) -> Iterator[None]:
        """Start the first workers in this thread, one at each step; raises the exception that prevents a start.
        ``resume_at``: where workers with batches of their own continue."""
        with self._starter.sharing_setup(self.count) as setup:
            for worker_id in itertools.islice(self.free_ids(), self.count):
                resume = resume_at.get(worker_id)
                self._add(self._starter.start(worker_id, self.count, resume, setup), resume, exhausted=False)
                yield

    def resize(self, count: int) -> None:
        """Change the number of workers: missing workers start, or the workers with the highest numbers leave."""
        self.count = count
        staying = sorted((w for w in self.members if not w.leaving), key=lambda w: w.worker_id)
        for worker in staying[count:]:
            worker.leaving = True
        missing = count - len(staying) - len(self._starting) - len(self._crashed) - len(self._unstarted)
        for worker_id in list(itertools.islice(self.free_ids(), max(0, missing))):
            self._start(worker_id, None, exhausted=False)

    def replace_crashed(self) -> list[WorkerEntry]:
        """Start replacements, and workers that could not be started before; returns the crashed workers that are
        replaced."""
        if not self._crashed and not self._unstarted:
            return []
        unstarted, self._unstarted = self._unstarted, []
        for worker_id, resume, exhausted in unstarted:
            self._start(worker_id, resume, exhausted=exhausted)
        crashed, self._crashed = self._crashed, []
        for worker in crashed:
            resume = worker.resume if self._keeps_position else None
            self._start(worker.worker_id, resume, exhausted=worker.exhausted)
        return crashed

    def _start(self, worker_id: int, resume: Resume | None, *, exhausted: bool) -> None:
        self._starting.add(worker_id)
        if self._starter.starts_at_once:
            try:
                peer = self._starter.start(worker_id, self.count, resume)
            except Exception as problem:
                self._note_failed_start(worker_id, resume, exhausted, problem)
            else:
                self._add(peer, resume, exhausted)
            return
        # A spawned worker reads its dataset from a pipe only after it has imported the user's modules.
        thread = threading.Thread(
            target=self._start_in_thread, args=(worker_id, resume, exhausted), name="penstock-start", daemon=True
        )
        self._start_threads = [*(each for each in self._start_threads if each.is_alive()), thread]
        thread.start()

    def _start_in_thread(self, worker_id: int, resume: Resume | None, exhausted: bool) -> None:
        try:
            peer = self._starter.start(worker_id, self.count, resume)
        except Exception as problem:
            with self._lock:
                self._note_failed_start(worker_id, resume, exhausted, problem)
        else:
            with self._lock:
                self._add(peer, resume, exhausted)
        self._wake()

    def _note_failed_start(self, worker_id: int, resume: Resume | None, exhausted: bool, problem: Exception) -> None:
        self._starting.discard(worker_id)
        self._unstarted.append((worker_id, resume, exhausted))
        self._start_failed(worker_id, problem)

    def _add(self, peer: Worker, resume: Resume | None, exhausted: bool) -> None:
        self._starting.discard(peer.worker_id)
        worker = WorkerEntry(peer, exhausted=exhausted, resume=resume or _FROM_THE_START)
        # The set of workers may have been made smaller during the start.
        worker.leaving = sum(1 for other in self.members if not other.leaving) >= self.count
        self.members.append(worker)
        self._selector.register(peer, selectors.EVENT_READ, worker)

    @property
    def imports_main(self) -> bool:
        """Whether a new worker imports the program's main module, because it is spawned instead of forked."""
        return not self._starter.starts_at_once

    @property
    def has_starting(self) -> bool:
        return bool(self._starting)

    def await_starts(self) -> None:
        """Wait, without the lock, until no start is in progress."""
        for thread in self._start_threads:
            thread.join()

    # -- at work ----------------------------------------------------------------------------

    def idle(self, most_queued: int) -> list[WorkerEntry]:
        """Workers that can take another task."""
        return [w for w in self.members if len(w.tasks) < most_queued and w.peer.started and not w.leaving]

    def idlest(self, most_queued: int) -> WorkerEntry | None:
        """The worker with the fewest tasks, among the workers that can take another task."""
        idlest, fewest = None, most_queued
        for worker in self.members:
            if len(worker.tasks) < fewest and worker.peer.started and not worker.leaving:
                idlest, fewest = worker, len(worker.tasks)
        return idlest

    @property
    def has_tasks(self) -> bool:
        return any(worker.tasks for worker in self.members)

    @property
    def all_exhausted(self) -> bool:
        """Whether all workers have started and no worker has further samples in this epoch."""
        return len(self.members) == self.count and all(worker.exhausted for worker in self.members)

    def flush(self) -> None:
        """Send queued messages; a full socket is watched until it accepts more data."""
        for worker in self.members:
            unsent = worker.peer.flush()
            if unsent != worker.has_unsent:
                worker.has_unsent = unsent
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
                self._selector.modify(worker.peer, wanted, worker)

    def forget_segment(self, segment: Segment) -> None:
        """Make all workers unmap a segment that is closed."""
        for worker in self.members:
            worker.peer.detach(segment.number)

    def in_hand(self, worker: WorkerEntry) -> tuple[int, int]:
        """The number of a worker's current or last task, and the row in this task; negative if there is none."""
        if self._starter.board is None:
            return next(iter(worker.tasks), -1), -1
        return self._starter.board.in_hand(worker.worker_id)

    def stack_of(self, worker: WorkerEntry) -> str | None:
        """Where a worker's code is now, if that can be found out."""
        return stack_dump.stack_of(worker.pid, worker.peer.trace_fd)

    def now(self, restarts: dict[int, int]) -> list[WorkerNow]:
        """The current work of every worker; ``restarts`` has the number of restarts of each worker."""
        return [self._now(worker, restarts.get(worker.worker_id, 0)) for worker in list(self.members)]

    def _now(self, worker: WorkerEntry, restarts: int) -> WorkerNow:
        number, row = self.in_hand(worker)
        task = worker.tasks.get(number) or next(iter(worker.tasks.values()), None)
        doing: Doing = "idle"
        index = None
        if not worker.peer.started:
            doing = "starting"
        elif task is not None and task.need is not None:
            doing = "waiting for memory"
        elif task is not None:
            doing = "collating" if task.rows is None else "fetching"
            indices = task.batch.indices
            if task.number == number and isinstance(indices, list) and 0 <= row < len(indices):
                index = str(indices[row])[:80]
        return WorkerNow(
            worker_id=worker.worker_id,
            pid=worker.pid,
            doing=doing,
            batch=None if task is None else task.batch.number,
            index=index,
            since_s=None if task is None else max(0.0, time.monotonic() - task.assigned_s),
            samples=worker.rows_done,
            restarts=restarts,
            private_bytes=worker.peer.private_bytes,
            leaving=worker.leaving,
        )

    # -- memory -----------------------------------------------------------------------------

    def expected_bytes(self, fetch_bytes: int) -> int | None:
        """The expected private memory of all started workers, if each holds ``fetch_bytes`` while it fetches; None
        before the first worker has started."""
        started = [worker for worker in self.members if worker.peer.started]
        return sum(worker.expected_bytes(fetch_bytes) for worker in started) if started else None

    @property
    def base_bytes(self) -> int:
        """The workers' private memory before their first tasks."""
        return sum(worker.base_bytes for worker in self.members)

    @property
    def private_bytes(self) -> int:
        return sum(worker.peer.private_bytes for worker in self.members)

    @property
    def samples_bytes(self) -> int:
        """The private memory that the workers took since they began to fetch samples."""
        return sum(max(0, worker.peer.private_bytes - worker.base_bytes) for worker in self.members)

    def allow_keeping(self, allowed: bool) -> None:
        """Set whether workers may keep the memory of one sample for the next sample."""
        for worker in self.members:
            if worker.peer.started:
                worker.allow_keeping(allowed)

    def return_kept(self) -> None:
        """Make all workers return the memory that they keep."""
        for worker in self.members:
            if worker.may_keep:
                worker.allow_keeping(False)
                worker.allow_keeping(True)

    # -- leaving ----------------------------------------------------------------------------

    def hang_up(self, worker: WorkerEntry) -> None:
        """Stop listening to a worker that has closed its socket."""
        self._selector.unregister(worker.peer)

    def remove(self, worker: WorkerEntry, *, replace: bool) -> None:
        """Remove a crashed worker from the set; ``replace``: whether another worker takes its place."""
        self.has_changed = True
        self.members.remove(worker)
        if replace:
            self._crashed.append(worker)

    def release_leavers(self) -> None:
        """Stop the leaving workers that have finished their tasks."""
        leavers = [worker for worker in self.members if worker.leaving and not worker.tasks]
        if leavers:
            self.members = [worker for worker in self.members if worker not in leavers]
            self.has_changed = True
        for worker in leavers:
            self._stop(worker)

    def _stop(self, worker: WorkerEntry) -> None:
        """Ask a worker to stop; it is reaped when it has ended."""
        self._selector.unregister(worker.peer)
        worker.peer.stop()
        self._departing.append(worker)

    @property
    def has_departing(self) -> bool:
        return bool(self._departing)

    def reap_departed(self) -> None:
        """Reap the stopped workers that have ended, without waiting for the others."""
        ended = [worker for worker in self._departing if worker.peer.is_gone]
        self._departing = [worker for worker in self._departing if worker not in ended]
        for worker in ended:
            worker.peer.reap(0.0)

    def close(self) -> None:
        """Stop and reap all workers."""
        try:
            for worker in self.members:
                # If a change was cut short, the worker may not be registered.
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(worker.peer)
                worker.peer.stop()
            deadline_s = stop_deadline_s()
            for worker in [*self._departing, *self.members]:
                worker.peer.reap(deadline_s)
            self._departing.clear()
        finally:
            self._starter.close()
