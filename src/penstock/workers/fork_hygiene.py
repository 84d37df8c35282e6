"""Ends of sockets and pipes that belong to the trainer alone.

In:  anything with ``close``.
Out: forked children do not have it: whoever waits for such an end to close would otherwise wait for them too.
Runs in: trainer, and in its forked children right after the fork.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class End(Protocol):
    def close(self) -> None: ...


_ends: weakref.WeakSet[End] = weakref.WeakSet()
_lock = threading.Lock()


def keep_from_children(end: End) -> None:
    with _lock:
        _ends.add(end)


def _close_inherited() -> None:
    global _lock
    _lock = threading.Lock()
    for end in list(_ends):
        end.close()
    _ends.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)
