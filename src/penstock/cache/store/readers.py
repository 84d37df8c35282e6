"""Who uses the cache now: a row in shared memory for every thread, marked by a lock that dies with its process.

In:  threads that read and write.
Out: rows to note in what is being read, and to count in; which rows' owners are alive.
Runs in: trainer and worker.
"""

from __future__ import annotations

import os
import threading

import numpy as np

from penstock.arena.last_view import when_gone
from penstock.cache.store.locks import release, renew_after_fork, try_lock
from penstock.cache.store.region import (
    H_CORRUPT,
    H_HITS,
    H_MISSES,
    H_PASSED,
    L_ROWS,
    R_CORRUPT,
    R_HITS,
    R_MISSES,
    R_PASSED,
    R_READING,
    R_WRITING,
    ROWS,
    Region,
)
from penstock.errors import CacheError


class Readers:
    def __init__(self, region: Region) -> None:
        self._region = region
        self._here = threading.local()
        self._pid = os.getpid()
        self._own: set[int] = set()
        """Rows of this process, whose locks look free to it."""
        self._spare: list[int] = []
        """Rows of this process whose thread has ended."""
        self._threads = threading.Lock()
        """Taking a lock by trying it is nothing two threads of a process may do at once."""
        renew_after_fork(self)

    def row(self) -> np.ndarray:
        """The calling thread's row."""
        here = self._here
        if getattr(here, "pid", None) != os.getpid():
            self._claim()
        return here.row

    def number(self) -> int:
        self.row()
        return self._here.number

    def is_read(self, offset: int) -> bool:
        """Whether somebody alive is copying the value at ``offset``."""
        reading = np.flatnonzero(self._region.rows[:, R_READING] == offset + 1)
        return any(self.is_alive(int(number)) for number in reading)

    def is_alive(self, number: int) -> bool:
        if number in self._own and self._pid == os.getpid():
            return True
        with self._threads:
            if number in self._own and self._pid == os.getpid():
                return True
            if not try_lock(self._region.lock_fd, L_ROWS + number):
                return True
            release(self._region.lock_fd, L_ROWS + number)
            return False

    def dead_writers(self) -> list[int]:
        """Rows whose owner died while writing a value."""
        writing = np.flatnonzero(self._region.rows[:, R_WRITING])
        return [int(number) for number in writing if not self.is_alive(int(number))]

    def _claim(self) -> None:
        with self._threads:
            if self._pid != os.getpid():
                # Forked: the rows are the parent's.
                self._region.join()
                self._pid, self._own, self._spare = os.getpid(), set(), []
            number = self._spare.pop() if self._spare else self._take_row()
        here = self._here
        here.pid, here.number, here.row = self._pid, number, self._region.rows[number]
        here.token = token = _Token()
        when_gone(token, self._spare.append, number)

    def forget_threads(self) -> None:
        self._threads = threading.Lock()

    def _take_row(self) -> int:
        for number in range(ROWS):
            if number in self._own or not try_lock(self._region.lock_fd, L_ROWS + number):
                continue
            if self._region.rows[number, R_WRITING]:
                # What its last owner left unwritten must be cleared away first.
                release(self._region.lock_fd, L_ROWS + number)
                continue
            self._own.add(number)
            self._inherit(number)
            return number
        raise CacheError(f"more than {ROWS} threads use this cache at once")

    def _inherit(self, number: int) -> None:
        """Count what a row's last owner counted; the row begins anew."""
        row, header = self._region.rows[number], self._region.header
        for word, total in ((R_HITS, H_HITS), (R_MISSES, H_MISSES), (R_PASSED, H_PASSED), (R_CORRUPT, H_CORRUPT)):
            header[total] += row[word]
        row[:] = 0


class _Token:
    """Goes when its thread does."""
