"""What a process inherits when it is started: which sockets and pipes it closes, and how it treats Ctrl-C.

In:  sockets and pipes of the trainer.
Out: forked children without them; a block in which new processes start with Ctrl-C blocked.
Runs in: trainer, command line, and forked children right after the fork.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Protocol


class Closable(Protocol):
    def close(self) -> None: ...


_trainer_only: weakref.WeakSet[Closable] = weakref.WeakSet()
_lock = threading.Lock()


def keep_from_children(end: Closable) -> None:
    """Have forked children close ``end``; otherwise a peer that waits for it to close would wait for the children
    too."""
    with _lock:
        _trainer_only.add(end)


def _close_inherited() -> None:
    global _lock
    _lock = threading.Lock()
    for end in list(_trainer_only):
        end.close()
    _trainer_only.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


@contextlib.contextmanager
def ctrl_c_blocked() -> Iterator[None]:
    """A process started inside inherits SIGINT blocked. It unblocks it once it can handle Ctrl-C silently."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
