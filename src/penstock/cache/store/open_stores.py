"""One view per process of every tier it has open, however many caches use it.

In:  a key (a name, a folder) and how to open what it stands for.
Out: the tier; closed when its last user in this process lets go.
Runs in: trainer and worker.

A second view in one process would not be kept out by the first one's locks, and closing it would let go of them.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from penstock.cache.store.store import Tier


@dataclass
class _Opened:
    tier: Tier
    leave: Callable[[], None]
    """Says in public that this process is done with it."""
    pid: int
    users: int = 0


_opened: dict[str, _Opened] = {}
_let_go: deque[str] = deque()
"""Keys whose user is gone and that were not dealt with yet: the garbage collector may come while the lock is held."""
_lock = threading.Lock()


def take(key: str, open_tier: Callable[[], tuple[Tier, Callable[[], None]]]) -> Tier:
    """The tier, opened by ``open_tier`` if this process has not; see ``let_go``."""
    try:
        with _lock:
            found = _opened.get(key)
            if found is None:
                found = _Opened(*open_tier(), os.getpid())
                _opened[key] = found
            found.users += 1
            return found.tier
    finally:
        _settle()


def let_go(key: str) -> None:
    _let_go.append(key)
    _settle()


def _settle() -> None:
    """Close what nobody uses; if somebody is at it, he does this too when he is done."""
    while _let_go and _lock.acquire(blocking=False):
        try:
            while _let_go:
                _close_if_last(_let_go.popleft())
        finally:
            _lock.release()


def _close_if_last(key: str) -> None:
    found = _opened.get(key)
    if found is None:
        return
    found.users -= 1
    if found.users:
        return
    del _opened[key]
    try:
        # A forked child is not known in public, and its parent is not done.
        if found.pid == os.getpid():
            found.leave()
    finally:
        found.tier.close()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
