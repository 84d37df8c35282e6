"""Whether every change of the engine's state was completed.

In:  the beginning and the end of each change; errors in the engine's own thread.
Out: an error for every later call after a change was cut short.
Runs in: trainer, under the engine's lock.

Ctrl-C, or an exception from any other signal handler, may interrupt the training thread at any instruction, even while
it moves a message from a socket to a batch. State that was left half changed is never used again: the engine can only
be closed, and the loader's next iteration makes a new engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from penstock.errors import PenstockError


class IterationBroken(PenstockError, RuntimeError):
    """The engine cannot go on; the next iteration of the loader makes a new engine."""


class EngineClosed(StopIteration):
    """The loader was closed while the user's loop waited for a batch; this ends the loop."""


class Integrity:
    __slots__ = ("changing", "error")

    def __init__(self) -> None:
        self.changing = False
        """Whether a change is in progress. If it is still set when the next change begins, the earlier change was cut
        short."""
        self.error: BaseException | None = None
        """The error that cut the change short, if the engine's own thread made the change."""

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Mark a change in a ``with`` block. Callers that run once per batch set ``changing`` themselves, which takes a
        tenth of the time."""
        if self.changing:
            raise self.broken()
        self.changing = True
        yield
        self.changing = False

    def fail(self, error: BaseException) -> None:
        self.changing = True
        if self.error is None:
            self.error = error

    def broken(self) -> IterationBroken:
        """The error for a call after a change was cut short."""
        if self.error is None:
            return IterationBroken(
                "an exception, such as Ctrl-C, cut short an earlier call of this iteration, and the iteration cannot "
                "go on; iterate the loader again"
            )
        broken = IterationBroken(
            f"an error in the loader's own thread ended this iteration; iterate the loader again. The error: "
            f"{type(self.error).__name__}: {self.error}"
        )
        broken.__cause__ = self.error
        return broken
