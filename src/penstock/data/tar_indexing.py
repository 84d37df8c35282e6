"""Indexes of many shards at once, with a line that says how far it is.

In:  the shards' locations.
Out: their indexes.
Runs in: trainer, command line.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TextIO

from penstock.data.shard_copies import ShardCopies, open_shard
from penstock.data.sources import is_remote, open_source
from penstock.data.tar_index import ShardIndex
from penstock.data.tar_index_file import Stopped, build_index, keep_index, kept_index
from penstock.units import format_bytes

_MOST_THREADS = 8
_SHOWN_EVERY_S = 0.5
_SHOWN_EVERY_SHARE = 0.1
"""Where lines cannot be written over, one per tenth."""


def index_shards(
    locations: Sequence[str], *, index_dir: Path | None, copies: ShardCopies, progress: bool | None
) -> list[ShardIndex]:
    """Every shard's index, read where it was kept, built and kept where not."""
    stop = threading.Event()

    def index_one(location: str) -> ShardIndex:
        original = open_source(location)
        version, size_bytes = original.version, original.size_bytes
        original.close()
        index = kept_index(location, version, size_bytes, index_dir)
        if index is None:
            if stop.is_set():
                raise Stopped
            source = open_shard(location, version, copies if is_remote(location) else None)
            try:
                index = build_index(source, version, lambda: not stop.is_set())
            finally:
                source.close()
            keep_index(location, index, index_dir)
        return index

    threads = min(len(locations), _MOST_THREADS, max(2, os.cpu_count() or 1))
    pool = ThreadPoolExecutor(threads, thread_name_prefix="penstock-tar-index")
    try:
        futures = [pool.submit(index_one, location) for location in locations]
        with _Line(len(locations), wanted=progress) as line:
            waiting, read_bytes = set(futures), 0
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                read_bytes += sum(future.result().size_bytes for future in done)
                line.show(len(locations) - len(waiting), read_bytes)
        return [future.result() for future in futures]
    finally:
        # After Ctrl-C or an error nobody waits for the shards that are left.
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


class _Line:
    """How far it is; nothing at all if it is done at once."""

    def __init__(self, total: int, *, wanted: bool | None, out: TextIO | None = None) -> None:
        self._total = total
        self._out = out or sys.stderr
        self._overwrites = self._out.isatty()
        self._wanted = self._overwrites if wanted is None else wanted
        self._shown_s, self._shown_at = time.monotonic(), 0
        self._has_shown = False

    def __enter__(self) -> _Line:
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
