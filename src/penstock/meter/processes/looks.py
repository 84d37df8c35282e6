"""Looking at something again and again, from a thread, while something else runs.

In:  what one look does.
Out: nothing of its own; what the looks have cost.
Runs in: trainer, command line.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

_MOST_DUTY = 0.1
"""Looking takes at most this share of one processor: it must not slow down what it looks at."""


class Looks:
    """A context in which ``look`` is called every so often."""

    def __init__(self, *, every_s: float) -> None:
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-looks", daemon=True)
        self.cpu_s = 0.0
        """What the looking has cost."""

    def look(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s = self._every_s
        while not self._ended.wait(pause_s):
            began_s, began_cpu_s = time.monotonic(), time.thread_time()
            self.look()
            cpu_s = time.thread_time() - began_cpu_s
            self.cpu_s += cpu_s
            pause_s = max(self._every_s - (time.monotonic() - began_s), cpu_s * (1 / _MOST_DUTY - 1))
