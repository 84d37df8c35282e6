"""Ties a worker process to its trainer before the process imports anything large.

In:  the trainer's ``Lifeline``; what ``child.main`` needs.
Out: a worker that the kernel kills when the trainer has ended, whatever the worker is doing then.
Runs in: both; the trainer holds the lifeline, and workers are tied to it.

The lifeline is a pipe that no process writes to. The pipe reaches its end when the trainer, the only process that could
write to it, has ended. The kernel then sends every worker SIGKILL, even a worker that is stopped, or a worker whose
sample never lets another thread run. PR_SET_PDEATHSIG, in contrast, follows the thread or helper process that started
the worker.

Linux before 5.6 sends this SIGKILL to all workers as soon as one worker ends, so on such a kernel a worker watches its
socket instead.
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
    """The trainer's side of the lifeline; all its workers share it."""

    def __init__(self) -> None:
        read_fd, write_fd = os.pipe()
        self._read = os.fdopen(read_fd, "rb", buffering=0)
        self._write = os.fdopen(write_fd, "wb", buffering=0)
        keep_from_children(self._write)

    def tie(self) -> Tie:
        """A tie for one worker; it is passed to the worker's process."""
        return Tie(self._read.fileno())

    def close(self) -> None:
        self._write.close()
        self._read.close()


class Tie:
    """A worker's side of the lifeline. A process that unpickles it is tied from then on."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> Any:
        return _tied, (reduction.DupFd(self._fd),)

    def hold(self, release: str = platform.release()) -> bool:
        """Make the kernel kill this process when the trainer has ended; returns False if the kernel cannot do that.
        ``release`` is the kernel's version."""
        if sys.platform != "linux" or _version(release) < _FIRST_LINUX:
            return False
        import fcntl

        try:
            # Forked siblings share one open file, which has one receiver of signals, so this process needs an open file
            # of its own.
            own = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_NONBLOCK)
            fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
        except OSError:
            return False
        poller = select.poll()
        poller.register(own, 0)
        if poller.poll(0):
            os._exit(1)  # the trainer ended before this call, so no signal will come
        return True


def _version(release: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", release)
    return _FIRST_LINUX if found is None else (int(found[1]), int(found[2]))


def _tied(sent: Any) -> Tie:
    tie = Tie(sent.detach())
    tie.hold()
    return tie


def begin(tie: Tie, sock: Any, setup: Any, start: Any) -> None:
    """The entry point of a worker process."""
    tied = tie.hold()
    from penstock.workers.child.main import main

    main(sock, setup, start, watch=not tied)
