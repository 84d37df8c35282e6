"""SIGTERM as an orderly end, for commands that leave something to put right: a screen, children.

In:  a block of code.
Out: an exit with the status a shell reports for that signal, after the block's own cleaning up.
Runs in: command line.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

TERMINATED = 143
"""What a shell reports for a program ended by SIGTERM."""


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
