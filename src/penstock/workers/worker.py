"""The interface of workers to the engine, for processes and threads.

In:  nothing.
Out: the protocols ``Worker`` and ``WorkerStarter``; how long a worker may take to stop.
Runs in: trainer.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any, Protocol

from penstock.arena.segment import Segment
from penstock.arena.template import Template
from penstock.workers.board import Board
from penstock.workers.protocol import Resume

_STOP_S = 5.0
"""How long a worker may take to stop before it is killed. torch waits for the same time."""


class Worker(Protocol):
    """One worker, running or ended."""

    worker_id: int
    started: bool
    """Whether the worker has reported ``Started``."""
    private_bytes: int
    trace_fd: int
    template: Template | None
    """The template that was sent last to this worker."""

    @property
    def pid(self) -> int | None: ...
    def fileno(self) -> int: ...
    def post(self, message: object) -> None: ...
    def flush(self) -> bool:
        """Send queued messages; True if some messages remain queued."""
        ...

    def read_available(self) -> list[Any]:
        """Messages that have arrived. Raises ChannelClosed when the worker has ended."""
        ...

    def attach(self, segment: Segment) -> None: ...
    def detach(self, number: int) -> None: ...
    def has_attached(self, number: int) -> bool: ...
    def stop(self) -> None:
        """Ask the worker to stop, without waiting; no message from it is read any more."""
        ...

    @property
    def is_gone(self) -> bool: ...

    def reap(self, deadline_s: float) -> int | None:
        """Wait until the worker has ended, kill it at the deadline (monotonic clock), and return its exit code."""
        ...


class WorkerStarter(Protocol):
    """Starts workers of one kind."""

    @property
    def board(self) -> Board | None: ...

    @property
    def starts_at_once(self) -> bool:
        """Whether starting a worker takes milliseconds, not seconds."""
        ...

    def sharing_setup(self, workers: int) -> AbstractContextManager[Any]:
        """A ``setup`` for ``workers`` workers that are started inside the block, if it is quicker to pass it to all of
        them than to each."""
        ...

    def start(self, worker_id: int, num_workers: int, resume: Resume | None = None, setup: Any = None) -> Worker: ...
    def close(self) -> None: ...


def stop_deadline_s() -> float:
    """The time on the monotonic clock at which a worker that is asked to stop now will be killed."""
    return time.monotonic() + _STOP_S
