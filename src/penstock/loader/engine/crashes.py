"""Crashes of workers: how a worker ended, how often the same sample was involved, and when crashes become an error.

In:  crashes, each with its task and row; finished tasks; the kernel's out-of-memory counter.
Out: the error of the batch or of the epoch, after too many crashes in a row.
Runs in: trainer, under the engine's lock.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from penstock.errors import WorkerError
from penstock.loader.engine.batch import Task
from penstock.loader.engine.worker_set import WorkerEntry
from penstock.meter import limits, pressure
from penstock.units import format_bytes

_IN_A_ROW = 4
_IMPORTS_IN_A_ROW = 2
"""The number of failed imports in a row after which another import would fail too."""


class CrashCounter:
    def __init__(self, *, diagnosis: Callable[[], str | None]) -> None:
        """``diagnosis`` returns the machine's explanation of a crash, or None."""
        self._diagnosis = diagnosis
        self._crashes: dict[tuple[int, int], int] = {}
        """The number of workers in a row that crashed at a (batch, row)."""
        self._idle_crashes = {True: 0, False: 0}
        """The number of crashes without a task. True: crashes of started workers since a task was last done. False:
        crashes of starting workers since a worker last started."""
        self._failed_imports = 0
        """The number of workers in a row that ended with a traceback before they started."""

    def note_start(self) -> None:
        self._idle_crashes[False] = self._failed_imports = 0

    def note_done(self, task: Task) -> None:
        """Note that the task was done: earlier crashes at its rows no longer count."""
        self._idle_crashes = {True: 0, False: 0}
        if self._crashes:
            rows = range(task.batch.rows) if task.rows is None else task.rows
            for key in [k for k in self._crashes if k[0] == task.batch.number and (k[1] < 0 or k[1] in rows)]:
                del self._crashes[key]

    def count(self, worker: WorkerEntry, in_hand: tuple[int, int], how: str, *, workers: int) -> WorkerError | None:
        """Count the crash of a worker that had the task and row ``in_hand``; there are ``workers`` workers.

        A sample at which four workers in a row crashed gets an error. Returns an error for the epoch if every worker
        crashed four times in a row without reaching a sample.
        """
        number, row = in_hand
        task = worker.tasks.get(number)
        if task is not None:
            self._count_against(task, row, how)
            return None
        was_started = worker.peer.started
        if was_started and not worker.tasks:
            return None
        self._idle_crashes[was_started] += 1
        crashes = self._idle_crashes[was_started]
        if crashes < _IN_A_ROW * max(1, workers):
            return None
        self._idle_crashes[was_started] = 0
        when = "before they fetched a sample" if was_started else "while starting"
        return WorkerError(f"{crashes} workers in a row crashed {when}; the last one {how}{self._why()}")

    def count_failed_import(self, worker: WorkerEntry) -> WorkerError | None:
        """Count a spawned worker that ended with a traceback while it started. Returns an error for the epoch if the
        worker before it ended in this way too."""
        self._failed_imports += 1
        if self._failed_imports < _IMPORTS_IN_A_ROW:
            return None
        self._failed_imports = 0
        return WorkerError(
            f"worker {worker.worker_id} {worker.ending} before it started, like the worker before it; their tracebacks "
            "are above. A worker of this start method imports the main script, so code in the main script that "
            'iterates a loader must stand under `if __name__ == "__main__":`, and everything that the dataset needs '
            'must be importable. Or pass multiprocessing_context="fork"'
        )

    def _count_against(self, task: Task, row: int, how: str) -> None:
        batch = task.batch
        batch.careful = True
        key = batch.number, row
        crashes = self._crashes[key] = self._crashes.get(key, 0) + 1
        if crashes < _IN_A_ROW:
            return
        del self._crashes[key]
        # This is the batch's own error, raised in the batch's turn: the other batches are still delivered.
        batch.note_error(
            max(0, row),
            CrashedSample(
                f"{crashes} workers in a row crashed while fetching {task.describe(row)} (batch {batch.number}); the "
                f"last one {how}{self._why()}"
            ),
        )

    def _why(self) -> str:
        why = self._diagnosis()
        return f"; {why}" if why else ""


class CrashedSample:
    """The error of a batch whose workers crashed and could not report an error."""

    def __init__(self, message: str) -> None:
        self._message = message

    def reraise(self) -> None:
        raise WorkerError(self._message)


class OomWatch:
    """Remembers the value that the kernel's out-of-memory counter had when this object was created."""

    def __init__(self) -> None:
        self._before = pressure().oom_kills

    def sentence(self) -> str | None:
        """The explanation if the kernel has killed a process for memory since then; None if it has not, or if the
        counter cannot be read."""
        now = pressure().oom_kills
        if now is None or self._before is None or now <= self._before:
            return None
        found = limits()
        return (
            f"the kernel's out-of-memory counter rose by {now - self._before} since the iteration began. The memory "
            f"limit here is {format_bytes(found.memory_limit_bytes)} ({found.memory_limit_source}), and "
            f"{format_bytes(found.memory_available_bytes)} of it is left; lower num_workers, batch_size or memory=, "
            "load less data per sample, or raise the limit"
        )


def how_it_ended(pid: int | None, exit_code: int | None) -> str:
    if exit_code is None or pid is None:
        return "left no exit status"
    if exit_code >= 0:
        return f"(pid {pid}) exited with status {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = str(-exit_code)
    return f"(pid {pid}) was killed by signal {name}"
