"""Who keeps a batch waiting.

In:  the due batch's tasks.
Out: a sentence for each worker that has one: which samples, for how long, and where its code is.
Runs in: trainer, under the engine's lock.
"""

from __future__ import annotations

import time

from penstock.loader.engine.crew import Crew
from penstock.loader.engine.dispatcher import Dispatcher


def who_is_late(dispatcher: Dispatcher, crew: Crew) -> str:
    seats, due = dispatcher.roster.seats, dispatcher.admission.due
    starting = [seat.handle.worker_id for seat in seats if not seat.handle.started]
    lines = [f"workers {starting} have not started yet"] if starting else []
    for seat, task in ((s, t) for s in seats for t in s.tasks.values() if t.batch is due):
        number, row = crew.in_hand(seat)
        row = row if number == task.number else -1
        known = row >= 0 and isinstance(task.batch.indices, list)
        what = f"index {task.batch.indices[row]}" if known else f"indices {task.indices}"
        lines.append(
            f"worker {seat.handle.worker_id} (pid {seat.handle.pid}) has had {what} of batch {task.batch.number} "
            f"in hand for {time.monotonic() - task.handed_s:.1f} s"
        )
        stack = crew.stack_of(seat)
        lines += [] if stack is None else ["  " + line for line in stack.splitlines()]
    return "\n".join(lines)
