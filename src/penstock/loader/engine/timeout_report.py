"""Which workers keep a batch waiting.

In:  the workers and the batch that is due.
Out: a line per worker that has a task of it: which samples, for how long, and where its code is.
Runs in: trainer, under the engine's lock.
"""

from __future__ import annotations

import time

from penstock.loader.engine.batch import Batch
from penstock.loader.engine.worker_set import WorkerSet


def timeout_report(workers: WorkerSet, due: Batch | None) -> str:
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
