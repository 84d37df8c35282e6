"""Indexes of many shards at once, with a line that says how far it is.

In:  the shards' locations.
Out: their indexes.
Runs in: trainer, command line.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from penstock.data.sources import is_remote, open_source
from penstock.data.tar.index import ShardIndex
from penstock.data.tar.local_copies import ShardCopies, open_shard
from penstock.data.tar.stored_index import build_index, clear_parts, keep_index, kept_index
from penstock.units import format_bytes

_MOST_THREADS = 8
_LEFT_AFTER_S = 0.5
"""After Ctrl-C or an error, how long threads are waited for: a read from a store may take minutes."""
_SHOWN_EVERY_S = 0.5
_SHOWN_EVERY_SHARE = 0.1
"""Where lines cannot be written over, one per tenth."""


def index_shards(
    locations: Sequence[str], *, index_dir: Path | None, copies: ShardCopies, progress: bool | None
) -> list[ShardIndex]:
    """Every shard's index, read where it was kept, built and kept where not."""
    stop = threading.Event()
    folders: set[Path] = set()

    def is_wanted() -> bool:
        return not stop.is_set()

    def index_one(number: int) -> ShardIndex:
        location = locations[number]
        original = open_source(location)
        version, size_bytes = original.version, original.size_bytes
        original.close()
        index = kept_index(location, version, size_bytes, index_dir)
        if index is None:
            source = open_shard(location, version, copies if is_remote(location) else None, is_wanted)
            try:
                index = build_index(source, version, is_wanted)
            finally:
                source.close()
            folder = keep_index(location, index, index_dir)
            if folder is not None:
                folders.add(folder)
        return index

    with _IndexProgress(len(locations), wanted=progress) as line:
        indexes = _each(index_one, len(locations), stop, line)
    for folder in folders:
        clear_parts(folder)
    return indexes


def _each(
    index_one: Callable[[int], ShardIndex], count: int, stop: threading.Event, line: _IndexProgress
) -> list[ShardIndex]:
    """What ``index_one`` makes of every number, several at a time."""
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

    # Daemons: one that is still reading when the program ends does not keep it. What it leaves half copied is locked
    # only as long as the process lives, and deleted by who comes next.
    threads = [
        threading.Thread(target=work, name=f"penstock-tar-index-{number}", daemon=True)
        for number in range(min(count, _MOST_THREADS, max(2, os.cpu_count() or 1)))
    ]
    found: dict[int, ShardIndex] = {}
    read_bytes = 0
    try:
        for thread in threads:
            thread.start()
        while len(found) < count:
            number, outcome = done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            found[number] = outcome
            read_bytes += outcome.size_bytes
            line.show(len(found), read_bytes)
    finally:
        stop.set()
        end_s = time.monotonic() + _LEFT_AFTER_S
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, end_s - time.monotonic()))
    return [found[number] for number in range(count)]


class _IndexProgress:
    """How far it is; nothing at all if it is done at once."""

    def __init__(self, total: int, *, wanted: bool | None, out: TextIO | None = None) -> None:
        self._total = total
        self._out = out or sys.stderr
        self._overwrites = self._out.isatty()
        self._wanted = self._overwrites if wanted is None else wanted
        self._shown_s, self._shown_at = time.monotonic(), 0
        self._has_shown = False

    def __enter__(self) -> _IndexProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_shown and self._overwrites:
            self._out.write("\n")

    def show(self, done: int, read_bytes: int) -> None:
        now_s = time.monotonic()
        if not self._wanted or not self._is_due(done, now_s):
            return
        self._shown_s, self._shown_at, self._has_shown = now_s, done, True
        text = f"indexing: {done} of {self._total} shards ({done / self._total:.0%}), {format_bytes(read_bytes)}"
        self._out.write(f"\r{text:<78}" if self._overwrites else f"{text}\n")
        self._out.flush()

    def _is_due(self, done: int, now_s: float) -> bool:
        if done == self._total and self._has_shown:
            return True
        if self._overwrites:
            return now_s - self._shown_s >= _SHOWN_EVERY_S
        return done - self._shown_at >= _SHOWN_EVERY_SHARE * self._total
