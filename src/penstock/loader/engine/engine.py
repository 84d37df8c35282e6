"""The engine of one iterator: workers, arena and dispatcher, and who turns the crank.

In:  indices from the iterator, ``next_batch`` calls from the training thread.
Out: decoded batches.
Runs in: trainer: the training thread and one thread of its own.

Whoever has time pumps: the training thread while it waits for a batch, the engine's thread while the user
computes. One lock guards all state; nobody sleeps with it held.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.arena.arena import Arena
from penstock.arena.segment import HAS_MEMFD
from penstock.device.cuda import mark_all_work, wait_for_all_work
from penstock.device.fence import Fence
from penstock.device.page_locks import PageLocks
from penstock.loader.engine.batch import Batch
from penstock.loader.engine.crashes import DeathToll
from penstock.loader.engine.crew import Crew, forget_segment
from penstock.loader.engine.delivery import Delivery
from penstock.loader.engine.dispatcher import Dispatcher
from penstock.loader.engine.estimates import Pace
from penstock.loader.engine.order import Order
from penstock.loader.engine.rules import LoaderRules
from penstock.loader.engine.seat import Seat
from penstock.loader.engine.timeout_report import who_is_late
from penstock.loader.stats import Counters
from penstock.workers.channel import ChannelClosed
from penstock.workers.protocol import Done, Restart, Resume
from penstock.workers.worker import WorkerStarter

_DOZE_S = 0.002
"""How long the engine's thread leaves the training thread alone after a batch: it is usually back sooner."""
_DOZES = 5
"""Looks the engine's thread takes at a training thread that waits, before it waits to be called: calling costs the
training thread more than a small batch."""
_LOOK_AROUND_S = 1.0
_LOOK_AT_DEVICE_S = 0.001
"""How often to ask whether the device is done with memory: it tells nobody."""
_GATHER_S = 0.0004
"""Reports of short tasks that come faster than this are left to gather: every look costs as much as a small batch."""
_GAUGE_WITHIN_S = 0.1


class Held(NamedTuple):
    """Memory of one engine."""

    in_flight_bytes: int
    lent_bytes: int
    private_bytes: int


class TimedOut(Exception):
    """No batch within the time the user allowed; says who was waited for."""


