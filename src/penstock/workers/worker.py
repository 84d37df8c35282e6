"""What the engine needs of workers, whether they are processes or threads.

In:  nothing.
Out: the protocols ``Worker`` and ``WorkerStarter``; how long a worker may take to stop.
Runs in: trainer.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from penstock.arena.segment import Segment
from penstock.arena.template import Template
from penstock.workers.board import Board
from penstock.workers.protocol import Resume

_STOP_S = 5.0
"""How long a worker may take to stop before it is killed; torch waits as long."""


class Worker(Protocol):
    """One worker, running or ended."""

    worker_id: int
    started: bool
    """Whether it has reported ``Started``."""
    private_bytes: int
    trace_fd: int
    template: Template | None
    """The template last sent to this worker."""

    @property
    def pid(self) -> int | None: ...
    def fileno(self) -> int: ...
    def post(self, message: object) -> None: ...
    def flush(self) -> bool:
        """Send queued messages; True if some remain queued."""
        ...

    def read_available(self) -> list[Any]:
        """Messages that have arrived. Raises ChannelClosed when the worker has ended."""
        ...

    def attach(self, segment: Segment) -> None: ...
    def detach(self, number: int) -> None: ...
    def has_attached(self, number: int) -> bool: ...
    def stop(self) -> None:
        """Ask it to stop, without waiting; it is not heard any more."""
        ...

    @property
    def is_gone(self) -> bool: ...

    def reap(self, deadline_s: float) -> int | None:
        """Wait until it has ended, kill it at the deadline (monotonic clock), and return its exit code."""
        ...


class WorkerStarter(Protocol):
    """Starts workers of one kind."""

    @property
    def board(self) -> Board | None: ...

    @property
    def starts_at_once(self) -> bool:
        """Whether starting a worker takes milliseconds, not seconds."""
        ...

    def start(self, worker_id: int, num_workers: int, resume: Resume | None = None) -> Worker: ...
    def close(self) -> None: ...


def stop_deadline_s() -> float:
    """When a worker that is asked to stop now is killed, on the monotonic clock."""
    return time.monotonic() + _STOP_S
