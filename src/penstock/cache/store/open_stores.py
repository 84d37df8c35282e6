"""The stores that this process has open: one view of each, shared by all caches that use it.

In:  a key (a name or a folder) and a function that opens its store.
Out: the store; it is closed when its last user in this process has released it.
Runs in: trainer and worker.

Two views in one process would be wrong: the locks of one view do not exclude the other view, and closing one view
releases the locks of both.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from penstock.cache.store.store import Store


@dataclass
class _OpenStore:
    store: Store
    leave: Callable[[], None]
    """Removes this process from the list of those that have the store open."""
    pid: int
    users: int = 0


_open: dict[str, _OpenStore] = {}
_released: deque[str] = deque()
"""Keys that were released and are not processed yet: the garbage collector may run while the lock is held."""
_lock = threading.Lock()


def acquire(key: str, open_store: Callable[[], tuple[Store, Callable[[], None]]]) -> Store:
    """The store, opened by ``open_store`` unless this process has it open. Call ``release`` when it is not needed."""
    try:
        with _lock:
            found = _open.get(key)
            if found is None:
                found = _open[key] = _OpenStore(*open_store(), os.getpid())
            found.users += 1
            return found.store
    finally:
        _close_released()


def release(key: str) -> None:
    """Note that a user has released the store. Any thread may call this, also inside the garbage collector."""
    _released.append(key)
    _close_released()


def _close_released() -> None:
    """Close stores without users. If another thread holds the lock, that thread does it afterwards."""
    while _released and _lock.acquire(blocking=False):
        try:
            while _released:
                _close_if_last(_released.popleft())
        finally:
            _lock.release()


def _close_if_last(key: str) -> None:
    found = _open.get(key)
    if found is None:
        return
    found.users -= 1
    if found.users:
        return
    del _open[key]
    try:
        # A forked process is not listed, and its parent still uses the store.
        if found.pid == os.getpid():
            found.leave()
    finally:
        found.store.close()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
