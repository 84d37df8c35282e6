"""The processes that write shards for `penstock pack`.

In:  a ``PackJob``, and numbers of shards.
Out: records of shards, as they are finished; failures, with what the dataset said.
Runs in: command line or trainer (``Crew``), and its children.

A worker writes one shard at a time. Whatever ends the parent ends its workers: they have nothing to wait for then.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.data.arrow_columns import Layout
from penstock.data.pack_sources import PackSource
from penstock.data.sample_forms import CannotCarry, to_members
from penstock.data.shard_writers import (
    ShardRecord,
    arrow_bytes,
    find_fault,
    tar_bytes,
    write_arrow,
    write_raw_tar,
    write_tables,
    write_tar,
)
from penstock.errors import DataError, PenstockError, WorkerError
from penstock.workers.interrupts import ctrl_c_blocked

_PR_SET_PDEATHSIG = 1
LOOK = -1
"""The task of looking at a few samples."""
_PROBED = 16
_TOLD_EVERY_S = 0.1
_HEARTBEAT_S = 0.1
_PATIENCE_S = 5.0
"""How long a worker that was told to end may take before it is killed."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a few samples tell of all."""

    layout: Layout
    """Columns they fit."""
    form: str
    """Of tar shards: the first sample's, and most others'."""
    sample_bytes: float
    """On average, as they are packed."""


def shard_name(shard: int, shards: int, to: str) -> str:
    digits = max(5, len(str(shards - 1)))
    return f"{shard:0{digits}d}.{to}"


@dataclass(frozen=True, kw_only=True)
class PackJob:
    """All that a worker needs to know to write any shard."""

    source: PackSource
    folder: Path
    to: str
    samples_per_shard: int
    probe: Probe | None

    @property
    def shards(self) -> int:
        return -(-self.source.count // self.samples_per_shard)

    def name(self, shard: int) -> str:
        return shard_name(shard, self.shards, self.to)

    def range_of(self, shard: int) -> range:
        first = shard * self.samples_per_shard
        return range(first, min(first + self.samples_per_shard, self.source.count))

    def look(self, tell: Teller) -> Probe:
        """At a few samples, evenly spread. In a worker: a dataset must not open its files in the parent, where workers
        that are forked would share them."""
        layout, form, sizes = Layout(), "", []
        count = self.source.count
        for place in np.unique(np.linspace(0, count - 1, min(_PROBED, count)).astype(np.int64)).tolist():
            tell.at(place, 0)
            sample = self.sample(place)
            layout.learn(sample)
            form = form or to_members(sample)[0]
            sizes.append(tar_bytes(sample) if self.to == "tar" else arrow_bytes(sample))
        return Probe(layout=layout, form=form, sample_bytes=sum(sizes) / len(sizes))

    def write(self, shard: int, tell: Teller) -> ShardRecord:
        path, places = self.folder / self.name(shard), self.range_of(shard)
        tables = self.source.tables

        def samples() -> Iterator[Any]:
            for place in places:
                tell.at(place, place - places.start)
                yield self.sample(place)

        if tables is not None:
            record = write_tables(path, tables.schema, tell.along(tables.batches(places.start, places.stop), places))
        elif self.to == "arrow":
            record = write_arrow(path, samples, self.probe.layout if self.probe else Layout())
        elif self.source.is_raw:
            record = write_raw_tar(path, samples())
        else:
            keyed = ((f"{place:09d}", sample) for place, sample in zip(places, samples(), strict=True))
            record = write_tar(path, keyed, self.probe.form if self.probe else "")
        fault = find_fault(path, record)
        if fault is None and record.samples != len(places):
            fault = f"it has {record.samples} samples, not {len(places)}"
        if fault is not None:
            raise DataError(f"{path} is not what was written: {fault}; look at the disk, then run this again")
        return record

    def sample(self, place: int) -> Any:
        # Samples that are made at random are the same ones whoever makes them, in whatever order.
        random.seed(place)
        np.random.seed(place & 0xFFFFFFFF)
        torch.default_generator.manual_seed(place)
        return self.source.samples[place]


class Teller:
    """Tells the parent how far a shard is, now and then."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.place: int | None = None
        self._told_s = 0.0

    def along(self, batches: Iterator[Any], places: range) -> Iterator[Any]:
        """Tells of every batch that is taken."""
        done = 0
        self.at(places.start, done)
        for batch in batches:
            yield batch
            done += batch.num_rows
            self.at(places.start + done, done)

    def at(self, place: int, done: int) -> None:
        """About to read a sample, when so many of the shard's are written."""
        self.place = place
        now_s = time.monotonic()
        if now_s - self._told_s >= _TOLD_EVERY_S:
            self._told_s = now_s
            self._pipe.send(("at", done))


class Crew:
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
        can stop. A task is a shard's number, for its record, or LOOK, for a probe."""
        coming = iter(tasks)
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

    def _give(self, pipe: Connection, coming: Iterator[int]) -> None:
        process, _ = self._members[pipe]
        shard = next(coming, None)
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
        if shard != LOOK:
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
    tell = Teller(pipe)
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer: tuple[str, Any] = ("done", job.look(tell) if task == LOOK else job.write(task, tell))
        except Exception as problem:
            answer = ("failed", _told(job, tell.place, problem))
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
