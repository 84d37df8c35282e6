"""Workers as the trainer sees them: start, talk to, bury. Processes and threads look the same from here.

In:  ``Setup`` and how to start workers.
Out: ``Handle``s with a line to each worker.
Runs in: trainer.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import socket
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext
from typing import Any, Protocol

from penstock.arena.segment import Segment
from penstock.arena.template import Template
from penstock.workers.board import Board
from penstock.workers.channel import Channel, ChannelClosed, channel_pair
from penstock.workers.child.main import Birth
from penstock.workers.child.worker import Worker
from penstock.workers.interrupts import ctrl_c_blocked
from penstock.workers.lifeline import Lifeline, begin
from penstock.workers.protocol import Attach, Detach, Resume, Stop
from penstock.workers.setup import Setup

_LEAVE_S = 5.0
"""How long a worker that was told to stop may take before it is killed: torch's own patience."""


class Handle(Protocol):
    """One worker, alive or dead."""

    worker_id: int
    started: bool
    private_bytes: int
    trace_fd: int
    template: Template | None
    """The template this worker last learnt."""

    @property
    def pid(self) -> int | None: ...
    def fileno(self) -> int: ...
    def post(self, message: object) -> None: ...
    def flush(self) -> bool:
        """Send what waits; True if something still does."""
        ...

    def read_available(self) -> list[Any]:
        """Messages that have arrived; raises ChannelClosed when the worker is gone."""
        ...

    def attach(self, segment: Segment) -> None: ...
    def detach(self, number: int) -> None: ...
    def knows(self, number: int) -> bool: ...
    def stop(self) -> None:
        """Tell it to leave, without waiting."""
        ...

    @property
    def is_gone(self) -> bool: ...

    def bury(self, deadline_s: float) -> int | None:
        """Wait until it is gone, kill it at the deadline (monotonic), and give its exit code."""
        ...


class ProcessHandle:
    """A worker process and the trainer's end of its channel."""

    def __init__(self, worker_id: int, process: Any, channel: Channel) -> None:
        self.worker_id = worker_id
        self.started = False
        self.private_bytes = 0
        self.trace_fd = -1
        self.template: Template | None = None
        self._process = process
        self._channel = channel
        self._attached: set[int] = set()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def process(self) -> Any:
        return self._process

    def fileno(self) -> int:
        return self._channel.fileno()

    def post(self, message: object) -> None:
        self._channel.post(message)

    def flush(self) -> bool:
        if self._channel.has_unsent:
            self._channel.flush()
        return self._channel.has_unsent

    def read_available(self) -> list[Any]:
        return self._channel.read_available()

    def attach(self, segment: Segment) -> None:
        self._attached.add(segment.number)
        self._channel.post(Attach(segment.number, segment.capacity_bytes, segment.name), fd=segment.fd)

    def detach(self, number: int) -> None:
        if number in self._attached:
            self._attached.remove(number)
            self._channel.post(Detach(number))

    def knows(self, number: int) -> bool:
        return number in self._attached

    def stop(self) -> None:
        self._channel.post(Stop())
        self._channel.flush()

    @property
    def is_gone(self) -> bool:
        return not self._process.is_alive()

    def bury(self, deadline_s: float) -> int | None:
        self._process.join(max(0.0, deadline_s - time.monotonic()))
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._channel.close()
        return self._process.exitcode


class ProcessPool:
    """Starts worker processes by any of multiprocessing's methods."""

    def __init__(
        self,
        setup: Setup,
        *,
        context: BaseContext,
        base_seed: int,
        shared_seed: int | None,
        init_fn: Callable[[int], Any] | None,
    ) -> None:
        self._setup = setup
        self._context = context
        self._base_seed = base_seed
        self._shared_seed = shared_seed
        self._init_fn = init_fn
        self.board = Board()
        self._lifeline = Lifeline()

    @property
    def starts_at_once(self) -> bool:
        """Whether starting a worker is a matter of milliseconds."""
        return self._context.get_start_method() == "fork"

    def start(self, worker_id: int, num_workers: int, resume: Resume | None = None) -> ProcessHandle:
        channel, theirs = channel_pair()
        birth = Birth(
            worker_id=worker_id,
            num_workers=num_workers,
            base_seed=self._base_seed,
            shared_seed=self._shared_seed,
            init_fn=self._init_fn,
            resume=resume,
        )
        process = self._context.Process(  # type: ignore[attr-defined]
            target=begin,
            # The tie first: it is unpacked, and holds, before the dataset's imports begin.
            args=(self._lifeline.tie(), theirs, self._setup, birth),
            name=f"penstock-worker-{worker_id}",
            daemon=True,
        )
        try:
            if not self.starts_at_once:
                # Started with the first spawned process, it would unblock what is blocked then.
                resource_tracker.ensure_running()
            with ctrl_c_blocked():
                process.start()
        except (TypeError, AttributeError, pickle.PicklingError):
            channel.close()
            warnings.warn(
                "Got pickle error when attempting to start a worker Process. The dataset, collate_fn or worker_init_fn "
                f"cannot be pickled, which the {self._context.get_start_method()!r} start method needs; define them "
                'at module level, or pass multiprocessing_context="fork" where the platform has it.',
                stacklevel=2,
            )
            raise
        except BaseException:
            channel.close()
            raise
        finally:
            theirs.close()
        self.board.clear(worker_id)
        handle = ProcessHandle(worker_id, process, channel)
        handle.attach(self.board.segment)
        return handle

    def close(self) -> None:
        self.board.close()
        self._lifeline.close()


