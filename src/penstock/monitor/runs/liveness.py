"""Whether the process that records a run still lives, told by a lock that the kernel takes away with it.

In:  ``<id>.alive`` beside the run's file.
Out: ``WriterLock`` for the writer; ``is_alive`` for readers.
Runs in: trainer (holds), command line (asks).

The file also has room for the outcome, written when the run is recorded in advance: on a full disk nothing can be
added to a database, but bytes that exist can be changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

_ROOM_BYTES = 4096
_FRESH_S = 120.0
"""A run on another machine that was heard of this recently is taken to run."""

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class WriterLock:
    """The writer's side: holds the lock until it is released, or its process is gone."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | _NO_FOLLOW, 0o600)
        try:
            os.write(self._fd, b"\n" * _ROOM_BYTES)
            if fcntl is not None:
                # Not lockf: another file of this process that opens and closes this path would take the lock away.
                with contextlib.suppress(OSError):  # some network file systems have no locks: then the id must do
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(self._fd)
            path.unlink(missing_ok=True)
            raise

    def leave_word(self, outcome: dict[str, Any]) -> None:
        """Keep the outcome here, where the database takes it no more."""
        room = json.dumps(outcome)[: _ROOM_BYTES - 1].encode("ascii", "replace").ljust(_ROOM_BYTES, b"\n")
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, room, 0)

    def release(self) -> None:
        """Let go; may be called twice. In a forked child this closes the child's copy, and the lock stays."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


def last_word(path: Path) -> dict[str, Any] | None:
    """The outcome that was left in the file instead of the database."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_ROOM_BYTES).strip() or b"null")
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def is_alive(path: Path, facts: dict[str, Any], heard_s: float) -> bool:
    """Whether the writer of a run lives; ``facts`` as ``record_values`` gives them, ``heard_s`` when it last wrote."""
    if facts.get("boot_id") != boot_id() and facts.get("host") != socket.gethostname():
        # Locks and process ids of another machine cannot be seen from here.
        return time.time() - heard_s < _FRESH_S
    if facts.get("boot_id") != boot_id():
        return False
    if fcntl is not None:
        locked = _is_locked(path)
        if locked is not None:
            return locked
    return _process_lives(facts)


def _is_locked(path: Path) -> bool | None:
    """None: nobody can tell, the file is gone or its file system has no locks."""
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


def _process_lives(facts: dict[str, Any]) -> bool:
    import psutil

    try:
        began_s = psutil.Process(int(facts["pid"])).create_time()
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False
    return abs(began_s - float(facts.get("process_started_s") or began_s)) < 2.0


def boot_id() -> str:
    """The same for every process and container of one machine until it is started again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
