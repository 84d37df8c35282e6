"""Tells every arena when this process forks: the child may use the inherited batches for longer than the trainer does.

In:  arenas; forks of this process, by any library.
Out: a note to every arena when a child is forked. If the child is a worker, the note has the worker's starter.
Runs in: trainer, in the thread that forks, around the fork.

``Arena.note_fork`` decides what happens to the segments.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Protocol


class Lender(Protocol):
    def note_fork(self, starter: object | None) -> None: ...


_lenders: tuple[weakref.ref[Lender], ...] = ()
"""The tuple is replaced as a whole, because a fork in another thread reads it without the lock."""
_lock = threading.Lock()
_here = threading.local()


def keep_noted(lender: Lender) -> None:
    """Notify the lender of every fork from now on."""
    global _lenders
    with _lock:
        _lenders = (*(ref for ref in _lenders if ref() is not None), weakref.ref(lender))


@contextlib.contextmanager
def forking_worker(starter: object) -> Iterator[None]:
    """Mark the children forked inside the block as workers of ``starter``. Their datasets may hold batches of other
    loaders."""
    _here.starter = starter
    try:
        yield
    finally:
        _here.starter = None


def _note() -> None:
    starter = getattr(_here, "starter", None)
    for ref in _lenders:
        if (lender := ref()) is not None:
            lender.note_fork(starter)


def _begin_child() -> None:
    global _lock
    _lock = threading.Lock()
    _here.starter = None


if hasattr(os, "register_at_fork"):
    # Note the fork afterwards too: another thread may receive a batch between the first note and the fork.
    os.register_at_fork(before=_note, after_in_parent=_note, after_in_child=_begin_child)
