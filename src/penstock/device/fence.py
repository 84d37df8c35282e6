"""A fence between the moment when the user drops a batch and the moment when the arena refills the batch's segment.

In:  things that the device may still be reading, dropped by any thread.
Out: the same things, once all work that was queued on the device when they were dropped is done.
Runs in: trainer. Any thread puts things in; only the training thread makes marks, because recording an event while
another thread captures a CUDA graph would invalidate the graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class QueueMark(Protocol):
    """A point in the device's queues."""

    def passed(self) -> bool:
        """Whether the device has passed this point."""
        ...

    def wait(self) -> None:
        """Wait until the device has passed this point."""
        ...


class Fence(Generic[T]):
    def __init__(self, mark: Callable[[], QueueMark | None]) -> None:
        """``mark`` marks the end of all work queued now, on every stream; it returns None if that is impossible at the
        moment."""
        self._mark = mark
        self._fresh: deque[T] = deque()
        self._waiting: deque[tuple[QueueMark, list[T]]] = deque()

    def put(self, thing: T) -> None:
        """Hold ``thing`` back. Any thread may call this, even inside the garbage collector."""
        self._fresh.append(thing)

    def advance(self) -> list[T]:
        """Mark the things that were put in since the last call; return the things whose marks have passed. Only the
        training thread may call this."""
        passed: list[T] = []
        while self._waiting and self._waiting[0][0].passed():
            passed += self._waiting.popleft()[1]
        if self._fresh and (mark := self._mark()) is not None:
            self._waiting.append((mark, [self._fresh.popleft() for _ in range(len(self._fresh))]))
        return passed

    def drain(self) -> list[T]:
        """Wait for all things and return them."""
        passed: list[T] = []
        while self._waiting:
            mark, things = self._waiting.popleft()
            mark.wait()
            passed += things
        if self._fresh:
            if (mark := self._mark()) is not None:
                mark.wait()
            passed += [self._fresh.popleft() for _ in range(len(self._fresh))]
        return passed

    def __len__(self) -> int:
        return len(self._fresh) + sum(len(things) for _, things in self._waiting)
