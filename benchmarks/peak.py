"""The peak memory of another process and its descendants, sampled from outside.

In:  a function that takes a sample, /proc.
Out: the first sample, the largest, and the cost of sampling.
Runs in: the harness, in a thread. It reads /proc itself, so that penstock does not measure penstock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

TreeSample = TypeVar("TreeSample")
_EVERY_S = 0.03


def read_tree(root: int, file: str) -> Iterator[dict[str, int]]:
    """The kilobytes by name in one file of /proc, of ``root`` and each descendant, without those that end
    meanwhile."""
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
    """``Name:  123 kB`` lines; others are ignored."""
    fields = (line.split() for line in text.splitlines())
    return {field[0].rstrip(":"): int(field[1]) for field in fields if len(field) == 3 and field[2] == "kB"}


class Peak(Generic[TreeSample]):
    """Keeps the largest sample from ``__enter__`` to ``__exit__``."""

    def __init__(
        self, sample: Callable[[], TreeSample], size: Callable[[TreeSample], int], *, most_duty: float
    ) -> None:
        """``most_duty``: the share of one processor that sampling takes at most; more would slow down the processes."""
        self._sample, self._size, self._most_duty = sample, size, most_duty
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak", daemon=True)
        self.start = self.peak = sample()
        self.samples = 0
        self.sampling_s = 0.0

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
            now = self._sample()
            if self._size(now) > self._size(self.peak):
                self.peak = now
            cpu_s = time.thread_time() - began_cpu_s
            self.samples += 1
            self.sampling_s += cpu_s
            pause_s = max(_EVERY_S - (time.monotonic() - began_s), cpu_s * (1 / self._most_duty - 1))
