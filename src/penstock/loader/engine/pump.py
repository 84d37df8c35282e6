"""The pump: it waits for messages, handles them, and wakes threads that wait.

In:  sockets of the workers; requests of the training thread for batches.
Out: batches that are ready; all other work is advanced as far as possible.
Runs in: trainer: the training thread while it waits for a batch, the engine's own thread while the user computes.

The engine's lock guards all state; no thread sleeps while it holds the lock.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from penstock.loader.engine.batch import Batch
from penstock.loader.engine.budget import MemoryBudget
from penstock.loader.engine.dispatcher import Dispatcher
from penstock.loader.engine.engine_parts import EngineParts
from penstock.loader.engine.integrity import EngineClosed, Integrity
from penstock.loader.engine.settlement import Settlement
from penstock.loader.engine.worker_set import WorkerEntry, WorkerSet
from penstock.loader.stats import Counters
from penstock.workers.channel import ChannelClosed
from penstock.workers.fork_hygiene import ctrl_c_held_back
from penstock.workers.protocol import Done

_DOZE_S = 0.002
"""How long the engine's thread leaves the work to the training thread after a batch. The training thread usually comes
back sooner."""
_MOST_DOZES = 5
"""How many times the engine's thread looks whether the training thread still waits, before it sleeps until it is woken.
Waking it costs the training thread more time than a small batch does."""
_LONGEST_WAIT_S = 1.0
_STARVED_S = 0.005
"""The interval at which the depth may grow while the training loop waits and a worker has nothing to do."""
_DEVICE_POLL_S = 0.001
"""The interval at which the device is asked whether it has read memory. The device sends no event."""
_GATHER_S = 0.0004
"""Reports of short tasks that come faster than this gather before they are read, because each round costs as much time
as a small batch."""


class TimedOut(Exception):
    """No batch came within the user's timeout; the message says which workers the batch waited for."""


