"""The workers of one engine: who is started, seated, sent away and buried.

In:  how many there are to be; seats that fell vacant.
Out: seats in the dispatcher, and their lines in the selector.
Runs in: trainer, under the engine's lock; where starting takes long, also in a thread for each start.
"""

from __future__ import annotations

import itertools
import selectors
import threading
from collections.abc import Callable

from penstock.arena.segment import Segment
from penstock.loader.engine.dispatcher import Dispatcher
from penstock.loader.engine.seat import Seat
from penstock.workers import stack_dump as trace
from penstock.workers.protocol import Resume
from penstock.workers.worker import Worker, WorkerStarter, stop_deadline_s


class Crew:
    def __init__(
        self,
        pool: WorkerStarter,
        selector: selectors.BaseSelector,
        *,
        lock: threading.Lock,
        woken: Callable[[], None],
    ) -> None:
        """``lock`` guards the dispatcher; ``woken`` is called, without it, when a worker has arrived."""
        self._pool = pool
        self._selector = selector
        self._lock = lock
        self._woken = woken
        self._departing: list[Seat] = []
        """Workers that were told to go; buried when they have gone by themselves, or with the others."""
        self._starters: list[threading.Thread] = []
        """Threads that are starting a worker each."""

    # -- coming -----------------------------------------------------------------------------

    def start_first(self, dispatcher: Dispatcher, worker_id: int, resume: Resume | None) -> None:
        """Start a worker here and now: what is wrong with it is raised."""
        self._sit_down(
            dispatcher, self._pool.start(worker_id, dispatcher.roster.workers, resume), resume, exhausted=False
        )

    def start_more(self, dispatcher: Dispatcher, count: int) -> None:
        """Start workers while others work."""
        for worker_id in list(itertools.islice(dispatcher.roster.free_ids(), count)):
            self._start(dispatcher, worker_id, None, exhausted=False)

    def replace(self, dispatcher: Dispatcher, dead: Seat) -> None:
        """Start another worker where one died."""
        resume = dead.resume if dispatcher.order.bound else None
        self._start(dispatcher, dead.handle.worker_id, resume, exhausted=dead.exhausted)

    def _start(self, dispatcher: Dispatcher, worker_id: int, resume: Resume | None, *, exhausted: bool) -> None:
        dispatcher.roster.arriving.add(worker_id)
        if self._pool.starts_at_once:
            try:
                handle = self._pool.start(worker_id, dispatcher.roster.workers, resume)
            except OSError as problem:
                dispatcher.could_not_start(worker_id, problem)
            else:
                self._sit_down(dispatcher, handle, resume, exhausted)
            return
        # A spawned worker takes its dataset out of a pipe only once it has imported the user's modules.
        starter = threading.Thread(
            target=self._start_aside,
            args=(dispatcher, worker_id, resume, exhausted),
            name="penstock-start",
            daemon=True,
        )
        self._starters = [*(thread for thread in self._starters if thread.is_alive()), starter]
        starter.start()

    def _start_aside(self, dispatcher: Dispatcher, worker_id: int, resume: Resume | None, exhausted: bool) -> None:
        try:
            handle = self._pool.start(worker_id, dispatcher.roster.workers, resume)
        except Exception as problem:
            with self._lock:
                dispatcher.could_not_start(worker_id, problem)
        else:
            with self._lock:
                self._sit_down(dispatcher, handle, resume, exhausted)
        self._woken()

    def _sit_down(self, dispatcher: Dispatcher, handle: Worker, resume: Resume | None, exhausted: bool) -> None:
        seat = Seat(handle, exhausted=exhausted, resume=resume or Resume(0, None))
        dispatcher.roster.welcome(seat)
        self._selector.register(handle, selectors.EVENT_READ, seat)

    # -- being there ------------------------------------------------------------------------

    def flush(self, seats: list[Seat]) -> None:
        """Send what waits for workers; a full line is watched until it takes more."""
        for seat in seats:
            unsent = seat.handle.flush()
            if unsent != seat.has_unsent:
                seat.has_unsent = unsent
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
                self._selector.modify(seat.handle, wanted, seat)

    def in_hand(self, seat: Seat) -> tuple[int, int]:
        """Number of the task a worker is or was at, and the row of it; negative: none."""
        if self._pool.board is None:
            return next(iter(seat.tasks), -1), -1
        return self._pool.board.in_hand(seat.handle.worker_id)

    def stack_of(self, seat: Seat) -> str | None:
        """Where a worker's code is now, if it can be had."""
        return trace.stack_of(seat.handle.pid, seat.handle.trace_fd)

    # -- going ------------------------------------------------------------------------------

    def lose(self, seat: Seat) -> None:
        """Its worker hung up: nothing more is to be heard."""
        self._selector.unregister(seat.handle)

    def dismiss(self, seat: Seat) -> None:
        """Tell a worker to go; it is buried when it has gone."""
        self._selector.unregister(seat.handle)
        seat.handle.stop()
        self._departing.append(seat)

    def bury_departed(self) -> None:
        """Reap those that have left, without waiting for the others."""
        gone = [seat for seat in self._departing if seat.handle.is_gone]
        self._departing = [seat for seat in self._departing if seat not in gone]
        for seat in gone:
            seat.handle.reap(0.0)

    @property
    def has_departing(self) -> bool:
        return bool(self._departing)

    def await_starters(self) -> None:
        """Wait, without the lock, until nobody is being started any more."""
        for starter in self._starters:
            starter.join()

    def close(self, seats: list[Seat]) -> None:
        """Send everybody away and see them off."""
        for seat in seats:
            self.dismiss(seat)
        deadline_s = stop_deadline_s()
        for seat in self._departing:
            seat.handle.reap(deadline_s)
        self._departing.clear()
        self._pool.close()


def forget_segment(seats: list[Seat], segment: Segment) -> None:
    """Have workers unmap a segment that is closed."""
    for seat in seats:
        seat.handle.detach(segment.number)
