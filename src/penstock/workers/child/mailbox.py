"""A worker's letters: tasks in, reports out, shared memory mapped on the way.

In:  messages from the trainer; reports of finished tasks.
Out: the next task; reports.
Runs in: worker.
"""

from __future__ import annotations

import pickle
from collections import deque
from typing import Any, Protocol

from torch._utils import ExceptionWrapper

from penstock.workers.child.views import Views
from penstock.workers.protocol import DROP, Attach, Detach, Done, Need, Outcome, Room, Stop

_CANNOT_TRAVEL = (pickle.PickleError, TypeError, AttributeError, ValueError, RuntimeError)
"""What pickle raises for objects it cannot take apart."""


class Line(Protocol):
    """A worker's end of its channel."""

    def send(self, *messages: object) -> None: ...
    def receive(self, *, wait: bool) -> list[tuple[Any, int | None]]: ...


class Mailbox:
    def __init__(self, line: Line, views: Views, *, where: str) -> None:
        """``where`` names this worker in errors."""
        self._line = line
        self._views = views
        self._where = where
        self._backlog: deque[Any] = deque()

    def send(self, message: object) -> None:
        self._line.send(message)

    def next(self) -> Any:
        """The next message in order; but a Stop that has arrived goes before work that waits."""
        self._backlog += self._receive(wait=not self._backlog)
        while not self._backlog:
            self._backlog += self._receive(wait=True)
        return self._backlog.popleft()

    def _receive(self, *, wait: bool) -> list[Any]:
        """What has arrived that is not about mapping memory."""
        others = []
        for message, fd in self._line.receive(wait=wait):
            if isinstance(message, Stop):
                raise Stopped
            if isinstance(message, Attach):
                self._views.attach(message, fd)
            elif isinstance(message, Detach):
                self._views.detach(message.number)
            else:
                others.append(message)
        return others

    def ask(self, need: Need) -> Room:
        """Wait for room, keeping tasks that arrive meanwhile for later."""
        self._line.send(need)
        room: Room | None = None
        while room is None:
            for message in self._receive(wait=True):
                if isinstance(message, Room) and message.task == need.task:
                    room = message
                else:
                    self._backlog.append(message)
        if room.segment == DROP:
            raise Dropped
        return room

    def say(self, done: Done) -> None:
        """Report a finished task, at once: nobody knows how long the next one takes.

        Of a result or exception only this process can rebuild, the text still arrives.
        """
        try:
            self._line.send(done)
        except _CANNOT_TRAVEL as problem:
            text = repr(problem) if done.error is None else done.error.exc_msg
            self._line.send(done._replace(outcome=Outcome("error"), error=_as_runtime_error(text, self._where)))


class Dropped(Exception):
    """The trainer wants the samples forgotten: memory is short and another batch is due first."""


class Stopped(BaseException):
    """Told to leave, wherever in its work the worker was."""


def _as_runtime_error(text: str, where: str) -> ExceptionWrapper:
    try:
        raise RuntimeError(text)
    except RuntimeError:
        return ExceptionWrapper(where=where)