class Engine:
    def __init__(
        self,
        *,
        pool: WorkerStarter,
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
        """``spare_files`` is how many files may still be opened; ``fetch_here`` fetches a batch in the training thread,
        for when there are no workers; ``resume`` says where workers with batches of their own go on, by worker;
        ``page_locks`` is for batches that a device will read."""
        self._page_locks = page_locks
        self.poll: Callable[[], bool] = lambda: False
        """Lets go of memory the device has read, and says whether it is still reading some."""
        self._fetch_here = fetch_here
        self._resume_at = resume
        self._rules = rules
        self._counters = counters
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._sleepers = 0
        self._askers = 0
        """Threads inside next_batch: usually none or one."""
        self._parked = False
        self._resume = threading.Event()
        self._closing = False
        self._closed = self._closed_here = False
        self._looked_s = 0.0
        """When a thread last stopped waiting for something to happen."""
        self._last_asked_s = self._left_s = time.monotonic()
        self._patience_s = rules.idle_release_s
        """How long nobody may ask before the memory goes back."""
        self._away_s = 0.0
        """How long the user last took between two batches."""
        self._pid = os.getpid()
        self._crew = Crew(pool, self._selector, lock=self._lock, woken=functools.partial(self._wake, always=True))
        # A segment has a descriptor, and another for each worker it is on its way to; free ones are kept as well.
        if spare_files is not None:
            rules = dataclasses.replace(rules, most_slots=max(2, min(rules.most_slots, spare_files // 4)))
        self.arena = Arena(
            limit_bytes=memory_bytes,
            headroom_bytes=headroom_bytes,
            closed=lambda segment: forget_segment(self.dispatcher.roster.seats, segment),
            woken=self._wake,
            keep_free=rules.most_slots,
            use_memfd=HAS_MEMFD,
            locks=page_locks,
            fence=None if page_locks is None else Fence(mark_all_work),
        )
        self._delivery = Delivery(self.arena, page_locks)
        self.dispatcher = Dispatcher(
            arena=self.arena,
            rules=rules,
            pace=Pace(rules, splits=order.splittable),
            order=order,
            workers=workers,
            memory_bytes=memory_bytes,
            deaths=DeathToll(in_hand=self._crew.in_hand, diagnosis=diagnosis),
        )
        self.dispatcher.depth_wanted = depth
        self.dispatcher.depth_ceiling = depth_ceiling
        self._thread = threading.Thread(target=self._run, name="penstock-dispatch", daemon=True)

    def start(self) -> None:
        """Start the workers, and the first of them on what has been offered while the last are still being started."""
        try:
            for worker_id in itertools.islice(self.dispatcher.roster.free_ids(), self.dispatcher.roster.workers):
                self._crew.start_first(self.dispatcher, worker_id, self._resume_at.get(worker_id))
                self._pump(self._selector.select(0))
            # Only now: forking with a second thread about is what Python warns of.
            self._start_thread()
        except BaseException:
            self._shut_down()
            raise

    def resize(self, workers: int) -> None:
        """More or fewer workers, now: new ones join as soon as they are up, others leave with their work done."""
        with self._lock:
            if self._closed:
                return
            self._crew.start_more(self.dispatcher, self.dispatcher.roster.resize(workers))
            self._start_thread()
            self._pump(())

    def set_depth(self, depth: int | None, ceiling: int | None) -> None:
        with self._lock:
            self.dispatcher.depth_wanted, self.dispatcher.depth_ceiling = depth, ceiling
            if not self._closed:
                self._pump(())

    def set_memory(self, memory_bytes: int) -> None:
        with self._lock:
            self.dispatcher.set_memory(memory_bytes)
            if not self._closed:
                self._pump(())

    # -- the training thread -----------------------------------------------------------

    def offer(self, batch: Batch) -> None:
        """A batch drawn from the sampler, in order."""
        self.dispatcher.admission.upcoming.append(batch)

    @property
    def memory_bytes(self) -> int:
        """The budget in force."""
        return self.dispatcher.memory_bytes

    @property
    def depth(self) -> int:
        """Batches that may be ahead of the user."""
        return self.dispatcher.depth_wanted or self.dispatcher.depth

    @property
    def undelivered(self) -> int:
        """Batches that were offered and not taken yet."""
        admission = self.dispatcher.admission
        return len(admission.upcoming) + len(admission.open)

    def next_batch(self, timeout_s: float) -> Batch | None:
        """The next batch, to be delivered; None once every batch that was offered is done or its workers exhausted."""
        self._askers += 1
        try:
            with self._lock:
                self._last_asked_s = time.monotonic()
                self._away_s = self._last_asked_s - self._left_s
                self.arena.collect_returned()
                self.arena.pass_fence()
                self.dispatcher.paused = False
                self.dispatcher.admission.user_holds = max(1, self.arena.lent_count)
                batch = self._take()
            if batch is None:
                batch = self._wait(timeout_s)
            return batch
        finally:
            self._left_s = time.monotonic()
            self._askers -= 1
            if self._parked and not self._askers:
                self._resume.set()

    def restart(self, shared_seed: int | None) -> None:
        """Forget the rest of the epoch; the same workers begin the next."""
        with self._lock:
            self.dispatcher.abandon()
            self._last_asked_s = time.monotonic()
            self._patience_s = self._rules.idle_release_s
        while True:
            with self._lock:
                if self.dispatcher.is_idle or self.dispatcher.failure is not None:
                    break
            self._turn(_LOOK_AROUND_S)
        with self._lock:
            self.dispatcher.begin_epoch()
            for seat in self.dispatcher.roster.seats:
                seat.handle.post(Restart(shared_seed))
            self._progress()

    def rest(self) -> None:
        """The epoch is over. The next one usually begins at once; if not, the workers stay and the memory goes."""
        self._patience_s = self._rules.epoch_end_release_s

    @property
    def is_closed(self) -> bool:
        return self._closed

    def held(self) -> Held:
        """The memory there is at one moment: between two looks a worker may have grown and the arena made room."""
        # Whoever asks from inside a warning of this engine's holds the lock already.
        is_locked = self._lock.acquire(timeout=_GAUGE_WITHIN_S)
        try:
            arena = self.arena
            return Held(arena.in_use_bytes + arena.free_bytes, arena.lent_bytes, self.dispatcher.roster.private_bytes)
        finally:
            if is_locked:
                self._lock.release()

    def close(self) -> None:
        """Stop the workers and let go of all memory but what the user holds. Any thread, any number of times."""
        if os.getpid() != self._pid:
            return
        self._closing = True
        self._resume.set()
        self._wake(always=True)
        if threading.current_thread() is self._thread:
            # A garbage collection in the engine's own thread took the iterator: the thread sees to the rest.
            self._closed_here = True
            return
        if self._thread.ident is not None:
            self._thread.join()
        self._shut_down()

    # -- turning the crank ----------------------------------------------------------------

    def _run(self) -> None:
        """The engine's own thread: pumps while the training thread does not."""
        dozes = 0
        while not self._closing:
            # A loop over tiny batches is back within microseconds; two threads pumping would only collide.
            is_hasty = self._away_s < _DOZE_S
            if is_hasty and dozes < _DOZES and (self._askers or time.monotonic() - self._left_s < _DOZE_S):
                dozes = dozes + 1 if self._askers else 0
                time.sleep(_DOZE_S)
                continue
            dozes = 0
            if self._askers:
                self._park()
                continue
            self._turn(_LOOK_AROUND_S)
            if self._crew.has_departing:
                with self._lock:
                    self._crew.bury_departed()
            if self._is_forgotten():
                with self._lock:
                    # Somebody may have asked while this thread waited for the lock.
                    if self._is_forgotten():
                        self.dispatcher.release_idle()
        if self._closed_here:
            self._shut_down()

    def _is_forgotten(self) -> bool:
        """Whether nobody has asked for so long that the memory is better used elsewhere."""
        is_late = time.monotonic() - self._last_asked_s > self._patience_s
        return is_late and not self._askers and not self.dispatcher.paused

    def _park(self) -> None:
        """Wait until the training thread has its batch."""
        self._parked = True
        if self._askers:
            self._resume.wait()
        self._parked = False
        self._resume.clear()

    def _turn(self, wait_s: float) -> None:
        """Wait for something to happen, then deal with it."""
        self._sleepers += 1
        try:
            if self._closing:
                return
            if self.arena.has_returned:
                with self._lock:
                    self._pump(())
            # After this thread counts as sleeping: who sends something to the device from now on wakes it.
            if wait_s and self.poll():
                wait_s = min(wait_s, _LOOK_AT_DEVICE_S)
            if wait_s and self.dispatcher.queues_many and time.monotonic() - self._looked_s < _GATHER_S:
                time.sleep(_GATHER_S)
            events = self._selector.select(wait_s)
            self._looked_s = time.monotonic()
        finally:
            self._sleepers -= 1
        with self._lock:
            if not self._closing:
                self._pump(events)
        # Whoever sleeps beside this thread was not woken for what it has just dealt with, and may have waited for it.
        if any(key.data is not None for key, _ in events):
            self._wake()

    def _pump(self, events: Any) -> None:
        dispatcher = self.dispatcher
        for key, _ in events:
            seat: Seat | None = key.data
            if seat is None:
                with contextlib.suppress(BlockingIOError):
                    self._wake_read.recv(4096)
            elif seat in dispatcher.roster.seats:
                self._listen(seat)
        dispatcher.keep_within_memory()
        self._progress()

    def _progress(self) -> None:
        self.dispatcher.progress()
        for seat in self.dispatcher.roster.take_leavers():
            self._crew.dismiss(seat)
        for seat in self.dispatcher.roster.take_dead():
            self._crew.replace(self.dispatcher, seat)
            self._counters.note_restart(seat.handle.worker_id, seat.ending)
        self._crew.flush(self.dispatcher.roster.seats)

    def _listen(self, seat: Seat) -> None:
        try:
            messages = seat.handle.read_available()
        except ChannelClosed:
            self._crew.lose(seat)
            self.dispatcher.on_death(seat)
            return
        for message in messages:
            if isinstance(message, Done):
                self._counters.fetch_s += message.fetch_s
                self._counters.collate_s += message.collate_s
            self.dispatcher.on_message(seat, message)

    def wake(self) -> None:
        """There is something to look at, such as a copy under way."""
        self._wake()

    def _wake(self, always: bool = False) -> None:
        if self._sleepers or always:
            with contextlib.suppress(OSError):
                self._wake_write.send(b"\0")

    # -- inside ---------------------------------------------------------------------------

    def _wait(self, timeout_s: float) -> Batch | None:
        """Pump until a batch is ready or there will be none."""
        began = self._counters.waits_since_s = time.perf_counter()
        deadline = time.monotonic() + timeout_s if timeout_s > 0 else None
        try:
            with self._lock:
                self.dispatcher.admission.trainer_waits = True
                self._pump(())
            while True:
                with self._lock:
                    batch = self._take() or self.dispatcher.take_for_trainer()
                    if batch is not None or self.dispatcher.is_over:
                        return batch
                    self.arena.pass_fence()
                    look_s = _LOOK_AT_DEVICE_S if self.arena.is_returning else _LOOK_AROUND_S
                wait_s = look_s if deadline is None else min(look_s, deadline - time.monotonic())
                if wait_s <= 0:
                    with self._lock:
                        raise TimedOut(who_is_late(self.dispatcher, self._crew))
                self._turn(wait_s)
        finally:
            self.dispatcher.admission.trainer_waits = False
            self._counters.waits_since_s = None
            self._counters.note_wait(time.perf_counter() - began)

    def _take(self) -> Batch | None:
        dispatcher = self.dispatcher
        batch = dispatcher.take_ready()
        if batch is not None:
            # The loop variable holds the batch before this one until next() returns: not a reason to hand it over.
            dispatcher.admission.trainer_waits = False
        elif dispatcher.failure is not None:
            failure, dispatcher.failure = dispatcher.failure, None
            raise failure
        return batch

    def try_next(self) -> Batch | None:
        """The next batch if it lies ready, or has just come."""
        with self._lock:
            self._last_asked_s = self._left_s = time.monotonic()
            self._away_s = 0.0
            self.dispatcher.paused = False
            batch = self.dispatcher.take_ready()
        if batch is None:
            self._turn(0.0)
            with self._lock:
                batch = self.dispatcher.take_ready()
        return batch

    def deliver(self, batch: Batch, *, stays_on_host: Callable[[Any], bool] | None = None) -> Any:
        """Make a batch the user's. Raises what its sampler, dataset or collate raised; the next is not affected.

        ``stays_on_host`` says whether the user gets to see tensors in page-locked memory; None: always.
        """
        began = time.perf_counter()
        try:
            if batch.failure is not None:
                raise batch.failure
            if batch.error is not None:
                batch.error[1].reraise()
            if not batch.ready:
                return self._fetch_here(batch)
            with self._lock:
                return self._delivery.data_of(batch, stays_on_host)
        finally:
            with self._lock:
                if not self._closed:
                    self._progress()
            self._counters.deliver_s += time.perf_counter() - began

    def _note_last(self) -> None:
        """What the loader's stats should still know when this engine is gone."""
        counters = self._counters
        counters.peak_bytes = max(counters.peak_bytes, self.arena.peak_bytes)
        counters.handed_over_bytes += self.arena.handed_over_bytes
        counters.depth, counters.shared_batches = self.dispatcher.depth, self.dispatcher.pace.splits

    def _start_thread(self) -> None:
        if self.dispatcher.roster.workers and self._thread.ident is None:
            self._thread.start()

    def _shut_down(self) -> None:
        self._crew.await_starters()
        with self._lock:
            if self._closed:
                return
            self._closed = self._closing = True
            self._crew.close(self.dispatcher.roster.seats)
            self._note_last()
            if self._page_locks is not None and self._page_locks.locked_bytes:
                # Whoever dropped the iterator in the middle may have left copies under way.
                wait_for_all_work()
            self.poll()
            self.arena.close()
            self._selector.close()
            self._wake_read.close()
            self._wake_write.close()
