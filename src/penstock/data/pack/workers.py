"""The processes that write shards for `penstock pack`.

In:  a ``PackJob``, and numbers of shards.
Out: records of finished shards; failures, with the error of the dataset.
Runs in: command line or trainer (``PackWorkers``), and in children of that process.

A worker writes one shard at a time. When the parent ends, for any reason, the kernel ends its workers.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from penstock.data.pack.job import PackJob, ProgressReporter
from penstock.data.sample_forms import CannotCarry
from penstock.errors import DataError, PenstockError, WorkerError
from penstock.workers.fork_hygiene import ctrl_c_blocked, keep_from_children
from penstock.workers.lifeline import Lifeline, Tie

PROBE = -1
"""The task of reading a few samples."""
_HEARTBEAT_S = 0.1
_PATIENCE_S = 5.0
"""A worker that has not ended this long after SIGTERM is killed."""


class TaskRanges:
    """Distributes tasks so that each worker gets neighbouring shards. Then few workers decode the same row group, and a
    dataset can use data that it kept from the previous sample."""

    def __init__(self, tasks: list[int], workers: list[Any]) -> None:
        cuts = [len(tasks) * number // len(workers) for number in range(len(workers) + 1)]
        self._left = {worker: tasks[cuts[number] : cuts[number + 1]] for number, worker in enumerate(workers)}

    def next_for(self, worker: Any) -> int | None:
        """The next task. A worker that has no task left takes the later half of the tasks of the worker that has the
        most tasks."""
        if not self._left[worker]:
            most = max(self._left, key=lambda other: len(self._left[other]))
            half = len(self._left[most]) // 2
            self._left[most], self._left[worker] = self._left[most][:half], self._left[most][half:]
        return self._left[worker].pop(0) if self._left[worker] else None


class PackWorkers:
    """Worker processes, each with a pipe of its own."""

    def __init__(self, job: PackJob, count: int, lock_fd: int) -> None:
        """``lock_fd``: the descriptor of the lock on the folder. A worker that outlives this process must not hold
        it."""
        self._job = job
        self._members: dict[Connection, tuple[Any, int | None]] = {}
        self._lifeline = Lifeline()
        context = _context_for(job)
        inherited_lock = lock_fd if context.get_start_method() == "fork" else None
        for _ in range(count):
            ours, theirs = context.Pipe()
            keep_from_children(ours)
            process = context.Process(
                target=_work, args=(job, theirs, self._lifeline.tie(), inherited_lock), daemon=True
            )
            with ctrl_c_blocked():
                process.start()
            theirs.close()
            self._members[ours] = (process, None)

    def run(self, tasks: list[int]) -> Iterator[tuple[int | None, int, Any]]:
        """Yields (task, samples done, result), where the result is None until the task is finished, and at times (None,
        0, None), so that the caller can stop. A task is the number of a shard, whose result is its record, or PROBE,
        whose result is a ``Probe``."""
        coming = TaskRanges(tasks, list(self._members))
        for pipe in list(self._members):
            self._give(pipe, coming)
        while any(shard is not None for _, shard in self._members.values()):
            for pipe in wait([pipe for pipe, (_, shard) in self._members.items() if shard is not None], _HEARTBEAT_S):
                assert isinstance(pipe, Connection)
                process, shard = self._members[pipe]
                assert shard is not None
                try:
                    word, content = pipe.recv()
                except (EOFError, OSError):
                    raise self._crash(process, shard) from None
                if word == "failed":
                    raise content
                if word == "at":
                    yield shard, content, None
                else:
                    self._give(pipe, coming)
                    yield shard, 0, content
            for pipe, (process, shard) in self._members.items():
                # A process that the dataset started may hold the pipe of a crashed worker open.
                if shard is not None and process.exitcode is not None and not pipe.poll():
                    raise self._crash(process, shard)
            yield None, 0, None

    def _give(self, pipe: Connection, coming: TaskRanges) -> None:
        process, _ = self._members[pipe]
        shard = coming.next_for(pipe)
        self._members[pipe] = (process, shard)
        if shard is not None:
            try:
                pipe.send(shard)
            except OSError:
                raise self._crash(process, shard) from None

    def _crash(self, process: Any, shard: int) -> WorkerError:
        process.join(_PATIENCE_S)
        code = process.exitcode
        how = f"with status {code}"
        if code is not None and code < 0:
            how = f"by signal {-code} ({signal.strsignal(-code)})"
        what = f"reading samples of {self._job.source.description}"
        if shard != PROBE:
            places = self._job.range_of(shard)
            what = f"writing {self._job.name(shard)} (samples {places.start} to {places.stop - 1})"
        return WorkerError(
            f"the worker {what} ended {how}; if memory ran out, use fewer workers. Run this again to continue"
        )

    def close(self) -> None:
        """End all workers, even in the middle of a shard."""
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
        self._lifeline.close()


def _context_for(job: PackJob) -> Any:
    """How workers start: by Python's start method, but by fork if the dataset cannot be pickled."""
    # Without allow_none, this call would fix the default, and the program could not choose another method later.
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if method != "fork" and "fork" in multiprocessing.get_all_start_methods():
        try:
            ForkingPickler.dumps(job)
        except Exception:
            method = "fork"
    return multiprocessing.get_context(method)


def _work(job: PackJob, pipe: Connection, tie: Tie, inherited_lock: int | None) -> None:
    tie.hold()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    if inherited_lock is not None:
        os.close(inherited_lock)
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
            answer = ("failed", _sendable(job, report.place, problem))
        try:
            pipe.send(answer)
        except OSError:
            return


def _sendable(job: PackJob, place: int | None, problem: Exception) -> PenstockError:
    """A failure as an error that can be pickled and sent to the parent."""
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
