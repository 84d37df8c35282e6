"""The monitor's thread: a tick every second, the control socket in between.

In:  a recorder; messages from other terminals.
Out: points, answers.
Runs in: trainer, a daemon thread.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.monitor.control.server import Control
from penstock.monitor.log_line import say
from penstock.monitor.recorder import Recorder

EVERY_S = 1.0
_MOST_DUTY = 0.05
"""Share of one processor that a tick may take until the next: points of a large tree are rarer."""


class Ticker:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._selector = getattr(selectors, "PollSelector", selectors.SelectSelector)()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._control: Control | None = None
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="penstock-monitor", daemon=True)
        self.cpu_s = self._cost_s = 0.0
        """What the ticks have cost, and the last."""

    def listen(self, path: Path, answer: Callable[[Any], dict[str, Any]]) -> None:
        """Answer on a socket there. Raises OSError."""
        self._control = Control(path, self._selector, answer)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def end(self, within_s: float) -> bool:
        """Stop; False if it does not within the time."""
        self._is_ending = True
        with contextlib.suppress(OSError):
            self._wake_write.send(b"\0")
        if self._thread.ident is not None and not self.is_this_thread:
            self._thread.join(within_s)
            if self._thread.is_alive():
                return False
        self._close()
        return True

    def forget(self) -> None:
        """In a forked child, where the thread does not exist: close the copies of what it has open."""
        self._is_ending = True
        self._wake_read.close()
        self._wake_write.close()
        if self._control is not None:
            self._control.forget()

    # -- inside -----------------------------------------------------------------------------

    def _close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _run(self) -> None:
        due_s = time.monotonic() + EVERY_S
        ticks = True
        while not self._is_ending:
            for key, events in self._selector.select(max(0.0, due_s - time.monotonic())):
                if key.data is not None:
                    key.data(events)
            now_s = time.monotonic()
            if self._is_ending or now_s < due_s:
                continue
            if self._control is not None:
                self._control.look_after()
            if ticks:
                ticks = self._tick()
            cpu_s = self._cost_s
            # On time as long as it is cheap; a moment that was missed is not made up for.
            due_s = max(due_s + EVERY_S, now_s + cpu_s / _MOST_DUTY, now_s + EVERY_S / 2)

    def _tick(self) -> bool:
        began_s = time.thread_time()
        try:
            self._recorder.tick()
        except Exception as problem:
            # A training must not end over its monitor.
            say(logging.WARNING, f"penstock: the monitor has failed, training goes on without it: {problem!r}")
            return False
        finally:
            self._cost_s = time.thread_time() - began_s
            self.cpu_s += self._cost_s
        return True
