"""Whether every change of the engine's state was made to its end.

In:  the beginning and the end of each change; errors that the engine's own thread met.
Out: an error for every later call, once a change was cut short.
Runs in: trainer, under the engine's lock.

Ctrl-C, or an exception from any other signal handler, may strike the training thread at any instruction, also while
it moves a message from a socket to a batch. State that was left half changed is never used again: the engine only
closes, and the loader's next iteration makes a new one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from penstock.errors import PenstockError


class IterationBroken(PenstockError, RuntimeError):
    """The engine cannot go on; iterating the loader again makes a new one."""


class EngineClosed(StopIteration):
    """The loader was closed while a batch was on its way to the user, whose loop it ends."""


class Integrity:
    __slots__ = ("changing", "error")

    def __init__(self) -> None:
        self.changing = False
        """Whether a change is under way. If it is still set when the next change begins, one was cut short."""
        self.error: BaseException | None = None
        """What cut it short, if the engine's own thread was making it."""

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Make a change. Where a batch passes, callers set ``changing`` themselves, which costs a tenth."""
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
        """The error for a call that finds a change cut short."""
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
