"""What a new process does with what it inherits: which sockets and pipes it closes, and how it treats Ctrl-C.

In:  sockets and pipes of the trainer.
Out: forked children without these sockets and pipes; a block in which new processes start with Ctrl-C blocked.
Runs in: trainer, command line, and forked children right after the fork.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol


class Closable(Protocol):
    def close(self) -> None: ...


_trainer_only: weakref.WeakSet[Closable] = weakref.WeakSet()
_lock = threading.Lock()
_held_back: Callable[[int, FrameType | None], Any] | None = None
"""The handler of Ctrl-C that waits for the end of a block."""


def keep_from_children(end: Closable) -> None:
    """Make forked children close ``end``; otherwise a peer that waits until ``end`` is closed would also wait for the
    children."""
    with _lock:
        _trainer_only.add(end)


def _close_inherited() -> None:
    global _lock
    _lock = threading.Lock()
    for end in list(_trainer_only):
        end.close()
    _trainer_only.clear()
    global _held_back
    if _held_back is not None:
        signal.signal(signal.SIGINT, _held_back)
        _held_back = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


@contextlib.contextmanager
def ctrl_c_blocked() -> Iterator[None]:
    """A process that is started inside the block inherits SIGINT blocked, and unblocks it once it can handle Ctrl-C
    silently. In this process Ctrl-C takes effect at the end of the block, so that no start is left half done."""
    with ctrl_c_held_back():
        if not hasattr(signal, "pthread_sigmask"):
            yield
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def ctrl_c_held_back() -> Iterator[None]:
    """In the main thread, the handler of Ctrl-C is called at the end of the block."""
    global _held_back
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler) or _held_back is not None:
        yield
        return
    struck: list[tuple[int, FrameType | None]] = []
    _held_back = handler
    signal.signal(signal.SIGINT, lambda *strike: struck.append(strike))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        _held_back = None
        if struck:
            handler(*struck[0])
