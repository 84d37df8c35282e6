"""Worker threads: for datasets that release the GIL, and for platforms where processes start slowly.

In:  ``Setup``.
Out: ``ThreadStarter``, which starts workers; ``ThreadWorker``, the trainer's side of one worker.
Runs in: trainer.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import socket
import threading
import time
from typing import Any

import torch

from penstock.arena.segment import Segment
from penstock.arena.template import Template
from penstock.workers.channel import ChannelClosed
from penstock.workers.child.worker import WorkerLoop
from penstock.workers.protocol import Detach, Resume, Stop
from penstock.workers.setup import Setup


class ThreadWorker:
    """One worker thread."""

    def __init__(self, worker_id: int, setup: Setup, segments: dict[int, Segment], resume: Resume | None) -> None:
        self.worker_id = worker_id
        self.started = False
        self.private_bytes = 0
        self.trace_fd = -1
        self.template: Template | None = None
        self._channel = _ThreadChannel()
        self._has_ended = False
        self._segments = segments
        loop = WorkerLoop(
            self._channel,
            setup,
            worker_id=worker_id,
            where=f"in DataLoader worker thread {worker_id}",
            segments=segments,
            trace_fd=-1,
            measure=None,
            kept=None,
        )
        self._thread = threading.Thread(
            # The generators belong to the whole process, so only the stream of an iterable dataset continues.
            target=self._run,
            args=(loop, resume if setup.is_iterable else None),
            name=f"penstock-worker-{worker_id}",
            daemon=True,
        )
        self._thread.start()

    def _run(self, loop: WorkerLoop, resume: Resume | None) -> None:
        _compute_in_this_thread()
        try:
            loop.run(lambda: None, resume)
        except SystemExit:
            pass  # a dataset that calls sys.exit() ends its worker
        finally:
            self._has_ended = True
            self._channel.send()  # wakes the trainer, which then reads ``_has_ended``

    @property
    def pid(self) -> int | None:
        return None

    def fileno(self) -> int:
        return self._channel.wake_read.fileno()

    def post(self, message: object) -> None:
        self._channel.to_worker.put(message)

    def flush(self) -> bool:
        return False

    def read_available(self) -> list[Any]:
        with contextlib.suppress(OSError):
            self._channel.wake_read.recv(1 << 16)
        messages = _drained(self._channel.to_trainer)
        if not messages and self._has_ended:
            raise ChannelClosed
        return messages

    def attach(self, segment: Segment) -> None:
        self._segments[segment.number] = segment

    def detach(self, number: int) -> None:
        self.post(Detach(number))

    def has_attached(self, number: int) -> bool:
        return number in self._segments

    def stop(self) -> None:
        self._channel.to_worker.put(Stop())

    @property
    def is_gone(self) -> bool:
        return not self._thread.is_alive()

    def reap(self, deadline_s: float) -> int | None:
        # A thread cannot be killed; a daemon thread that is stuck in a sample ends with the process. The garbage
        # collector may run this method in the worker thread, which cannot join itself.
        if self._thread is not threading.current_thread():
            self._thread.join(max(0.0, deadline_s - time.monotonic()))
        self._channel.close()
        return 0


class ThreadStarter:
    """Starts worker threads."""

    starts_at_once = True
    board = None

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._segments: dict[int, Segment] = {}

    def sharing_setup(self, workers: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def start(self, worker_id: int, num_workers: int, resume: Resume | None = None, setup: Any = None) -> ThreadWorker:
        return ThreadWorker(worker_id, self._setup, self._segments, resume)

    def close(self) -> None:
        """There is nothing to release: threads and their channels end with each worker."""


def _compute_in_this_thread() -> None:
    """Make torch run the operations of this thread in this thread alone, as in worker processes. Otherwise the helper
    threads of several workers would compete for cores. ``torch.set_num_threads`` would also slow down the training
    loop."""
    torch.get_num_threads()  # torch sets the number of threads when a thread first needs it
    set_number = getattr(ctypes.CDLL(torch._C.__file__), "omp_set_num_threads", None)
    if set_number is not None:
        set_number(1)


class _ThreadChannel:
    """Both ends of the channel of a worker thread. Objects are passed unpickled; a socket pair wakes the trainer's
    selector."""

    def __init__(self) -> None:
        self.to_worker: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.to_trainer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.wake_read, self._wake_write = socket.socketpair()
        self.wake_read.setblocking(False)
        self._wake_write.setblocking(False)

    def send(self, *messages: object) -> None:
        for message in messages:
            self.to_trainer.put(message)
        with contextlib.suppress(OSError):  # the socket is full of wake-ups, or the trainer has closed it
            self._wake_write.send(b"\0")

    def receive(self, *, wait: bool) -> list[tuple[Any, int | None]]:
        messages = [self.to_worker.get()] if wait else []
        return [(message, None) for message in messages + _drained(self.to_worker)]

    def close(self) -> None:
        self.wake_read.close()
        self._wake_write.close()


def _drained(messages: queue.SimpleQueue[Any]) -> list[Any]:
    drained = []
    with contextlib.suppress(queue.Empty):
        while True:
            drained.append(messages.get_nowait())
    return drained
