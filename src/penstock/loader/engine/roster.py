"""Who works for one pipeline: how many there are to be, who is here, coming, going or dead.

In:  workers that arrive, die, or are wanted no more.
Out: seats to hand work to; what they take of the budget.
Runs in: trainer, under the engine's lock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from penstock.loader.engine.seat import Seat


class Roster:
    def __init__(self, workers: int) -> None:
        self.workers = workers
        """Workers there are to be; some may still be starting, and others leaving."""
        self.seats: list[Seat] = []
        self.arriving: set[int] = set()
        """Workers that are being started and have no seat yet."""
        self.has_changed = True
        """Whether workers may take more or less memory than when that was last looked at."""
        self._dead: list[Seat] = []
        """Seats whose worker died and that are to be filled again."""

    # -- coming and going -------------------------------------------------------------------

    def free_ids(self) -> Iterator[int]:
        """Numbers for new workers: the lowest nobody has."""
        taken = {seat.handle.worker_id for seat in self.seats} | self.arriving
        return (number for number in itertools.count() if number not in taken)

    def welcome(self, seat: Seat) -> None:
        """A worker was started, and takes its seat; it may have become one too many meanwhile."""
        self.arriving.discard(seat.handle.worker_id)
        seat.leaving = sum(1 for other in self.seats if not other.leaving) >= self.workers
        self.seats.append(seat)

    def resize(self, workers: int) -> int:
        """Change how many workers there are to be. Gives how many are to be started; the rest is seen to here."""
        self.workers = workers
        staying = sorted((s for s in self.seats if not s.leaving), key=lambda s: s.handle.worker_id)
        for seat in staying[workers:]:
            seat.leaving = True
        return max(0, workers - len(staying) - len(self.arriving) - len(self._dead))

    def remove(self, seat: Seat, *, replace: bool) -> None:
        """A worker is dead; another is to take its place if ``replace``."""
        self.has_changed = True
        self.seats.remove(seat)
        if replace:
            self._dead.append(seat)

    def take_leavers(self) -> list[Seat]:
        """Workers that were told to go and have nothing left to do."""
        gone = [seat for seat in self.seats if seat.leaving and not seat.tasks]
        if gone:
            self.seats = [seat for seat in self.seats if seat not in gone]
            self.has_changed = True
        return gone

    def take_dead(self) -> list[Seat]:
        """Seats whose worker died, for another to take."""
        dead, self._dead = self._dead, []
        return dead

    @property
    def all_exhausted(self) -> bool:
        """Whether everybody who is to be here is, and has nothing more to give this epoch."""
        return len(self.seats) == self.workers and all(seat.exhausted for seat in self.seats)

    # -- work -------------------------------------------------------------------------------

    def idle(self, most_in_hand: int) -> list[Seat]:
        """Workers that can take another task."""
        return [s for s in self.seats if len(s.tasks) < most_in_hand and s.handle.started and not s.leaving]

    def idlest(self, most_in_hand: int) -> Seat | None:
        """The worker with the least in hand that can take another task."""
        idlest, fewest = None, most_in_hand
        for seat in self.seats:
            if len(seat.tasks) < fewest and seat.handle.started and not seat.leaving:
                idlest, fewest = seat, len(seat.tasks)
        return idlest

    # -- memory -----------------------------------------------------------------------------

    def taken_bytes(self, fetch_bytes: int) -> int | None:
        """Private memory of all who are up, each of whom holds ``fetch_bytes`` while fetching; None: nobody is up."""
        up = [seat for seat in self.seats if seat.handle.started]
        return sum(seat.will_take(fetch_bytes) for seat in up) if up else None

    @property
    def private_bytes(self) -> int:
        return sum(seat.handle.private_bytes for seat in self.seats)


def most_more(seats: Iterable[Seat], private_bytes: int, fetch_bytes: int) -> int:
    """The most any of ``seats`` would grow over a task that takes ``private_bytes``."""
    return max((max(0, s.base_bytes + private_bytes - s.will_take(fetch_bytes)) for s in seats), default=0)
