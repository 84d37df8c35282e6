"""Workers that died: over which sample, how often in a row, and when that is the sample's fault.

In:  deaths, with what the worker had in hand; tasks that were done after all.
Out: the batch's error, or the epoch's, once the same has happened too often.
Runs in: trainer, under the engine's lock.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from penstock.errors import WorkerError
from penstock.loader.engine.seat import Seat, Task

_IN_A_ROW = 4


class DeathToll:
    def __init__(self, *, in_hand: Callable[[Seat], tuple[int, int]], diagnosis: Callable[[], str | None]) -> None:
        """``in_hand`` gives the number of the task a worker was at (none of its own: it was at none) and the row of it
        (negative: none yet); ``diagnosis`` says what the machine knows about why."""
        self._in_hand = in_hand
        self._diagnosis = diagnosis
        self._deaths: dict[tuple[int, int], int] = {}
        """(batch, row) -> workers that died in a row with it in hand."""
        self._idle_deaths = {True: 0, False: 0}
        """Workers that died with nothing in hand since a task was last done, once they were up; and before that, since
        one came up."""

    def note_start(self) -> None:
        """A worker came up."""
        self._idle_deaths[False] = 0

    def note_done(self, task: Task) -> None:
        """Whatever was held against the task, it was done after all."""
        self._idle_deaths = {True: 0, False: 0}
        if self._deaths:
            rows = range(task.batch.rows) if task.rows is None else task.rows
            for place in [p for p in self._deaths if p[0] == task.batch.number and (p[1] < 0 or p[1] in rows)]:
                del self._deaths[place]

    def count(self, seat: Seat, how: str, *, workers: int) -> WorkerError | None:
        """One of ``workers`` died. A sample that was in hand at four deaths in a row gets an error; gives one for the
        epoch if all have died as often without getting to a sample."""
        number, row = self._in_hand(seat)
        task = seat.tasks.get(number)
        if task is not None:
            self._hold_against(task, row, how)
            return None
        if seat.handle.started and not seat.tasks:
            return None
        was_up = seat.handle.started
        self._idle_deaths[was_up] += 1
        deaths = self._idle_deaths[was_up]
        if deaths < _IN_A_ROW * max(1, workers):
            return None
        self._idle_deaths[was_up] = 0
        when = "before they began anything" if was_up else "while starting"
        return WorkerError(f"{deaths} workers in a row died {when}; the last one {how}{self._why()}")

    def _hold_against(self, task: Task, row: int, how: str) -> None:
        batch = task.batch
        batch.careful = True
        place = batch.number, row
        deaths = self._deaths[place] = self._deaths.get(place, 0) + 1
        if deaths < _IN_A_ROW:
            return
        del self._deaths[place]
        known = row >= 0 and isinstance(batch.indices, list)
        what = f"index {batch.indices[row]}" if known else f"indices {task.indices}"
        # The batch's own error, raised in its turn: the others can still be had.
        batch.note_error(
            max(0, row),
            Fatality(
                f"{deaths} workers in a row died while fetching {what} (batch {batch.number}); the last one {how}"
                + self._why()
            ),
        )

    def _why(self) -> str:
        why = self._diagnosis()
        return f"; {why}" if why else ""


class Fatality:
    """An error of a batch that no worker was left to report."""

    def __init__(self, message: str) -> None:
        self._message = message

    def reraise(self) -> None:
        raise WorkerError(self._message)


def how_it_died(pid: int | None, exit_code: int | None) -> str:
    if exit_code is None or pid is None:
        return "could not be asked why"
    if exit_code >= 0:
        return f"(pid {pid}) exited with status {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = str(-exit_code)
    return f"(pid {pid}) was killed by signal {name}"
