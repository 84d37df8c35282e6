"""The most memory another process and its descendants take, read from outside while they work.

In:  a way to read it, /proc.
Out: what there was at the start and at the most, and what the watching cost.
Runs in: the harness, in a thread. Reads /proc itself: a benchmark does not measure a product with the product.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

Reading = TypeVar("Reading")
_EVERY_S = 0.03


def read_tree(root: int, file: str) -> Iterator[dict[str, int]]:
    """The kilobytes by name in one file of /proc, of ``root`` and each descendant; those that end meanwhile are left
    out."""
    waiting = [root]
    while waiting:
        process = Path(f"/proc/{waiting.pop()}")
        try:
            for children in process.glob("task/*/children"):
                waiting += map(int, children.read_text().split())
            text = (process / file).read_text()
        except OSError:
            continue
        yield kilobytes(text)


def kilobytes(text: str) -> dict[str, int]:
    """``Name:  123 kB`` lines; others are passed over."""
    fields = (line.split() for line in text.splitlines())
    return {field[0].rstrip(":"): int(field[1]) for field in fields if len(field) == 3 and field[2] == "kB"}


class Peak(Generic[Reading]):
    """Keeps the largest reading from ``__enter__`` to ``__exit__``."""

    def __init__(self, read: Callable[[], Reading], size: Callable[[Reading], int], *, most_duty: float) -> None:
        """``most_duty``: reading takes at most this share of one processor: it must not slow down what it watches."""
        self._read, self._size, self._most_duty = read, size, most_duty
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak", daemon=True)
        self.start = self.peak = read()
        self.looks = 0
        self.look_s = 0.0

    @property
    def growth_bytes(self) -> int:
        return self._size(self.peak) - self._size(self.start)

    def __enter__(self) -> Self:
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
            now = self._read()
            if self._size(now) > self._size(self.peak):
                self.peak = now
            cpu_s = time.thread_time() - began_cpu_s
            self.looks += 1
            self.look_s += cpu_s
            pause_s = max(_EVERY_S - (time.monotonic() - began_s), cpu_s * (1 / self._most_duty - 1))
