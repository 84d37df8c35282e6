"""Gives each thread that uses a store a row in shared memory, on which the process of the thread holds a lock.

In:  threads that read and write.
Out: rows in which threads note what they read, and their counts; which owners of rows are alive.
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
        """Rows of this process. A process finds its own locks free, so it remembers them here."""
        self._spare: list[int] = []
        """Rows of this process whose threads have ended."""
        self._threads = threading.Lock()
        """Excludes threads of this process from each other: the kernel gives both of them the same lock."""
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
        """Whether a thread that is alive is copying the value at ``offset``."""
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

    def crashed_writers(self) -> list[int]:
        """Rows whose owner crashed while writing a value."""
        writing = np.flatnonzero(self._region.rows[:, R_WRITING])
        return [int(number) for number in writing if not self.is_alive(int(number))]

    def _claim(self) -> None:
        with self._threads:
            if self._pid != os.getpid():
                # This process was forked: the rows belong to its parent.
                self._region.join()
                self._pid, self._own, self._spare = os.getpid(), set(), []
            number = self._spare.pop() if self._spare else self._take_row()
        here = self._here
        here.pid, here.number, here.row = self._pid, number, self._region.rows[number]
        here.token = token = _ThreadToken()
        when_gone(token, self._spare.append, number)

    def forget_threads(self) -> None:
        self._threads = threading.Lock()

    def _take_row(self) -> int:
        for number in range(ROWS):
            if number in self._own or not try_lock(self._region.lock_fd, L_ROWS + number):
                continue
            if self._region.rows[number, R_WRITING]:
                # The last owner's unfinished entry has to be removed first.
                release(self._region.lock_fd, L_ROWS + number)
                continue
            self._own.add(number)
            self._inherit(number)
            return number
        raise CacheError(f"More than {ROWS} threads use this cache at once.")

    def _inherit(self, number: int) -> None:
        """Add the counts of a row's last owner to the header, and clear the row."""
        row, header = self._region.rows[number], self._region.header
        for word, total in ((R_HITS, H_HITS), (R_MISSES, H_MISSES), (R_PASSED, H_PASSED), (R_CORRUPT, H_CORRUPT)):
            header[total] += row[word]
        row[:] = 0


class _ThreadToken:
    """An object that is collected when its thread ends."""