class _ThreadLine:
    """Both ends of a thread's line: objects pass as they are, a socket pair wakes the trainer."""

    def __init__(self) -> None:
        self.to_worker: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.to_trainer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.wake_read, self._wake_write = socket.socketpair()
        self.wake_read.setblocking(False)
        self._wake_write.setblocking(False)

    def send(self, *messages: object) -> None:
        for message in messages:
            self.to_trainer.put(message)
        try:
            self._wake_write.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # already full of wake-ups, or the trainer has closed the pipeline

    def receive(self, *, wait: bool) -> list[tuple[Any, int | None]]:
        messages = [self.to_worker.get()] if wait else []
        return [(message, None) for message in messages + _drained(self.to_worker)]

    def close(self) -> None:
        self.wake_read.close()
        self._wake_write.close()


class ThreadHandle:
    """A worker thread."""

    def __init__(self, worker_id: int, setup: Setup, segments: dict[int, Segment]) -> None:
        self.worker_id = worker_id
        self.started = False
        self.private_bytes = 0
        self.trace_fd = -1
        self.template: Template | None = None
        self._line = _ThreadLine()
        self._left = False
        self._segments = segments
        worker = Worker(
            self._line,
            setup,
            worker_id=worker_id,
            where=f"in DataLoader worker thread {worker_id}",
            segments=segments,
            trace_fd=-1,
            measure=None,
        )
        self._thread = threading.Thread(
            target=self._live, args=(worker,), name=f"penstock-worker-{worker_id}", daemon=True
        )
        self._thread.start()

    def _live(self, worker: Worker) -> None:
        try:
            worker.run(lambda: None, None)
        except SystemExit:
            pass  # a dataset may end a process, and so ends this worker
        finally:
            self._left = True
            self._line.send()  # wakes the trainer, who finds out

    @property
    def pid(self) -> int | None:
        return None

    def fileno(self) -> int:
        return self._line.wake_read.fileno()

    def post(self, message: object) -> None:
        self._line.to_worker.put(message)

    def flush(self) -> bool:
        return False

    def read_available(self) -> list[Any]:
        try:
            self._line.wake_read.recv(1 << 16)
        except OSError:
            pass
        messages = _drained(self._line.to_trainer)
        if not messages and self._left:
            raise ChannelClosed
        return messages

    def attach(self, segment: Segment) -> None:
        self._segments[segment.number] = segment

    def detach(self, number: int) -> None:
        self.post(Detach(number))

    def knows(self, number: int) -> bool:
        return number in self._segments

    def stop(self) -> None:
        self._line.to_worker.put(Stop())

    @property
    def is_gone(self) -> bool:
        return not self._thread.is_alive()

    def bury(self, deadline_s: float) -> int | None:
        # A thread cannot be killed; a daemon one that is stuck in a sample ends with the process. And it may be this
        # very thread in which the garbage collector found a forgotten iterator: nobody can wait for himself.
        if self._thread is not threading.current_thread():
            self._thread.join(max(0.0, deadline_s - time.monotonic()))
        self._line.close()
        return 0


class ThreadPool:
    """Starts worker threads: for datasets that release the GIL, and for platforms without cheap processes."""

    starts_at_once = True
    board = None

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._segments: dict[int, Segment] = {}

    def start(self, worker_id: int, num_workers: int, resume: Resume | None = None) -> ThreadHandle:
        return ThreadHandle(worker_id, self._setup, self._segments)

    def close(self) -> None:
        """Nothing outlives the threads."""


def leave_deadline_s() -> float:
    return time.monotonic() + _LEAVE_S


def _drained(line: queue.SimpleQueue[Any]) -> list[Any]:
    messages = []
    with contextlib.suppress(queue.Empty):
        while True:
            messages.append(line.get_nowait())
    return messages
