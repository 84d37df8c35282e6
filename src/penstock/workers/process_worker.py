"""Worker processes, started by any of multiprocessing's start methods.

In:  ``Setup`` and the start method.
Out: ``ProcessStarter``, which starts workers; ``ProcessWorker``, the trainer's side of one worker.
Runs in: trainer.
"""

from __future__ import annotations

import contextlib
import pickle
import time
import warnings
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext
from typing import Any

from penstock.arena.forks import forking_worker
from penstock.arena.segment import Segment
from penstock.arena.template import Template
from penstock.workers.board import Board
from penstock.workers.channel import Channel, channel_pair
from penstock.workers.child.main import WorkerStart
from penstock.workers.fork_hygiene import ctrl_c_blocked
from penstock.workers.lifeline import Lifeline, begin
from penstock.workers.protocol import Attach, Detach, Resume, Stop
from penstock.workers.setup import Setup, SharedPickle


class ProcessWorker:
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

    def has_attached(self, number: int) -> bool:
        return number in self._attached

    def stop(self) -> None:
        self._channel.post(Stop())
        self._channel.end_reading()

    @property
    def is_gone(self) -> bool:
        return not self._process.is_alive()

    def reap(self, deadline_s: float) -> int | None:
        self._process.join(max(0.0, deadline_s - time.monotonic()))
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._channel.close()
        return self._process.exitcode


class ProcessStarter:
    """Starts worker processes by any of multiprocessing's methods."""

    def __init__(
        self,
        setup: Setup,
        *,
        context: BaseContext,
        base_seed: int,
        shared_seed: int | None,
    ) -> None:
        self._setup = setup
        self._context = context
        self._base_seed = base_seed
        self._shared_seed = shared_seed
        self.board = Board()
        self._lifeline = Lifeline()

    @property
    def starts_at_once(self) -> bool:
        """Whether starting a worker takes milliseconds, not seconds."""
        return self._context.get_start_method() == "fork"

    @contextlib.contextmanager
    def sharing_setup(self, workers: int) -> Iterator[SharedPickle | None]:
        shared = None
        try:
            if workers > 1 and not self.starts_at_once:
                shared = SharedPickle.of(self._setup)
            yield shared
        finally:
            if shared is not None:
                shared.close()

    def start(
        self, worker_id: int, num_workers: int, resume: Resume | None = None, setup: SharedPickle | None = None
    ) -> ProcessWorker:
        channel, theirs = channel_pair()
        start = WorkerStart(
            worker_id=worker_id,
            num_workers=num_workers,
            base_seed=self._base_seed,
            shared_seed=self._shared_seed,
            resume=resume,
        )
        process = self._context.Process(  # type: ignore[attr-defined]
            target=begin,
            # The tie comes first, so that it is unpickled and takes effect before the dataset's imports begin.
            args=(self._lifeline.tie(), theirs, setup or self._setup, start),
            name=f"penstock-worker-{worker_id}",
            daemon=True,
        )
        try:
            if not self.starts_at_once:
                # The resource tracker is started before signals are blocked: its start would unblock them.
                resource_tracker.ensure_running()
            with ctrl_c_blocked(), forking_worker(self):
                process.start()
        except (TypeError, AttributeError, pickle.PicklingError):
            channel.close()
            warnings.warn(
                "Got pickle error when attempting to start a worker Process. The dataset, collate_fn or worker_init_fn "
                f"cannot be pickled, but the start method {self._context.get_start_method()!r} pickles them; define "
                'them at module level, or pass multiprocessing_context="fork" where the platform has it.',
                stacklevel=2,
            )
            raise
        except BaseException:
            channel.close()
            raise
        finally:
            theirs.close()
        self.board.clear(worker_id)
        worker = ProcessWorker(worker_id, process, channel)
        worker.attach(self.board.segment)
        return worker

    def close(self) -> None:
        self.board.close()
        self._lifeline.close()
