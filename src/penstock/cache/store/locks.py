"""Locks between processes that die with their holder.

In:  a file all processes of a cache can open.
Out: exclusive byte ranges of it.
Runs in: trainer and worker.

The kernel keeps these locks per process, not per thread, and lets go of all of them when the process closes any
descriptor of the file: a process opens it once per cache (``region``), and threads take turns on a lock of their own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Protocol

_FIRST_NAP_S = 0.00005
_LONGEST_NAP_S = 0.001
_BUSY = {errno.EACCES, errno.EAGAIN, errno.EDEADLK}


class TooLong(Exception):
    """The lock was not to be had in the time given: its holder lives and does not let go."""


class RangeLock:
    """One byte of the file."""

    def __init__(self, fd: int, at: int) -> None:
        self._fd = fd
        self._at = at
        self._threads = threading.Lock()
        renew_after_fork(self)

    @contextlib.contextmanager
    def held(self, within_s: float) -> Iterator[None]:
        if not self._threads.acquire(timeout=within_s):
            raise TooLong
        try:
            wait_for(self._fd, self._at, within_s)
            try:
                yield
            finally:
                release(self._fd, self._at)
        finally:
            self._threads.release()

    def forget_threads(self) -> None:
        self._threads = threading.Lock()


class KeyLocks:
    """Any number of bytes of the file, one per key, each held by one thread of one process at a time."""

    def __init__(self, fd: int, at: int, count: int) -> None:
        self._fd, self._at, self._count = fd, at, count
        self._threads = threading.Lock()
        self._here: dict[int, _KeyLock] = {}
        renew_after_fork(self)

    @contextlib.contextmanager
    def held(self, key: int, within_s: float) -> Iterator[None]:
        """Raises TooLong."""
        at = self._at + key % self._count
        with self._threads:
            here = self._here.setdefault(at, _KeyLock())
            here.takers += 1
        try:
            if not here.lock.acquire(timeout=within_s):
                raise TooLong
            try:
                wait_for(self._fd, at, within_s)
                try:
                    yield
                finally:
                    release(self._fd, at)
            finally:
                here.lock.release()
        finally:
            with self._threads:
                here.takers -= 1
                if not here.takers:
                    self._here.pop(at, None)

    def forget_threads(self) -> None:
        self._threads, self._here = threading.Lock(), {}


class _KeyLock:
    """Threads of this process at one byte. One that holds it may take it again: its load may ask for the same key."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.takers = 0


def wait_for(fd: int, at: int, within_s: float, *, shared: bool = False) -> None:
    """Lock one byte, alone or with others who share it. Raises TooLong."""
    if try_lock(fd, at, shared=shared):
        return
    deadline_s, nap_s = time.monotonic() + within_s, _FIRST_NAP_S
    while True:
        time.sleep(nap_s)
        if try_lock(fd, at, shared=shared):
            return
        if time.monotonic() > deadline_s:
            raise TooLong
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)


def try_lock(fd: int, at: int, *, shared: bool = False) -> bool:
    try:
        fcntl.lockf(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB, 1, at)
    except OSError as refused:
        if refused.errno in _BUSY:
            return False
        raise
    return True


def release(fd: int, at: int) -> None:
    fcntl.lockf(fd, fcntl.LOCK_UN, 1, at)


class Forked(Protocol):
    def forget_threads(self) -> None:
        """Locks held by threads that do not exist in this process are free."""
        ...


_all: weakref.WeakSet[Forked] = weakref.WeakSet()


def renew_after_fork(holder: Forked) -> None:
    _all.add(holder)


def _forget_threads() -> None:
    """In a forked child: the threads that held locks do not exist here."""
    for lock in list(_all):
        lock.forget_threads()


os.register_at_fork(after_in_child=_forget_threads)
