"""The processes that write shards for `penstock pack`.

In:  a ``PackJob``, and numbers of shards.
Out: records of shards, as they are finished; failures, with what the dataset said.
Runs in: command line or trainer (``PackWorkers``), and its children.

A worker writes one shard at a time. Whatever ends the parent ends its workers: they have nothing to wait for then.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from penstock.data.pack.job import PackJob, ProgressReporter
from penstock.data.sample_forms import CannotCarry
from penstock.errors import DataError, PenstockError, WorkerError
from penstock.workers.fork_hygiene import ctrl_c_blocked

_PR_SET_PDEATHSIG = 1
PROBE = -1
"""The task of looking at a few samples."""
_HEARTBEAT_S = 0.1
_PATIENCE_S = 5.0
"""How long a worker that was told to end may take before it is killed."""


class Stretches:
    """Tasks for several workers, each one's neighbours as far as possible: a row group that is cut into many shards is
    decoded by few, and what a dataset read last serves its next sample."""

    def __init__(self, tasks: list[int], workers: list[Any]) -> None:
        cuts = [len(tasks) * number // len(workers) for number in range(len(workers) + 1)]
        self._left = {worker: tasks[cuts[number] : cuts[number + 1]] for number, worker in enumerate(workers)}

    def next_for(self, worker: Any) -> int | None:
        """Its next one. A worker that has none left takes the later half of what another has most of."""
        if not self._left[worker]:
            most = max(self._left, key=lambda other: len(self._left[other]))
            half = len(self._left[most]) // 2
            self._left[most], self._left[worker] = self._left[most][:half], self._left[most][half:]
        return self._left[worker].pop(0) if self._left[worker] else None


class PackWorkers:
    """Worker processes, each with a pipe of its own."""

    def __init__(self, job: PackJob, count: int, lock_fd: int) -> None:
        """``lock_fd``: what tells that this process packs into the folder. Workers that outlive it must not hold it."""
        self._job = job
        self._members: dict[Connection, tuple[Any, int | None]] = {}
        context = _context_for(job)
        for _ in range(count):
            ours, theirs = context.Pipe()
            is_forked = context.get_start_method() == "fork"
            not_theirs = [lock_fd, *(pipe.fileno() for pipe in (*self._members, ours))] if is_forked else []
            process = context.Process(target=_work, args=(job, theirs, not_theirs), daemon=True)
            with ctrl_c_blocked():
                process.start()
            theirs.close()
            self._members[ours] = (process, None)

    def run(self, tasks: list[int]) -> Iterator[tuple[int | None, int, Any]]:
        """(task, samples done in it, its result once it is finished); (None, 0, None) now and then, so that the caller
        can stop. A task is a shard's number, for its record, or PROBE, for a probe."""
        coming = Stretches(tasks, list(self._members))
        for pipe in list(self._members):
            self._give(pipe, coming)
        while any(shard is not None for _, shard in self._members.values()):
            for pipe in wait([pipe for pipe, (_, shard) in self._members.items() if shard is not None], _HEARTBEAT_S):
                assert isinstance(pipe, Connection)
                process, shard = self._members[pipe]
                assert shard is not None
                try:
                    word, told = pipe.recv()
                except (EOFError, OSError):
                    raise self._dead(process, shard) from None
                if word == "failed":
                    raise told
                if word == "at":
                    yield shard, told, None
                else:
                    self._give(pipe, coming)
                    yield shard, 0, told
            for pipe, (process, shard) in self._members.items():
                # A process that the dataset started may hold the pipe of a dead worker open.
                if shard is not None and process.exitcode is not None and not pipe.poll():
                    raise self._dead(process, shard)
            yield None, 0, None

    def _give(self, pipe: Connection, coming: Stretches) -> None:
        process, _ = self._members[pipe]
        shard = coming.next_for(pipe)
        self._members[pipe] = (process, shard)
        if shard is not None:
            try:
                pipe.send(shard)
            except OSError:
                raise self._dead(process, shard) from None

    def _dead(self, process: Any, shard: int) -> WorkerError:
        process.join(_PATIENCE_S)
        code = process.exitcode
        how = f"with status {code}"
        if code is not None and code < 0:
            how = f"by signal {-code} ({signal.strsignal(-code)})"
        what = f"looking at samples of {self._job.source.description}"
        if shard != PROBE:
            places = self._job.range_of(shard)
            what = f"writing {self._job.name(shard)} (samples {places.start} to {places.stop - 1})"
        return WorkerError(
            f"the worker {what} ended {how}; if it was out of memory, use fewer workers. Run this again to go on"
        )

    def close(self) -> None:
        """End all workers, whatever they do."""
        for pipe, (process, _) in self._members.items():
            pipe.close()
            process.terminate()
        for process, _ in self._members.values():
            process.join(_PATIENCE_S)
            if process.exitcode is None:
                process.kill()
                process.join()
            process.close()
        self._members.clear()


def _context_for(job: PackJob) -> Any:
    """How workers start: as Python is set to, but by fork where the dataset cannot be sent."""
    # Asked for its name, Python would settle on its default, and the program could not choose another any more.
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if method != "fork" and "fork" in multiprocessing.get_all_start_methods():
        try:
            ForkingPickler.dumps(job)
        except Exception:
            method = "fork"
    return multiprocessing.get_context(method)


def _work(job: PackJob, pipe: Connection, not_theirs: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    for fd in not_theirs:
        os.close(fd)
    _end_with_parent()
    torch.set_num_threads(1)
    report = ProgressReporter(pipe)
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer: tuple[str, Any] = ("done", job.probe(report) if task == PROBE else job.write(task, report))
        except Exception as problem:
            answer = ("failed", _told(job, report.place, problem))
        try:
            pipe.send(answer)
        except OSError:
            return


def _end_with_parent() -> None:
    """What a worker writes after its parent's death nobody would count."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    if sys.platform == "linux":
        # At once, even while the dataset holds the interpreter.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _told(job: PackJob, place: int | None, problem: Exception) -> PenstockError:
    """A failure as it goes to the parent: always one that can be sent."""
    where = f"sample {place} of {job.source.description}"
    if isinstance(problem, CannotCarry):
        return DataError(f"{where}: {problem}")
    if isinstance(problem, OSError) and not isinstance(problem, PenstockError) and problem.errno is not None:
        return DataError(f"{where} could not be read or written: {problem}")
    if isinstance(problem, PenstockError):
        try:
            pickle.loads(pickle.dumps(problem))
            return problem
        except Exception:
            return DataError(f"{where}: {problem}")
    frames = traceback.extract_tb(problem.__traceback__)
    own = [frame for frame in frames if "penstock/data/" not in frame.filename]
    lines = "".join([*traceback.format_list(own), *traceback.format_exception_only(problem)]).rstrip()
    return DataError(f"{where} failed\n{lines}")
