"""Ctrl-C while processes are started.

In:  nothing.
Out: a block in which a process that is being started inherits that Ctrl-C waits.
Runs in: trainer, command line.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def ctrl_c_blocked() -> Iterator[None]:
    """For a process being started, which inherits this and unblocks it when it can be quiet about Ctrl-C."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
