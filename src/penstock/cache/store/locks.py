"""Locks between processes that the kernel releases when their holder exits or crashes.

In:  a file that all processes of a cache can open.
Out: exclusive byte ranges of the file.
Runs in: trainer, worker, command line.

The kernel keeps these locks per process, not per thread, and releases all of them when the process closes any
descriptor of the file. Therefore a process opens the file once per cache (``open_stores``), and its threads take turns
on an ordinary lock.
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
    """A living process did not release the lock in the time given."""


class RangeLock:
    """A lock on one byte of the file."""

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
    """Locks of keys, one byte of the file per key; one thread of one process at a time holds the lock of a key."""

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
            here.users += 1
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
                here.users -= 1
                if not here.users:
                    self._here.pop(at, None)

    def forget_threads(self) -> None:
        self._threads, self._here = threading.Lock(), {}


class _KeyLock:
    """The lock of one key between threads of this process. The thread that holds it may take it again, because a load
    may look up its own key."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users = 0


def wait_for(fd: int, at: int, within_s: float, *, shared: bool = False) -> None:
    """Lock one byte, exclusively or shared. Raises TooLong."""
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


class ForkAware(Protocol):
    def forget_threads(self) -> None:
        """Replace locks that threads of the parent may hold; those threads do not exist in a forked process."""
        ...


_all: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def renew_after_fork(holder: ForkAware) -> None:
    """Make every forked process call ``forget_threads``."""
    _all.add(holder)


def _forget_threads() -> None:
    for holder in list(_all):
        holder.forget_threads()


os.register_at_fork(after_in_child=_forget_threads)
