"""Some samples of a dataset, read to learn their size and where their time goes.

In:  a dataset.
Out: samples spread over the dataset, read in a separate process as a worker would read them.
Runs in: trainer; a child it starts and ends.
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
from penstock.lab.dataset.stream_shares import COMPARED, PassedFor, gives_all_to_each
from penstock.planner.profile import SeenSample
from penstock.planner.wording import GIVE_COLLATE
from penstock.workers.fork_hygiene import ctrl_c_blocked

_MOST_SAMPLES = 256
_LEAST_SAMPLES = 3
_START_WITHIN_S = 120.0
_THREADS_S, _FEWEST_READS = 0.4, 4
"""How long threads are tried; if fewer samples can be read in that time, the result is unknown."""


class NoDataError(DataError):
    """The dataset has no sample, or its files are missing. The dataset's code works."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a look gave."""

    samples: tuple[SeenSample, ...]
    collate_s: float
    """Time to collate a batch of them."""
    tensors: int
    """In such a batch."""
    is_collated: bool
    """Whether the batch has no more tensors than a smaller one."""
    holds_gil: bool | None
    """Whether two threads read no faster than one; None: not tried."""
    is_repeated: bool = False
    """Whether every worker would read all of it, because the stream does not distinguish its workers."""


def look(
    dataset: Any,
    batch_size: int,
    collate_fn: Callable[[Any], Any],
    *,
    seconds: float,
    on_progress: Callable[[float], None],
    least_s: float | None = None,
    within_s: float | None = None,
    tries_threads: bool = True,
) -> Seen:
    """Read samples for about that many seconds. An exception of the dataset is raised as a DataError that names the
    index, or as a NoDataError if only data is missing. ``least_s``: continue up to this time to read a few samples;
    None: without a limit. ``within_s``: give up after this time, and accept a single sample; None: without a limit.
    ``tries_threads``: also read in two threads at a time.
    """
    # Forked where possible, so that this process sees the dataset's memory as its workers will.
    how = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(how)
    ours, theirs = context.Pipe()
    wanted = _Wanted(
        batch_size=batch_size,
        seconds=seconds,
        least=_LEAST_SAMPLES if within_s is None else 1,
        least_s=float("inf") if least_s is None else least_s,
        tries_threads=tries_threads,
    )
    child = context.Process(target=_read, args=(theirs, dataset, collate_fn, wanted), daemon=True)
    patience_s = _START_WITHIN_S + 10 * seconds if within_s is None else within_s
    deadline_s = time.monotonic() + patience_s
    try:
        with ctrl_c_blocked():
            child.start()
        # Otherwise the end of a child that crashes would go unnoticed.
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
                raise DataError(f"reading a few samples did not end within {patience_s:.0f} s")
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
class _Wanted:
    """The task of the child process."""

    batch_size: int
    seconds: float
    least: int
    """Samples to read, even if that takes longer."""
    least_s: float
    """But not for longer than this, except for the first sample."""
    tries_threads: bool


def _read(line: Any, dataset: Any, collate_fn: Callable[[Any], Any], wanted: _Wanted) -> None:
    # The parent ends this process; a second traceback after Ctrl-C would not help.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    where = "asking for its samples"
    try:
        samples: list[SeenSample] = []
        kept: list[Any] = []
        first: list[Any] = []
        passed_for = PassedFor(dataset, worker=0, workers=1) if isinstance(dataset, IterableDataset) else None
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
            if len(kept) < wanted.batch_size:
                kept.append(value)
            elapsed_s = time.perf_counter() - began_s
            line.send(("read", min(1.0, elapsed_s / wanted.seconds)))
            if elapsed_s >= wanted.seconds and (len(samples) >= wanted.least or elapsed_s >= wanted.least_s):
                break
        if not samples:
            line.send(("lacking", "it is empty: there is no sample to look at"))
            return
        where = "collating"
        cpu_s = time.process_time()
        with warnings.catch_warnings():
            # If samples cannot be collated, torch warns and then fails; the failure is enough.
            warnings.simplefilter("ignore")
            batch = collate_fn(kept)
        collate_s = (time.process_time() - cpu_s) * wanted.batch_size / len(kept)
        one, tensors = _tensors(collate_fn(kept[:1])), _tensors(batch)
        each = (tensors - one) / (len(kept) - 1) if len(kept) > 1 else 0.0
        tensors += round(each * (wanted.batch_size - len(kept)))
        # The first samples open files and fill caches, so they are left out if there are enough others.
        warm = samples[len(samples) // 8 :] if len(samples) >= 16 else samples[1:] if len(samples) > 3 else samples
        holds_gil = None
        if wanted.tries_threads and passed_for is None and _mean_s(warm) * _FEWEST_READS <= _THREADS_S:
            holds_gil = _holds_gil(dataset)
        is_repeated = passed_for is not None and gives_all_to_each(dataset, first, passed_for)
        line.send(
            (
                "done",
                Seen(
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
        if where == "collating" and collate_fn is default_collate:
            # The line that failed is in torch and does not help the user.
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


def spread_indices(length: int, count: int) -> list[int]:
    """Indices from the whole dataset, in an order in which even the first few are spread over it."""
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
            dataset[indices[(done + offset) % len(indices)]]
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
    # Another program may have slowed the single thread, which would make two threads look faster than they are.
    return two < 1.3 * max(one, rate(1))


def _tensors(batch: Any) -> int:
    return sum(isinstance(leaf, torch.Tensor) for leaf in leaves(batch))


def weigh(value: Any) -> int:
    """Bytes of a sample's tensors, arrays and texts."""
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
    """Whether it can be sent to a spawned worker."""
    try:
        pickle.Pickler(_Nowhere()).dump(value)
    except Exception:
        return False
    return True


class _Nowhere(io.RawIOBase):
    """A file that discards what is written to it."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data)
