"""Memory of another process and all its descendants, read from outside while it trains.

In:  /proc/<pid>/smaps_rollup and task/*/children.
Out: the most PSS seen, in all and by kind, and what the watching cost.
Runs in: the harness, in a thread. Reads /proc itself: a benchmark does not measure a product with the product.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_EVERY_S = 0.03
_MOST_DUTY = 0.2
"""Reading takes at most this share of one processor: it must not slow down what it watches."""


@dataclass(frozen=True, kw_only=True)
class TreePss:
    """PSS of a tree at one moment."""

    total_bytes: int
    file_bytes: int
    """Of it, mapped files: libraries. Moves when processes elsewhere that map the same files come and go."""
    processes: int


def tree_pss(root: int) -> TreePss:
    """Sum over ``root`` and its descendants; those that end meanwhile are left out."""
    total = file = count = 0
    waiting = [root]
    while waiting:
        process = Path(f"/proc/{waiting.pop()}")
        try:
            for children in process.glob("task/*/children"):
                waiting += map(int, children.read_text().split())
            kilobytes = _kilobytes((process / "smaps_rollup").read_text())
        except OSError:
            continue
        total += kilobytes.get("Pss", 0) * 1024
        file += kilobytes.get("Pss_File", 0) * 1024
        count += 1
    return TreePss(total_bytes=total, file_bytes=file, processes=count)


def _kilobytes(rollup: str) -> dict[str, int]:
    fields = (line.split() for line in rollup.splitlines()[1:])
    return {field[0].rstrip(":"): int(field[1]) for field in fields if len(field) == 3}


class Watch:
    """Keeps the peak from ``__enter__`` to ``__exit__``."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.start = self.peak = tree_pss(root)
        self.looks = 0
        self.look_s = 0.0

    @property
    def growth_bytes(self) -> int:
        return self.peak.total_bytes - self.start.total_bytes

    @property
    def file_growth_bytes(self) -> int:
        """How much of the growth is mapped files. More than a few MiB: somebody else's processes moved it."""
        return self.peak.file_bytes - self.start.file_bytes

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s = _EVERY_S
        while not self._ended.wait(pause_s):
            began_s, began_cpu_s = time.monotonic(), time.thread_time()
            now = tree_pss(self._root)
            if now.total_bytes > self.peak.total_bytes:
                self.peak = now
            cpu_s = time.thread_time() - began_cpu_s
            self.looks += 1
            self.look_s += cpu_s
            pause_s = max(_EVERY_S - (time.monotonic() - began_s), cpu_s * (1 / _MOST_DUTY - 1))
