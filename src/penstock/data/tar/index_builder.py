"""Collects the indexes of many shards, and prints progress.

In:  the locations of the shards.
Out: their indexes.
Runs in: trainer, command line.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from penstock.data.sources import is_remote, open_source
from penstock.data.tar.index import ShardIndex
from penstock.data.tar.index_files import build_index, read_index, write_index
from penstock.data.tar.local_copies import ShardCopies, open_shard
from penstock.units import format_bytes

_MOST_THREADS = 8
_JOIN_S = 0.5
"""How long to wait for the threads after Ctrl-C or an error; a read from a store may take minutes."""
_SHOWN_EVERY_S = 0.5
_SHOWN_EVERY_SHARE = 0.1
"""Without a terminal, a line is printed for each tenth of the shards."""


def index_shards(
    locations: Sequence[str], *, index_dir: Path | None, copies: ShardCopies, progress: bool | None
) -> list[ShardIndex]:
    """The index of every shard: read from disk, or built and written to disk."""
    stop = threading.Event()

    def is_wanted() -> bool:
        return not stop.is_set()

    def index_one(number: int) -> ShardIndex:
        location = locations[number]
        original = open_source(location)
        version, size_bytes = original.version, original.size_bytes
        original.close()
        index = read_index(location, version, size_bytes, index_dir)
        if index is None:
            source = open_shard(location, version, copies if is_remote(location) else None, is_wanted)
            try:
                index = build_index(source, version, is_wanted)
            finally:
                source.close()
            write_index(location, index, index_dir)
        return index

    found: dict[int, ShardIndex] = {}
    read_bytes = 0
    show = _progress_line(len(locations), progress)
    for number, index in _each(index_one, len(locations), stop):
        found[number] = index
        read_bytes += index.size_bytes
        show(len(found), read_bytes)
    return [found[number] for number in range(len(locations))]


def _each(
    index_one: Callable[[int], ShardIndex], count: int, stop: threading.Event
) -> Iterator[tuple[int, ShardIndex]]:
    """Call ``index_one`` with every number, in several threads; yields results in the order in which they finish."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(count):
        waiting.put(number)
    done: queue.SimpleQueue[tuple[int, ShardIndex | BaseException]] = queue.SimpleQueue()

    def work() -> None:
        while not stop.is_set():
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((number, index_one(number)))
            except BaseException as problem:
                done.put((number, problem))

    # The threads are daemons, so that the program can end while a thread still reads from a store. Such a thread leaves
    # a partial copy behind, whose lock ends with this process; the next process deletes the partial copy.
    threads = [
        threading.Thread(target=work, name=f"penstock-tar-index-{number}", daemon=True)
        for number in range(min(count, _MOST_THREADS, max(2, os.cpu_count() or 1)))
    ]
    try:
        for thread in threads:
            thread.start()
        for _ in range(count):
            number, outcome = done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            yield number, outcome
    finally:
        stop.set()
        end_s = time.monotonic() + _JOIN_S
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, end_s - time.monotonic()))


def _progress_line(total: int, wanted: bool | None) -> Callable[[int, int], None]:
    """A function of (shards done, bytes read) that prints progress to stderr when a line is due; fast builds print
    nothing."""
    on_terminal = sys.stderr.isatty()
    is_shown = on_terminal if wanted is None else wanted
    shown_s, shown_at, has_shown = time.monotonic(), 0, False

    def show(done: int, read_bytes: int) -> None:
        nonlocal shown_s, shown_at, has_shown
        now_s, is_last = time.monotonic(), done == total
        is_due = now_s - shown_s >= _SHOWN_EVERY_S if on_terminal else done - shown_at >= _SHOWN_EVERY_SHARE * total
        if not is_shown or not (is_due or (is_last and has_shown)):
            return
        shown_s, shown_at, has_shown = now_s, done, True
        text = f"indexing: {done} of {total} shards ({done / total:.0%}), {format_bytes(read_bytes)}"
        end = "\n" if is_last or not on_terminal else ""
        print(f"\r{text:<78}" if on_terminal else text, end=end, file=sys.stderr, flush=True)

    return show
