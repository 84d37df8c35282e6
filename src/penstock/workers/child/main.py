"""A worker process from its first instruction to its last.

In:  a socket to the trainer, the user's dataset and functions.
Out: a silent exit: on request, when the trainer has ended, or on Ctrl-C (the trainer itself raises KeyboardInterrupt).
Runs in: worker.
"""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import socket
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data._utils import worker as torch_worker

from penstock.workers import stack_dump as trace
from penstock.workers.channel import Channel, ChannelClosed, close_other_ends
from penstock.workers.child.kept_memory import KeptMemory, glibc_malloc
from penstock.workers.child.private_memory import PrivateMemory
from penstock.workers.child.worker import WorkerLoop
from penstock.workers.protocol import Resume
from penstock.workers.setup import Setup, reseed_pipes


@dataclass(frozen=True, kw_only=True)
class WorkerStart:
    """The arguments with which one worker process is started."""

    worker_id: int
    num_workers: int
    base_seed: int
    shared_seed: int | None
    """torch's seed for data pipes; None for all other datasets."""
    resume: Resume | None
    """Where this worker continues if it replaces a crashed worker; otherwise None."""


def main(sock: socket.socket, setup: Setup, start: WorkerStart, *, watch: bool) -> None:
    """Run a worker from start to end. ``watch``: whether this worker must watch for the trainer's end, because the
    kernel does not kill it then."""
    try:
        # SIGINT was blocked before the process began, so that Ctrl-C during the imports prints nothing.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        # As in torch: a handler that a forked worker inherits, such as one that saves a checkpoint before a cluster
        # ends the job, would run in every worker.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _reduce_footprint()
        _keep_off_shared_memory()
        close_other_ends(sock)
        channel = Channel(sock)
        if watch:
            _exit_with_the_trainer(sock)
        measure, malloc = PrivateMemory(), glibc_malloc()
        loop = WorkerLoop(
            channel,
            setup,
            worker_id=start.worker_id,
            where=f"in DataLoader worker process {start.worker_id}",
            measure=measure,
            # Each thread has a heap of its own, and keeping memory does not help samples that wait.
            kept=None if malloc is None or setup.fetches_in_threads else KeptMemory(malloc, measure.anonymous_bytes),
            trace_fd=trace.prepare(all_threads=setup.fetches_in_threads),
        )
        # Samples fetched beside each other would have to be told apart.
        if not setup.fetches_in_threads:
            loop.loans.install()
        loop.run(lambda: _set_up(setup, start), start.resume)
    except (KeyboardInterrupt, ChannelClosed, BrokenPipeError, ConnectionResetError):
        pass


def _reduce_footprint() -> None:
    """Keep this process small and single-threaded."""
    # Exclude all inherited objects from garbage collection; otherwise its first pass copies every shared page.
    gc.freeze()
    torch.set_num_threads(1)


def _keep_off_shared_memory() -> None:
    """Make torch's collate functions allocate ordinary memory.

    Wherever there is worker info, these functions request shared memory. It may be as small as a container's /dev/shm,
    and the result would be copied from it once more, because batches leave this process through the arena.
    """

    def new_ordinary(cls: type[torch.UntypedStorage], size: int, *, device: Any = "cpu") -> torch.UntypedStorage:
        return cls(size, device=device)

    torch.UntypedStorage._new_shared = classmethod(new_ordinary)  # type: ignore[method-assign, assignment]


def _set_up(setup: Setup, start: WorkerStart) -> None:
    """Set up in torch's order: seeds, worker info, then the user's init function."""
    seed = start.base_seed + start.worker_id
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(torch_worker._generate_state(start.base_seed, start.worker_id))
    if isinstance(setup.dataset, IterDataPipe) and start.shared_seed is not None:
        reseed_pipes(setup.dataset, start.shared_seed)
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=start.worker_id, num_workers=start.num_workers, seed=seed, dataset=setup.dataset
    )
    if setup.init_fn is not None:
        setup.init_fn(start.worker_id)


def _exit_with_the_trainer(sock: socket.socket) -> None:
    """Exit as soon as the trainer's end closes, even from inside a sample that takes an hour."""

    def watch() -> None:
        poller = select.poll()
        poller.register(sock, 0)
        while True:
            for _, event in poller.poll():
                if event & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
                    os._exit(1)

    if hasattr(select, "poll"):
        threading.Thread(target=watch, name="penstock-watch", daemon=True).start()
