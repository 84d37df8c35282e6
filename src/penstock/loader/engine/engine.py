"""The engine of one iterator: workers, arena and the parts that move batches between them, behind one façade.

In:  batches of indices from the iterator; ``next_batch`` calls from the training thread.
Out: batches of data; gauges to read and valves to set.
Runs in: trainer: the training thread and one thread of its own.

Code outside this folder calls only the façade's methods. The gauges are ``gauges()``, ``workers_now()``, ``depth`` and
``undelivered``; the valves are ``set_workers``, ``set_depth`` and ``set_memory``.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.arena.arena import Arena
from penstock.arena.segment import HAS_MEMFD
from penstock.device.cuda import mark_all_work, wait_for_all_work
from penstock.device.fence import Fence
from penstock.device.page_locks import PageLocks
from penstock.errors import PenstockError
from penstock.loader.engine.batch import Batch
from penstock.loader.engine.budget import MemoryBudget
from penstock.loader.engine.crashes import CrashCounter
from penstock.loader.engine.delivery import Delivery
from penstock.loader.engine.dispatcher import Dispatcher
from penstock.loader.engine.engine_parts import EngineParts
from penstock.loader.engine.integrity import EngineClosed, Integrity
from penstock.loader.engine.pump import Pump, Waker
from penstock.loader.engine.settlement import Settlement
from penstock.loader.engine.worker_set import WorkerNow, WorkerSet
from penstock.loader.rules import LoaderRules, Order
from penstock.loader.stats import Counters
from penstock.workers.protocol import Restart, Resume
from penstock.workers.worker import WorkerStarter

_GAUGES_WITHIN_S = 0.1


class EngineGauges(NamedTuple):
    """The gauges of one engine at one moment."""

    is_closed: bool
    depth: int
    """The number of batches that may be ahead of the user."""
    ready: int
    """The number of batches that are ready but not taken."""
    memory_bytes: int
    """The budget in force."""
    in_flight_bytes: int
    """Bytes of the arena's segments: those being filled, ready, lent, or kept for reuse."""
    peak_in_flight_bytes: int
    lent_bytes: int
    copied_bytes: int
    """The total bytes of batches that became the user's own."""
    workers_private_bytes: int
    page_locked_bytes: int
    splits_batches: bool
    """Whether rows of one batch come from several workers."""


