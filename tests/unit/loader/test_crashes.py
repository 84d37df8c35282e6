"""When crashes of workers become an error, and what it says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.loader.engine.crashes import CrashCounter
from penstock.loader.engine.worker_set import WorkerEntry


def starting_worker(worker_id: int) -> WorkerEntry:
    peer = SimpleNamespace(worker_id=worker_id, pid=1000 + worker_id, started=False)
    return WorkerEntry(cast(Any, peer), ending=f"(pid {1000 + worker_id}) exited with status 1")


def test_the_second_worker_in_a_row_whose_main_script_cannot_be_imported_is_an_error_that_names_the_guard() -> None:
    crashes = CrashCounter(diagnosis=lambda: None)
    assert crashes.count_failed_import(starting_worker(0)) is None
    error = crashes.count_failed_import(starting_worker(1))
    assert error is not None
    for part in ("worker 1 (pid 1001) exited with status 1", '`if __name__ == "__main__":`', "tracebacks are above"):
        assert part in str(error)


def test_a_worker_that_starts_between_two_failed_imports_makes_the_second_one_the_first() -> None:
    crashes = CrashCounter(diagnosis=lambda: None)
    assert crashes.count_failed_import(starting_worker(0)) is None
    crashes.note_start()
    assert crashes.count_failed_import(starting_worker(0)) is None


@pytest.mark.parametrize("is_started", [False, True])
def test_crashes_without_a_task_become_an_error_after_four_for_each_worker(is_started: bool) -> None:
    crashes = CrashCounter(diagnosis=lambda: "the machine is out of memory")
    worker = starting_worker(0)
    worker.peer.started = is_started
    worker.tasks = {} if not is_started else cast(Any, {5: None})
    counted = [crashes.count(worker, (-1, -1), "was killed", workers=2) for _ in range(8)]
    assert counted[:7] == [None] * 7
    assert "8 workers in a row crashed" in str(counted[7]) and "out of memory" in str(counted[7])
