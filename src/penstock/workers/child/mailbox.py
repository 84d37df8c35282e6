"""A worker's messages: it receives tasks and sends reports. Messages about segments are handled on the way.

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
"""The exceptions that pickle raises for objects that it cannot pickle."""


class WorkerEnd(Protocol):
    """A worker's end of its channel."""

    def send(self, *messages: object) -> None: ...
    def receive(self, *, wait: bool) -> list[tuple[Any, int | None]]: ...


class Mailbox:
    def __init__(self, channel: WorkerEnd, views: Views, *, where: str) -> None:
        """``where`` names this worker in errors."""
        self._channel = channel
        self._views = views
        self._where = where
        self._backlog: deque[Any] = deque()

    def send(self, message: object) -> None:
        self._channel.send(message)

    def next(self) -> Any:
        """The next message in order. A Stop takes effect as soon as it has arrived, before earlier messages."""
        self._backlog += self._receive(wait=not self._backlog)
        while not self._backlog:
            self._backlog += self._receive(wait=True)
        return self._backlog.popleft()

    def _receive(self, *, wait: bool) -> list[Any]:
        """The messages that have arrived, except messages about segments, which are handled here."""
        others = []
        for message, fd in self._channel.receive(wait=wait):
            if isinstance(message, Stop):
                raise StopReceived
            if isinstance(message, Attach):
                self._views.attach(message, fd)
            elif isinstance(message, Detach):
                self._views.detach(message.number)
            else:
                others.append(message)
        return others

    def ask(self, need: Need) -> Room:
        """Ask for a segment and wait for the answer; tasks that arrive during the wait are kept for later."""
        self._channel.send(need)
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
        """Report a finished task at once, because the next task may take long.

        If a result or exception cannot be pickled, its text is sent as an error; a dataset's state that cannot be
        pickled is left out.
        """
        try:
            self._channel.send(done)
        except _CANNOT_TRAVEL as problem:
            without = done._replace(memo=None)
            if done.memo is not None and self._has_sent(without):
                return
            text = repr(problem) if done.error is None else done.error.exc_msg
            failed = {"outcome": Outcome("error"), "error": _as_runtime_error(text, self._where)}
            if not self._has_sent(done._replace(**failed)):
                self._channel.send(without._replace(**failed))

    def _has_sent(self, done: Done) -> bool:
        try:
            self._channel.send(done)
        except _CANNOT_TRAVEL:
            return False
        return True


class Dropped(Exception):
    """The trainer dropped the samples: memory is short and another batch is due first."""


class StopReceived(BaseException):
    """The trainer asked this worker to stop; raised at any point of its work."""


def _as_runtime_error(text: str, where: str) -> ExceptionWrapper:
    try:
        raise RuntimeError(text)
    except RuntimeError:
        return ExceptionWrapper(where=where)