class Engine:
    def __init__(
        self,
        *,
        starter: WorkerStarter,
        workers: int,
        order: Order,
        memory_bytes: int,
        headroom_bytes: Callable[[], int],
        spare_files: int | None,
        diagnosis: Callable[[], str | None],
        rules: LoaderRules,
        counters: Counters,
        depth: int | None,
        depth_ceiling: int | None,
        fetch_here: Callable[[Batch], Any],
        resume: dict[int, Resume],
        page_locks: PageLocks | None,
    ) -> None:
        """``spare_files``: how many more files this process may open. ``diagnosis`` returns the machine's explanation
        of a crash. ``fetch_here`` fetches a batch in the training thread when there are no workers. ``resume``: where
        each worker with batches of its own continues. ``page_locks`` locks the segments that a device will read."""
        self._pid = os.getpid()
        self._closed = False
        self._fetch_here = fetch_here
        self._resume_at = resume
        self._counters = counters
        self._page_locks = page_locks
        if spare_files is not None:
            # Each segment, even a free one, has a descriptor in this process, and another descriptor on its way to each
            # worker.
            rules = dataclasses.replace(rules, most_slots=max(2, min(rules.most_slots, spare_files // 4)))
        self._lock = threading.RLock()
        self._integrity = Integrity()
        self._waker = Waker()
        self._workers = WorkerSet(
            starter,
            workers,
            selector=self._waker.selector,
            lock=self._lock,
            wake=lambda: self._waker.wake(always=True),
            start_failed=lambda worker_id, problem: self._settlement.on_failed_start(worker_id, problem),
            keeps_position=order.bound,
        )
        self._arena = Arena(
            limit_bytes=memory_bytes,
            headroom_bytes=headroom_bytes,
            closed=self._workers.forget_segment,
            woken=self._waker.wake,
            keep_free=rules.most_slots,
            use_memfd=HAS_MEMFD,
            locks=page_locks,
            fence=None if page_locks is None else Fence(mark_all_work),
            starter=starter,
        )
        self._delivery = Delivery(self._arena, page_locks)
        parts = EngineParts(workers=self._workers, arena=self._arena, order=order, rules=rules)
        self._pace, self._admission = parts.pace, parts.admission
        if page_locks is not None:
            page_locks.warn = self._admission.notices.add
        self._budget = MemoryBudget(memory_bytes, parts)
        self._settlement = Settlement(parts, CrashCounter(diagnosis=diagnosis), self._budget)
        self._dispatcher = Dispatcher(parts, self._budget)
        self._dispatcher.depth_wanted, self._dispatcher.depth_ceiling = depth, depth_ceiling
        self._pump = Pump(
            parts,
            self._budget,
            self._dispatcher,
            self._settlement,
            lock=self._lock,
            integrity=self._integrity,
            waker=self._waker,
            counters=counters,
        )

    def start(self) -> None:
        """Start the workers. The first workers already fetch the offered batches while the last workers start."""
        try:
            for _ in self._workers.start_first(self._resume_at):
                with self._lock, self._integrity.change():
                    self._pump.pump(self._waker.selector.select(0))
            # The thread is not started earlier, because Python warns about a fork while a second thread runs.
            self._pump.start_thread()
        except BaseException:
            self._pump.stop_thread(then=self._shut_down)
            raise

    # -- batches ----------------------------------------------------------------------------

    def offer(self, batch: Batch) -> None:
        """Add a batch drawn from the sampler, in order."""
        self._dispatcher.offer(batch)

    def next_batch(self, timeout_s: float, draw_ahead: Callable[[], None]) -> Batch | None:
        """The next batch to deliver; None once every offered batch is taken or the workers are exhausted.
        ``draw_ahead`` is called during a wait to offer more batches. Raises ``TimedOut``, ``EngineClosed``, and
        ``IterationBroken`` if the engine cannot go on."""
        return self._pump.next_batch(timeout_s, draw_ahead)

    def try_next(self) -> Batch | None:
        """The next batch, or None if it is not ready now."""
        return self._pump.try_next()

    def deliver(self, batch: Batch, *, stays_on_host: Callable[[Any], bool] | None = None) -> Any:
        """Turn a batch into the user's data. Raises the exception of its sampler, dataset or collate function; the next
        batch is not affected.

        ``stays_on_host`` returns whether the user gets tensors in page-locked memory; None if that is always so.
        """
        began, waited_s = time.perf_counter(), self._counters.wait_s
        try:
            failure = batch.failure and batch.failure()
            if failure is not None:
                raise failure.error
            if batch.error is not None:
                batch.error[1].reraise()
            if not batch.ready:
                return self._wait_for_trainer(batch)
            with self._lock:
                if self._pump.stopping:
                    raise EngineClosed
                if self._integrity.changing:
                    raise self._integrity.broken()
                self._integrity.changing = True
                try:
                    data = self._delivery.data_of(batch, stays_on_host)
                except Exception:
                    self._integrity.changing = False
                    raise
                self._integrity.changing = False
                return data
        finally:
            self._move_on()
            self._counters.deliver_s += time.perf_counter() - began - (self._counters.wait_s - waited_s)

    def _wait_for_trainer(self, batch: Batch) -> Any:
        """Fetch the batch in this thread."""
        began = self._counters.waits_since_s = time.perf_counter()
        try:
            return self._fetch_here(batch)
        finally:
            self._counters.waits_since_s = None
            self._counters.note_wait(time.perf_counter() - began)

    def _move_on(self) -> None:
        """Use the memory and the place that a delivered batch has left. An error is raised in the next call, because
        the user gets this batch first."""
        with self._lock:
            if self._pump.stopping or self._integrity.changing:
                return
            self._integrity.changing = True
            try:
                self._pump.progress()
            except Exception as error:
                self._integrity.fail(error)
                return
            self._integrity.changing = False

    # -- epochs -----------------------------------------------------------------------------

    def begin_epoch(self, shared_seed: int | None, *, finish_offered: bool) -> None:
        """Drop what is left of the epoch; the same workers begin the next epoch. ``finish_offered``: whether they
        finish the offered batches first."""
        if finish_offered:
            self._finish_offered()
        with self._lock, self._integrity.change():
            self._dispatcher.abandon()
            self._pump.begin_epoch()
        while not self._pump.stopping:
            with self._lock:
                if self._dispatcher.is_idle:
                    break
            self._pump.turn()
        with self._lock, self._integrity.change():
            if self._pump.stopping:
                return
            self._dispatcher.begin_epoch()
            for worker in self._workers.members:
                worker.peer.post(Restart(shared_seed))
            self._pump.progress()

    def _finish_offered(self) -> None:
        """Finish the offered batches, as torch does. The generators of a worker continue from the last of these
        batches, and must not depend on how far the worker was when the user left the epoch."""
        try:
            while (batch := self._pump.next_batch(0.0, lambda: None)) is not None:
                with self._lock, self._integrity.change():
                    self._admission.release(batch)
        except (PenstockError, EngineClosed):
            return  # the workers cannot go on

    def end_epoch(self) -> None:
        """Note the end of the epoch. The next epoch usually begins at once; if not, the workers stay and the memory is
        released."""
        self._pump.end_epoch()

    # -- valves -----------------------------------------------------------------------------

    def set_workers(self, count: int) -> None:
        """Change the number of workers: new workers join when they have started, others leave when their tasks are
        done."""

        def apply() -> None:
            self._workers.resize(count)
            self._pump.start_thread()

        self._turn_valve(apply)

    def set_depth(self, depth: int | None, ceiling: int | None) -> None:
        """Set how many batches may be ahead of the user. ``depth`` None: the engine decides; ``ceiling`` None: no
        ceiling."""

        def apply() -> None:
            self._dispatcher.depth_wanted, self._dispatcher.depth_ceiling = depth, ceiling

        self._turn_valve(apply)

    def set_memory(self, memory_bytes: int) -> None:
        self._turn_valve(lambda: self._budget.set(memory_bytes))

    def _turn_valve(self, apply: Callable[[], None]) -> None:
        if self._lock._is_owned():  # type: ignore[attr-defined]
            # A signal handler made this call in the middle of a change, and that change must be completed first.
            self._pump.later.append(apply)
            self._waker.wake(always=True)
            return
        with self._lock:
            if self._pump.stopping or self._integrity.changing:
                return
            with self._integrity.change():
                apply()
                self._pump.pump()

    # -- gauges -----------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def can_go_on(self) -> bool:
        """Whether another epoch can begin: the engine is neither closed nor broken."""
        with self._lock:
            return not self._pump.stopping and not self._integrity.changing

    @property
    def depth(self) -> int:
        """The number of batches that may be ahead of the user, as set by the user or as decided last."""
        return self._dispatcher.depth_wanted or self._dispatcher.depth

    @property
    def undelivered(self) -> int:
        """The number of batches that were offered but not taken yet."""
        return len(self._admission.upcoming) + len(self._admission.open)

    def gauges(self) -> EngineGauges:
        """All gauges at one moment."""
        is_locked = self._lock_for_gauges()
        try:
            return self._read_gauges()
        finally:
            if is_locked:
                self._lock.release()

    def workers_now(self) -> list[WorkerNow]:
        """The current work of every worker."""
        is_locked = self._lock_for_gauges()
        try:
            return [] if self._closed else self._workers.now(self._counters.restarts_by_worker)
        finally:
            if is_locked:
                self._lock.release()

    def _lock_for_gauges(self) -> bool:
        # A warning of this engine may run code that reads the gauges, in the thread that already holds the lock.
        return self._lock.acquire(timeout=_GAUGES_WITHIN_S)

    def _read_gauges(self) -> EngineGauges:
        return EngineGauges(
            is_closed=self._closed,
            depth=self._dispatcher.depth,
            ready=sum(batch.ready for batch in list(self._admission.open.values())),
            memory_bytes=self._budget.memory_bytes,
            in_flight_bytes=self._arena.in_use_bytes + self._arena.free_bytes,
            peak_in_flight_bytes=self._arena.peak_bytes,
            lent_bytes=self._arena.lent_bytes,
            copied_bytes=self._arena.handed_over_bytes,
            workers_private_bytes=self._workers.private_bytes,
            page_locked_bytes=0 if self._page_locks is None else self._page_locks.locked_bytes,
            splits_batches=self._pace.splits,
        )

    # -- the device -------------------------------------------------------------------------

    def watch_device(self, poll: Callable[[], bool]) -> None:
        """``poll`` releases memory that the device has read, and returns whether the device is still reading other
        memory."""
        self._pump.poll_device = poll

    def wake(self) -> None:
        """Wake a waiting thread: a copy to the device has started."""
        self._waker.wake()

    # -- closing ----------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the workers and release all memory except batches that the user holds. Any thread may call this, any
        number of times."""
        if os.getpid() == self._pid:
            self._pump.stop_thread(then=self._shut_down)

    def _shut_down(self) -> None:
        self._workers.await_starts()
        with self._lock:
            if self._closed:
                return
            problem: Exception | None = None
            for step in (
                self._keep_last_gauges,
                self._workers.close,
                self._await_device,
                self._pump.poll_device,
                self._arena.close,
                self._waker.close,
            ):
                try:
                    step()
                except Exception as error:
                    problem = problem or error
            self._closed = True
            # If a change was cut short, closing may fail on the half-made state. The user has received the first error
            # already.
            if problem is not None and not self._integrity.changing:
                raise problem

    def _keep_last_gauges(self) -> None:
        self._counters.note_engine_closed(self._read_gauges())

    def _await_device(self) -> None:
        if self._page_locks is not None and self._page_locks.locked_bytes:
            # Copies to the device may be in progress if the iterator was dropped in the middle of an epoch.
            wait_for_all_work()
