"""Whether the process that records a run is alive: such a process holds a file lock, which the kernel releases when the
process ends.

In:  ``<id>.alive`` in the folder of the run's file.
Out: ``WriterLock`` for the writer; ``is_alive`` and ``last_outcome`` for readers.
Runs in: trainer (holds the lock), command line (tests it).

The file is written in full at the start and also has room for the outcome: on a full disk nothing can be added to a
database, but existing bytes can be overwritten.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from penstock.monitor.runs.format import RunOutcome

_ROOM_BYTES = 4096
_LONGEST_WHAT = 500
_FRESH_S = 120.0
"""A run of another machine counts as running if its last write is no older than this."""

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class WriterLock:
    """The writer's side: held until it is released or the process ends."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | _NO_FOLLOW, 0o600)
        try:
            os.write(self._fd, b"\n" * _ROOM_BYTES)
            if fcntl is not None:
                # A lock of lockf would be lost as soon as any code of this process opened and closed this path.
                with contextlib.suppress(OSError):  # some network file systems have no locks: the process id decides
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(self._fd)
            path.unlink(missing_ok=True)
            raise

    def keep_outcome(self, outcome: RunOutcome) -> None:
        """Write the outcome into this file, for when the database cannot be written."""
        kept = asdict(replace(outcome, what=(outcome.what or "")[:_LONGEST_WHAT] or None))
        with contextlib.suppress(OSError):
            room = json.dumps(kept, ensure_ascii=False).encode("utf-8", "replace").ljust(_ROOM_BYTES, b"\n")
            os.pwrite(self._fd, room, 0)

    def release(self) -> None:
        """May be called twice. In a forked child this closes only the child's copy of the file; the lock stays."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


def last_outcome(path: Path) -> RunOutcome | None:
    """The outcome that was kept in this file because the database could not be written."""
    try:
        with path.open("rb") as file:
            return RunOutcome(**json.loads(file.read(_ROOM_BYTES).strip()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def is_alive(path: Path, facts: dict[str, Any], heard_s: float) -> bool:
    """Whether the process that writes a run is alive; ``heard_s`` is the time of its last write."""
    if facts.get("boot_id") != boot_id() and facts.get("host") != socket.gethostname():
        # The run is on another machine, whose locks and process ids are invisible here.
        return time.time() - heard_s < _FRESH_S
    if facts.get("boot_id") != boot_id():
        return False
    if fcntl is not None:
        locked = _is_locked(path)
        if locked is not None:
            return locked
    return _is_process_alive(facts)


def _is_locked(path: Path) -> bool | None:
    """None: unknown, because the file is gone or its file system has no locks."""
    assert fcntl is not None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | _NO_FOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(fd)
    return False


def _is_process_alive(facts: dict[str, Any]) -> bool:
    import psutil

    try:
        began_s = psutil.Process(int(facts["pid"])).create_time()
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False
    return abs(began_s - float(facts.get("process_started_s") or began_s)) < 2.0


def boot_id() -> str:
    """An id that all processes and containers of a machine share until it reboots."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
