"""A deadline for a whole HTTP exchange: urllib's own time limit starts again with every byte.

In:  seconds.
Out: handlers for ``urllib.request.build_opener``, whose connections are cut when the time is over.
Runs in: trainer, command line. Imported when a webhook is called.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from types import TracebackType
from typing import Any, Self
from urllib.request import HTTPHandler, HTTPSHandler, Request


class Deadline:
    """Inside the block, connections of ``handlers`` live no longer than ``within_s`` in total."""

    def __init__(self, within_s: float) -> None:
        self._lock = threading.Lock()
        self._lines: list[socket.socket] = []
        self.is_over = False
        self._timer = threading.Timer(within_s, self._cut)
        self._timer.daemon = True
        self.handlers = (_PlainHandler(self), _SecureHandler(self))

    def watch(self, line: socket.socket) -> None:
        """Cut this connection too. A TLS connection takes over the descriptor of ``line``, so a copy is kept."""
        copy = socket.socket(fileno=os.dup(line.fileno()))
        with self._lock:
            self._lines.append(copy)
            is_late = self.is_over
        if is_late:
            self._cut()

    def _cut(self) -> None:
        with self._lock:
            self.is_over = True
            for line in self._lines:
                # This wakes the thread that reads from or writes to the connection.
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            for line in self._lines:
                line.close()
            self._lines.clear()


class _PlainConnection(HTTPConnection):
    deadline: Deadline

    def connect(self) -> None:
        super().connect()
        self.deadline.watch(self.sock)


class _SecureConnection(HTTPSConnection, _PlainConnection):
    """``HTTPSConnection.connect`` calls ``connect`` of ``_PlainConnection`` before the handshake."""


class _PlainHandler(HTTPHandler):
    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self._made = type("_Watched", (_PlainConnection,), {"deadline": deadline})

    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(self._made, req)


class _SecureHandler(HTTPSHandler):
    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self._made: Any = type("_Watched", (_SecureConnection,), {"deadline": deadline})

    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(self._made, req)
