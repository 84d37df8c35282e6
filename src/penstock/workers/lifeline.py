"""The start of a worker process: it is tied to its trainer before it imports anything large.

In:  the trainer's ``Lifeline``; what ``child.main`` needs.
Out: a worker that the kernel kills when the trainer has ended, whatever the worker is doing then.
Runs in: both: the trainer holds the line, workers are tied to it.

The line is a pipe that no process writes to. It reaches its end when the trainer, the only process that could write to
it, has ended. The kernel then sends every worker SIGKILL, even one that is stopped, or one whose sample never lets
another thread run. PR_SET_PDEATHSIG, in contrast, follows the thread or helper process that started the worker.

Linux before 5.6 sends that signal to all workers as soon as one of them ends, so there a worker watches its socket
instead.
"""

from __future__ import annotations

import os
import platform
import re
import select
import signal
import sys
from multiprocessing import reduction
from typing import Any

from penstock.workers.fork_hygiene import keep_from_children

_FIRST_LINUX = (5, 6)


class Lifeline:
    """The trainer's side, one for all its workers."""

    def __init__(self) -> None:
        read_fd, write_fd = os.pipe()
        self._read = os.fdopen(read_fd, "rb", buffering=0)
        self._write = os.fdopen(write_fd, "wb", buffering=0)
        keep_from_children(self._write)

    def tie(self) -> Tie:
        """A tie for one worker, to pass to its process."""
        return Tie(self._read.fileno())

    def close(self) -> None:
        self._write.close()
        self._read.close()


class Tie:
    """A worker's side. A process that unpickles it is tied from then on."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> Any:
        return _tied, (reduction.DupFd(self._fd),)

    def hold(self, release: str = platform.release()) -> bool:
        """Have the kernel, which is of this ``release``, kill this process when the trainer has ended; False if it
        cannot do that."""
        if sys.platform != "linux" or _version(release) < _FIRST_LINUX:
            return False
        import fcntl

        try:
            # Forked siblings share one open file and so one receiver of signals: this process needs its own.
            own = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_NONBLOCK)
            fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
        except OSError:
            return False
        poller = select.poll()
        poller.register(own, 0)
        if poller.poll(0):
            os._exit(1)  # the trainer had ended before: no signal will come
        return True


def _version(release: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", release)
    return _FIRST_LINUX if found is None else (int(found[1]), int(found[2]))


def _tied(sent: Any) -> Tie:
    tie = Tie(sent.detach())
    tie.hold()
    return tie


def begin(tie: Tie, sock: Any, setup: Any, start: Any) -> None:
    """Entry point of a worker process."""
    tied = tie.hold()
    from penstock.workers.child.main import main

    main(sock, setup, start, watch=not tied)
