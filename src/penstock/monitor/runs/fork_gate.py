"""Keeps forks away from SQLite: a worker must not inherit one of its locks in the hands of a thread it does not have.

In:  every use of SQLite by the monitor's thread; every fork of this process.
Out: forks between uses, never inside one.
Runs in: trainer.

SQLite has locks for the whole process. A worker forked while the monitor's thread holds one would wait for ever as soon
as its dataset uses SQLite itself.
"""

from __future__ import annotations

import os
import threading

GATE = threading.RLock()
"""Held around every use. One that holds it may fork: it is not inside SQLite then."""

_WAITS_S = 2.0
"""A fork waits no longer: a disk that does not answer must not hold up a training."""
_held = threading.local()


def _before_fork() -> None:
    _held.is_held = GATE.acquire(timeout=_WAITS_S)


def _after_in_parent() -> None:
    if _held.is_held:
        GATE.release()


def _after_in_child() -> None:
    GATE._at_fork_reinit()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
