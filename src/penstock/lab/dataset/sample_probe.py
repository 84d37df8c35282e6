"""The probe: a few samples of a dataset are read to find their size, their computing time and their waiting time.

In:  a dataset.
Out: ``ProbeResult``: samples spread over the dataset, which a process of its own reads as a worker would.
Runs in: trainer; a child process that the trainer starts and ends.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate

from penstock.device.tree import leaves
from penstock.errors import DataError
from penstock.lab.dataset.stream_shares import COMPARED, WorkerStandIn, gives_all_to_each
from penstock.lab.shown_once import shown_once
from penstock.planner.profile import SeenSample
from penstock.planner.wording import GIVE_COLLATE
from penstock.workers.fork_hygiene import ctrl_c_blocked

_MOST_SAMPLES = 256
_LEAST_SAMPLES = 3
_START_WITHIN_S = 120.0
_THREADS_S, _FEWEST_READS = 0.4, 4
"""How long reading in threads is tried, and the fewest samples that must be read in that time for a comparison."""


class NoDataError(DataError):
    """The dataset has no sample, or its files are missing on this machine; the code of the dataset has no error."""


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """The result of the probe."""

    samples: tuple[SeenSample, ...]
    collate_s: float
    """The time to collate a batch of the samples."""
    tensors: int
    """The number of tensors in a batch."""
    is_collated: bool
    """Whether samples are combined, so that a batch has no more tensors than a smaller batch."""
    holds_gil: bool | None
    """Whether two threads read no faster than one thread; None if this was not tried."""
    is_repeated: bool = False
    """Whether every worker would read all samples, because the dataset is a stream that never asks which worker it is
    in."""


def probe(
    dataset: Any,
    batch_size: int,
    collate_fn: Callable[[Any], Any],
    *,
    seconds: float,
    on_progress: Callable[[float], None],
    least_s: float | None = None,
    within_s: float | None = None,
    tries_threads: bool = True,
) -> ProbeResult:
    """Read samples for about ``seconds``. An error of the dataset is raised in this process as a DataError that names
    the index, or as a NoDataError if only data is missing.

    ``least_s``: how long reading may go on until there are a few samples; None for as long as these samples take.
    ``within_s``: the time after which the probe ends, even with a single sample; None to wait as long as samples take.
    ``tries_threads``: whether samples are also read in two threads at the same time.
    """
    # The process is forked if possible: the objects of the dataset then lie in memory as they do in the workers.
    how = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(how)
    ours, theirs = context.Pipe()
    limits = _ProbeLimits(
        batch_size=batch_size,
        seconds=seconds,
        least=_LEAST_SAMPLES if within_s is None else 1,
        least_s=float("inf") if least_s is None else least_s,
        tries_threads=tries_threads,
    )
    child = context.Process(target=_begin, args=(theirs, dataset, collate_fn, limits), daemon=True)
    patience_s = _START_WITHIN_S + 10 * seconds if within_s is None else within_s
    deadline_s = time.monotonic() + patience_s
    try:
        with ctrl_c_blocked():
            child.start()
        # If this process kept the child's end open, a crash of the child would not close the pipe.
        theirs.close()
        while True:
            if ours.poll(0.1):
                kind, content = ours.recv()
                if kind == "done":
                    return content
                if kind == "lacking":
                    raise NoDataError(content)
                if kind == "failed":
                    raise DataError(content)
                on_progress(content)
            if time.monotonic() > deadline_s:
                raise DataError(f"reading a few samples took longer than {patience_s:.0f} s")
    except EOFError:
        child.join(5)
        raise DataError(f"the process that read samples ended with exit code {child.exitcode}") from None
    finally:
        ours.close()
        theirs.close()
        if child.pid is not None:
            child.kill()
            child.join()


@dataclass(frozen=True, kw_only=True)
class _ProbeLimits:
    """The limits of how much the child process reads."""

    batch_size: int
    seconds: float
    least: int
    """The number of samples to read even if reading them takes longer than ``seconds``."""
    least_s: float
    """The longest time that reading ``least`` samples may take; the child always waits for the first sample."""
    tries_threads: bool


def _begin(line: Any, dataset: Any, collate_fn: Callable[[Any], Any], limits: _ProbeLimits) -> None:
    with shown_once():
        _read(line, dataset, collate_fn, limits)


def _read(line: Any, dataset: Any, collate_fn: Callable[[Any], Any], limits: _ProbeLimits) -> None:
    # On Ctrl-C the parent ends this process; a second traceback from this process would only confuse.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    where = "asking for its samples"
    try:
        samples: list[SeenSample] = []
        kept: list[Any] = []
        first: list[Any] = []
        stand_in = WorkerStandIn(dataset, worker=0, workers=1) if isinstance(dataset, IterableDataset) else None
        began_s = time.perf_counter()
        for name, read in _reads(dataset):
            where = name
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            value = read()
            if value is _END:
                break
            spent_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
            samples.append(SeenSample(size_bytes=weigh(value), wait_s=max(0.0, spent_s - cpu_s), cpu_s=cpu_s))
            if len(first) < COMPARED:
                first.append(value)
            if len(kept) < limits.batch_size:
                kept.append(value)
            elapsed_s = time.perf_counter() - began_s
            line.send(("read", min(1.0, elapsed_s / limits.seconds)))
            if elapsed_s >= limits.seconds and (len(samples) >= limits.least or elapsed_s >= limits.least_s):
                break
        if not samples:
            line.send(("lacking", "the dataset is empty: it has no sample to read"))
            return
        where = "collating"
        cpu_s = time.process_time()
        with warnings.catch_warnings():
            # If samples have different shapes, torch warns before it raises an error; the error is enough.
            warnings.simplefilter("ignore")
            batch = collate_fn(kept)
        collate_s = (time.process_time() - cpu_s) * limits.batch_size / len(kept)
        one, tensors = _tensors(collate_fn(kept[:1])), _tensors(batch)
        each = (tensors - one) / (len(kept) - 1) if len(kept) > 1 else 0.0
        tensors += round(each * (limits.batch_size - len(kept)))
        # The first samples open files and fill caches, which later samples do not, so the first samples are left out if
        # enough others were read.
        warm = samples[len(samples) // 8 :] if len(samples) >= 16 else samples[1:] if len(samples) > 3 else samples
        holds_gil = None
        if limits.tries_threads and stand_in is None and _mean_s(warm) * _FEWEST_READS <= _THREADS_S:
            where = _IN_THREADS
            holds_gil = _holds_gil(dataset)
        is_repeated = stand_in is not None and gives_all_to_each(dataset, first, stand_in)
        line.send(
            (
                "done",
                ProbeResult(
                    samples=tuple(warm),
                    collate_s=collate_s,
                    tensors=tensors,
                    is_collated=each < 0.5,
                    holds_gil=holds_gil,
                    is_repeated=is_repeated,
                ),
            )
        )
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        kind = "lacking" if isinstance(error, FileNotFoundError) else "failed"
        then = f" ({last.filename}:{last.lineno})"
        if where == _IN_THREADS and hasattr(error, "__notes__"):
            where = f"{error.__notes__[-1]}, read in one of two threads,"
        if where == "collating" and collate_fn is default_collate:
            # The last line of the traceback is inside torch and does not help the user.
            then = f"; {GIVE_COLLATE}"
        line.send((kind, f"{where} failed: {type(error).__name__}: {error}{then}"))


def _reads(dataset: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    if isinstance(dataset, IterableDataset):
        stream = iter(dataset)
        yield from ((f"sample {number}", lambda: next(stream, _END)) for number in range(_MOST_SAMPLES))
        return
    for index in spread_indices(len(dataset), _MOST_SAMPLES):
        yield f"index {index}", lambda index=index: dataset[index]


_END = object()
_IN_THREADS = "reading in two threads"


def spread_indices(length: int, count: int) -> list[int]:
    """Indices from the whole dataset, in an order in which even the first few are spread over the dataset."""
    count = min(length, count)
    even = [number * length // count for number in range(count)]
    order = sorted(range(count), key=lambda number: (number * 0.6180339887) % 1)
    return [even[number] for number in order]


def _mean_s(samples: list[SeenSample]) -> float:
    return sum(sample.wait_s + sample.cpu_s for sample in samples) / len(samples)


def _holds_gil(dataset: Any) -> bool | None:
    from concurrent.futures import ThreadPoolExecutor

    indices = spread_indices(len(dataset), 64)

    def count(until_s: float, offset: int) -> int:
        done = 0
        while time.perf_counter() < until_s:
            index = indices[(done + offset) % len(indices)]
            try:
                dataset[index]
            except Exception as error:
                error.add_note(f"index {index}")
                raise
            done += 1
        return done

    def rate(threads: int) -> float:
        began_s = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            done = sum(pool.map(count, [began_s + _THREADS_S / 3] * threads, range(0, 7 * threads, 7)))
        return done / (time.perf_counter() - began_s)

    one = rate(1)
    if one * _THREADS_S < _FEWEST_READS or len(os.sched_getaffinity(0)) < 2:
        return None
    two = rate(2)
    # One thread is measured again: if another program slowed its first run, two threads would look faster than they
    # are.
    return two < 1.3 * max(one, rate(1))


def _tensors(batch: Any) -> int:
    return sum(isinstance(leaf, torch.Tensor) for leaf in leaves(batch))


def weigh(value: Any) -> int:
    """The bytes of a sample's tensors, arrays and texts."""
    return sum(_bytes_of(leaf) for leaf in leaves(value))


def _bytes_of(leaf: Any) -> int:
    if isinstance(leaf, np.ndarray):
        return leaf.nbytes
    if isinstance(leaf, (str, bytes)):
        return len(leaf)
    if not isinstance(leaf, torch.Tensor):
        return 0
    if leaf.layout is torch.sparse_coo:
        return leaf._values().nbytes + leaf._indices().nbytes
    try:
        return leaf.nbytes if leaf.layout is torch.strided and not leaf.is_nested else leaf.values().nbytes
    except (RuntimeError, NotImplementedError):
        return 0


def is_picklable(value: Any) -> bool:
    """Whether ``value`` can be sent to a spawned worker."""
    try:
        pickle.Pickler(_Nowhere()).dump(value)
    except Exception:
        return False
    return True


class _Nowhere(io.RawIOBase):
    """A file that accepts all bytes and keeps none of them."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data)
