"""Ctrl-C at a moment of our choosing, while imports and worker processes are under way.

In:  SIGINT.
Out: KeyboardInterrupt, raised where the command asks for it.
Runs in: command line, main thread.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_HINT = b"\nstopping at the next batch; press Ctrl-C again to stop now\n"


@contextmanager
def ctrl_c_on_request() -> Iterator[Callable[[], None]]:
    """Yields a function that raises KeyboardInterrupt if Ctrl-C was pressed. The second press does not wait.

    Anywhere else it does damage: an import swallows it in a bare ``except``, a half-built iterator cannot end
    its workers, and a worker still starting prints a traceback and dies, which torch reports in its place.
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
        # Workers that were starting got the signal too, and their death is what is reported.
        raise_if_pressed()
        raise
    finally:
        signal.signal(signal.SIGINT, before)