class Waker:
    """The selector on which threads wait, and the means to wake these threads."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.sleepers = 0
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self.selector.register(self._read, selectors.EVENT_READ, None)

    def wake(self, *, always: bool = False) -> None:
        """Wake a thread that sleeps; any thread may call this. ``always``: wake a thread that is about to sleep,
        too."""
        if self.sleepers or always:
            with contextlib.suppress(OSError):
                self._write.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._read.recv(4096)

    def close(self) -> None:
        self.selector.close()
        self._read.close()
        self._write.close()


class Pump:
    def __init__(
        self,
        parts: EngineParts,
        budget: MemoryBudget,
        dispatcher: Dispatcher,
        settlement: Settlement,
        *,
        lock: threading.RLock,
        integrity: Integrity,
        waker: Waker,
        counters: Counters,
    ) -> None:
        """``lock`` guards the state of all parts; ``integrity`` notes whether changes of this state were completed.
        Only a signal handler in the middle of a change may find that its own thread already holds the lock."""
        self._workers, self._arena, self._admission = parts.workers, parts.arena, parts.admission
        self._budget, self._dispatcher, self._settlement = budget, dispatcher, settlement
        self._lock, self._integrity, self._waker = lock, integrity, waker
        self._counters, self._rules = counters, parts.rules
        self.poll_device: Callable[[], bool] = lambda: False
        """Releases memory that the device has read; returns whether the device is still reading other memory."""
        self.later: deque[Callable[[], None]] = deque()
        """Changes that a signal handler requested in the middle of another change."""
        self._askers: set[int] = set()
        """The threads inside next_batch, usually none or one. An interrupted thread stays in this set until it asks for
        a batch again."""
        self._parked = False
        self._resume: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Resumes the engine's thread. It is no Event, because Ctrl-C inside an Event leaves the Event's lock taken."""
        self._has_raised = False
        """Whether the latest next_batch raised an error."""
        self.stopping = False
        """Whether the engine is closing or closed."""
        self._epoch_ended = False
        self._last_wait_s = 0.0
        """When a thread last stopped waiting for events."""
        self._last_asked_s = self._left_s = time.monotonic()
        self._patience_s = self._rules.idle_release_s
        """How many seconds may pass without a request for a batch before the memory is released."""
        self._away_s = 0.0
        """How many seconds the user last took between two batches."""
        self._then: Callable[[], None] | None = None
        """The function that the engine's thread calls when it ends."""
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)

    # -- the engine's thread ----------------------------------------------------------------

    def start_thread(self) -> None:
        if self._workers.count and self._thread.ident is None:
            # An interrupted start might leave a lock taken for which the new thread waits.
            with ctrl_c_held_back():
                self._thread.start()

    def stop_thread(self, then: Callable[[], None]) -> None:
        """End the engine's thread and call ``then``, possibly twice. Any thread may call this."""
        here, thread = threading.current_thread(), self._thread
        # The iterator may have been dropped by a signal handler in the middle of a change, or by a garbage collection
        # in the engine's own thread. ``then`` must wait until the change or the thread has ended.
        is_inside = here is thread or self._lock._is_owned()  # type: ignore[attr-defined]
        # Ctrl-C may interrupt the main thread at any moment, but never the engine's thread.
        if here is threading.main_thread() or is_inside:
            self._then = then
        self.stopping = True
        self._resume.put(None)
        self._waker.wake(always=True)
        if is_inside:
            if not thread.is_alive():
                threading.Thread(target=then, name="penstock-close", daemon=True).start()
            return
        if thread.ident is not None:
            thread.join()
        then()

    def _run(self) -> None:
        try:
            self._pump_beside()
        except BaseException as error:
            with self._lock:
                self._integrity.fail(error)
            self._waker.wake(always=True)
        while not self.stopping:
            self._resume.get()
        if self._then is not None:
            self._then()

    def _pump_beside(self) -> None:
        """Pump while the training thread does not."""
        dozes = 0
        while not self.stopping:
            # A loop over tiny batches asks again within microseconds; two threads that pump would only collide.
            is_hasty = self._away_s < _DOZE_S
            if is_hasty and dozes < _MOST_DOZES and (self._askers or time.monotonic() - self._left_s < _DOZE_S):
                dozes = dozes + 1 if self._askers else 0
                time.sleep(_DOZE_S)
                continue
            dozes = 0
            if self._askers:
                self._park()
                continue
            self.turn()
            if self._workers.has_departing:
                with self._lock, self._integrity.change():
                    self._workers.reap_departed()
            if self._is_forgotten():
                with self._lock, self._integrity.change():
                    # The user may have asked for a batch while this thread waited for the lock.
                    if self._is_forgotten():
                        self._release_idle()

    def _release_idle(self) -> None:
        """Release the memory of batches that can be fetched again. In the middle of an epoch ready batches stay,
        because the user comes back for them."""
        if self._epoch_ended or self._arena.headroom_bytes() < self._arena.in_use_bytes:
            self._dispatcher.release_idle()
        else:
            self._arena.close_free()

    def _is_forgotten(self) -> bool:
        """Whether the user has asked for no batch for so long that other programs should get the memory."""
        is_late = time.monotonic() - self._last_asked_s > self._patience_s
        return is_late and not self._askers and not self._dispatcher.paused

    def _park(self) -> None:
        """Wait until the training thread has its batch."""
        self._parked = True
        if self._askers:
            self._resume.get()
        self._parked = False

    # -- one turn ---------------------------------------------------------------------------

    def turn(self, wait_s: float = _LONGEST_WAIT_S) -> None:
        """Wait for events, then handle them."""
        waker = self._waker
        waker.sleepers += 1
        try:
            if self.stopping:
                return
            if self._arena.has_returned:
                with self._lock:
                    if self._integrity.changing:
                        raise self._integrity.broken()
                    self._integrity.changing = True
                    self.pump()
                    self._integrity.changing = False
            # This thread already counts as asleep, so a copy that starts after the poll wakes it.
            if wait_s and self.poll_device():
                wait_s = min(wait_s, _DEVICE_POLL_S)
            if wait_s and self._dispatcher.queues_many and time.monotonic() - self._last_wait_s < _GATHER_S:
                time.sleep(_GATHER_S)
            try:
                events = waker.selector.select(wait_s)
            except (OSError, ValueError):
                # Another thread has closed the selector during the wait.
                if self.stopping:
                    return
                raise
            self._last_wait_s = time.monotonic()
        finally:
            waker.sleepers -= 1
        with self._lock:
            if self.stopping:
                return
            if self._integrity.changing:
                raise self._integrity.broken()
            self._integrity.changing = True
            self.pump(events)
            self._integrity.changing = False
        # Another thread's select() did not see these events. Wake that thread in case it waits for one of the events.
        if any(key.data is not None for key, _ in events):
            waker.wake()

    def pump(self, events: Any = ()) -> None:
        """Handle events, then advance all work; called under the lock."""
        for key, _ in events:
            worker: WorkerEntry | None = key.data
            if worker is None:
                self._waker.clear()
            elif worker in self._workers.members:
                self._listen(worker)
        while self.later:
            self.later.popleft()()
        self._budget.update()
        self._admission.keep_within()
        self.progress()

    def progress(self) -> None:
        """Assign tasks, release workers that leave, replace crashed workers, send messages; called under the lock."""
        self._dispatcher.progress()
        self._workers.release_leavers()
        # After an error, replacements wait until the user asks again, because most loops end with the error.
        if self._admission.failure is None and not self._has_raised:
            for crashed in self._workers.replace_crashed():
                self._counters.note_restart(crashed.worker_id, crashed.ending)
        self._workers.flush()

    def _listen(self, worker: WorkerEntry) -> None:
        try:
            messages = worker.peer.read_available()
        except ChannelClosed:
            self._workers.hang_up(worker)
            self._settlement.on_crash(worker)
            return
        now_s = time.monotonic()
        for message in messages:
            if isinstance(message, Done):
                self._dispatcher.note_answer(now_s - message.sent_s)
                self._counters.fetch_s += message.fetch_s
                self._counters.collate_s += message.collate_s
            self._settlement.on_message(worker, message)

    # -- the training thread ----------------------------------------------------------------

    def next_batch(self, timeout_s: float, draw_ahead: Callable[[], None]) -> Batch | None:
        """The next batch; None once every offered batch is taken or the workers are exhausted. ``draw_ahead`` draws and
        offers more batches if the depth has grown during the wait."""
        me = threading.get_ident()
        self._askers.add(me)
        try:
            if self._admission.notices.texts:
                self._admission.notices.give()
            with self._lock:
                if self.stopping:
                    raise EngineClosed
                if self._integrity.changing:
                    raise self._integrity.broken()
                self._integrity.changing = True
                self._last_asked_s = time.monotonic()
                self._away_s = self._last_asked_s - self._left_s
                self._arena.collect_returned()
                self._arena.pass_fence()
                self._dispatcher.paused = self._has_raised = False
                self._admission.user_holds = max(1, self._arena.lent_count)
                self._dispatcher.note_asked()
                batch = self._take()
                self._integrity.changing = False
            if batch is None:
                batch = self._wait(timeout_s, draw_ahead)
            return batch
        finally:
            self._left_s = time.monotonic()
            self._askers.discard(me)
            if self._parked and not self._askers:
                self._resume.put(None)

    def try_next(self) -> Batch | None:
        """The next batch, or None if it is not ready now."""
        with self._lock, self._integrity.change():
            self._last_asked_s = self._left_s = time.monotonic()
            self._away_s = 0.0
            self._dispatcher.paused = False
            if self._dispatcher.has_ready:
                self._dispatcher.note_asked()
            batch = self._settlement.take_ready()
        if batch is None and not self.stopping:
            self.turn(0.0)
            with self._lock, self._integrity.change():
                batch = self._settlement.take_ready()
        return batch

    def begin_epoch(self) -> None:
        """Note that the user asks for another epoch: the memory will not be released soon. Called under the lock."""
        self._last_asked_s = time.monotonic()
        self._patience_s = self._rules.idle_release_s
        self._epoch_ended = self._has_raised = False

    def end_epoch(self) -> None:
        self._epoch_ended = True
        self._patience_s = self._rules.epoch_end_release_s

    def _wait(self, timeout_s: float, draw_ahead: Callable[[], None]) -> Batch | None:
        """Pump until a batch is ready or no further batch can come."""
        began = self._counters.waits_since_s = time.perf_counter()
        deadline = time.monotonic() + timeout_s if timeout_s > 0 else None
        try:
            with self._lock:
                if self._integrity.changing:
                    raise self._integrity.broken()
                self._integrity.changing = True
                self._admission.trainer_waits = True
                if not self.stopping:
                    self.pump()
                self._integrity.changing = False
            while not self.stopping:
                self._admission.notices.give()
                failure, is_over, most_s = None, False, _LONGEST_WAIT_S
                with self._lock:
                    if self._integrity.changing:
                        raise self._integrity.broken()
                    self._integrity.changing = True
                    batch = self._take()
                    if batch is None:
                        failure, self._admission.failure = self._admission.failure, None
                        self._has_raised = failure is not None
                    if batch is None and failure is None:
                        batch = self._dispatcher.take_for_trainer()
                        is_over = self._settlement.is_over
                        self._arena.pass_fence()
                        most_s = _STARVED_S if self._dispatcher.is_starved else _LONGEST_WAIT_S
                        most_s = _DEVICE_POLL_S if self._arena.is_returning else most_s
                    self._integrity.changing = False
                if failure is not None:
                    raise failure
                if batch is not None or is_over:
                    return batch
                wait_s = most_s if deadline is None else min(most_s, deadline - time.monotonic())
                if wait_s <= 0:
                    with self._lock:
                        report = timeout_report(self._workers, self._admission.due)
                    raise TimedOut(report)
                self.turn(wait_s)
                draw_ahead()
            raise EngineClosed
        finally:
            self._admission.trainer_waits = False
            self._counters.waits_since_s = None
            self._counters.note_wait(time.perf_counter() - began)

    def _take(self) -> Batch | None:
        batch = self._settlement.take_ready()
        if batch is not None:
            # The loop variable holds the previous batch until next() returns, so that batch need not be handed over.
            self._admission.trainer_waits = False
        return batch


def timeout_report(workers: WorkerSet, due: Batch | None) -> str:
    """Describes the workers that keep the batch waiting: their samples, since when, and where their code is."""
    starting = [worker.worker_id for worker in workers.members if not worker.peer.started]
    lines = [f"workers {starting} have not started yet"] if starting else []
    for worker, task in ((w, t) for w in workers.members for t in w.tasks.values() if t.batch is due):
        number, row = workers.in_hand(worker)
        what = task.describe(row if number == task.number else -1)
        lines.append(
            f"worker {worker.worker_id} (pid {worker.pid}) has worked on {what} of batch {task.batch.number} for "
            f"{time.monotonic() - task.assigned_s:.1f} s"
        )
        stack = workers.stack_of(worker)
        lines += [] if stack is None else ["  " + line for line in stack.splitlines()]
    return "\n".join(lines)
