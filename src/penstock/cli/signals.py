"""Ctrl-C and SIGTERM during a command: each ends the command at a point where nothing is left half done.

In:  SIGINT, SIGTERM.
Out: KeyboardInterrupt, raised where the command checks for it; an exit with the status that a shell reports for
     SIGTERM.
Runs in: command line, main thread.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED, TERMINATED = 130, 143
"""Exit status that a shell reports for a program ended by Ctrl-C and by SIGTERM."""
_HINT = b"\nstopping at the next batch; press Ctrl-C again to stop now\n"


@contextmanager
def ctrl_c_on_request() -> Iterator[Callable[[], None]]:
    """Yields a function that raises KeyboardInterrupt if Ctrl-C was pressed. The second press raises KeyboardInterrupt
    at once.

    Raised anywhere else, KeyboardInterrupt does damage: an import swallows it in a bare ``except``, a half-built
    iterator cannot end its workers, and a worker that is still starting prints a traceback and crashes, so that torch
    reports the crash instead of the interruption.
    """
    pressed = False
    program = os.getpid()

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if os.getpid() != program:
            return  # in a forked worker, which this program ends
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        os.write(2, _HINT)

    def raise_if_pressed() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield raise_if_pressed
        raise_if_pressed()
    except Exception:
        # Workers that were starting received the signal too; their crash is the exception seen here.
        raise_if_pressed()
        raise
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that the block restores the screen and ends its child processes."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
