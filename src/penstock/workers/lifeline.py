"""Where a worker process begins: tied to its trainer before anything heavy is imported.

In:  the trainer's ``Lifeline``; what ``child.main`` needs.
Out: a worker the kernel kills when the trainer is gone, whatever it is doing by then.
Runs in: both: the trainer holds the line, workers are tied to it.

The line is a pipe nobody writes to. Its end comes when the last process that can write to it, the trainer, is no
more, and the kernel then sends the signal that was asked for: to a worker that is stopped, or deep in a sample that
never lets another thread run, as well as to any other. Unlike PR_SET_PDEATHSIG it does not mind which thread or
which helper process a worker was started by.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from multiprocessing import reduction
from typing import Any

from penstock.workers.fork_hygiene import keep_from_children


class Lifeline:
    """The trainer's side, one for all its workers."""

    def __init__(self) -> None:
        read_fd, write_fd = os.pipe()
        self._read = os.fdopen(read_fd, "rb", buffering=0)
        self._write = os.fdopen(write_fd, "wb", buffering=0)
        keep_from_children(self._write)

    def tie(self) -> Tie:
        """What to start a worker with."""
        return Tie(self._read.fileno())

    def close(self) -> None:
        self._write.close()
        self._read.close()


class Tie:
    """A worker's side. Travelling to another process ties that process, as soon as it is unpacked there."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> Any:
        return _tied, (reduction.DupFd(self._fd),)

    def hold(self) -> bool:
        """Have this process killed when the trainer is gone; False where the kernel cannot do that."""
        if sys.platform != "linux":
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
            os._exit(1)  # the trainer was gone already: no signal will come
        return True


def _tied(sent: Any) -> Tie:
    tie = Tie(sent.detach())
    tie.hold()
    return tie


def begin(tie: Tie, sock: Any, setup: Any, start: Any) -> None:
    """Entry point of a worker process."""
    tied = tie.hold()
    from penstock.workers.child.main import main

    main(sock, setup, start, watch=not tied)
