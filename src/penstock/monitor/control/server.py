"""The control socket, through which other terminals reach a running training. ``client`` describes the messages.

In:  JSON lines from processes of the same user.
Out: answers; valves turned.
Runs in: trainer, in the monitor's thread. Nothing here waits, so no client can hold that thread up.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.formatting import one_line
from penstock.monitor.recorder import Recorder
from penstock.monitor.watched_loader import WatchedLoader

LONGEST_MESSAGE_BYTES = 64 << 10
_MOST_CLIENTS = 32
_MOST_AT_ONCE = 32
_MOST_UNSENT_BYTES = 4 << 20
_PATIENCE_S = 10.0
"""How long a client may take to send a message or to read an answer."""
_MOST_NAMED = 10
_SOURCES = ("terminal", "page", "governor", "alert")


class _Client:
    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.received = b""
        self.unsent = b""
        self.since_s = time.monotonic()


class Control:
    """Listens on a socket in a folder that only this user can enter."""

    def __init__(self, path: Path, selector: selectors.BaseSelector, answer: Callable[[Any], dict[str, Any]]) -> None:
        """Raises OSError."""
        self._path = path
        self._selector = selector
        self._answer = answer
        self._clients: list[_Client] = []
        self._pid = os.getpid()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(str(path))
            path.chmod(0o600)
            self._listener.listen(_MOST_CLIENTS)
            self._listener.setblocking(False)
        except OSError:
            self._listener.close()
            raise
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close_silent(self) -> None:
        """Close the connections of clients that neither send nor read."""
        now_s = time.monotonic()
        for client in list(self._clients):
            if now_s - client.since_s > _PATIENCE_S:
                self._drop(client)

    def close(self) -> None:
        for client in list(self._clients):
            self._drop(client)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._listener)
        self._listener.close()
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def forget(self) -> None:
        """In a forked child: close the child's copies of the sockets. The parent continues to listen."""
        for client in self._clients:
            client.line.close()
        self._listener.close()

    # -- inside -----------------------------------------------------------------------------

    def _accept(self, _: int) -> None:
        try:
            line, _address = self._listener.accept()
        except OSError:
            return
        if not _is_allowed(line):
            line.close()
            return
        if len(self._clients) >= _MOST_CLIENTS:
            self._drop(self._clients[0])
        line.setblocking(False)
        client = _Client(line)
        self._clients.append(client)
        self._selector.register(line, selectors.EVENT_READ, lambda events: self._serve(client, events))

    def _serve(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                piece = client.line.recv(LONGEST_MESSAGE_BYTES)
                if not piece:
                    self._drop(client)
                    return
                self._take(client, piece)
            self._send(client)
        except (OSError, KeyError, ValueError):
            # The connection was closed in the meantime, by either side.
            self._drop(client)

    def _take(self, client: _Client, piece: bytes) -> None:
        client.received += piece
        *lines, client.received = client.received.split(b"\n")
        if len(client.received) > LONGEST_MESSAGE_BYTES:
            self._refuse(client, f"the message has more than {LONGEST_MESSAGE_BYTES:,} bytes")
        elif len(lines) > _MOST_AT_ONCE or len(client.unsent) > _MOST_UNSENT_BYTES:
            # Answers need time of the training's interpreter.
            self._refuse(client, f"the client sent more than {_MOST_AT_ONCE} messages at once, or reads no answers")
        else:
            for line in lines:
                client.unsent += json.dumps(self._reply(line), default=str).encode() + b"\n"

    def _refuse(self, client: _Client, why: str) -> None:
        with contextlib.suppress(OSError):
            client.line.send(json.dumps({"ok": False, "why": why}).encode() + b"\n")
        self._drop(client)

    def _reply(self, line: bytes) -> dict[str, Any]:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return {"ok": False, "why": "the message is not JSON"}
        try:
            return self._answer(message)
        except ConfigError as refused:
            return {"ok": False, "why": str(refused)}
        except Exception as problem:
            # No message may end the thread that answers.
            return {"ok": False, "why": f"the request failed: {problem!r}"}

    def _send(self, client: _Client) -> None:
        if client.line.fileno() < 0:
            return
        if client.unsent:
            with contextlib.suppress(BlockingIOError):
                sent = client.line.send(client.unsent)
                client.unsent = client.unsent[sent:]
                client.since_s = time.monotonic()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        self._selector.modify(client.line, wanted, self._selector.get_key(client.line).data)

    def _drop(self, client: _Client) -> None:
        if client in self._clients:
            self._clients.remove(client)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(client.line)
            client.line.close()


def answerer(recorder: Recorder, about: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """The function that answers messages; ``about``: facts of the run that belong to the answer about its state."""

    def answer(message: Any) -> dict[str, Any]:
        what = message.get("do") if isinstance(message, dict) else None
        if what == "state":
            return {"ok": True, "state": _state(recorder, about)}
        if what == "set":
            loader = _chosen(recorder.loaders, message.get("loader"))
            who = next((known for known in _SOURCES if known == message.get("who")), "terminal")
            wanted = {name: value for name, value in message.items() if name not in ("do", "loader", "who")}
            return {"ok": True, "now": recorder.turn(loader, wanted, who=who)}
        return {"ok": False, "why": f'do={what!r} is unknown; write "state" or "set"'}

    return answer


def _chosen(loaders: Any, which: Any) -> WatchedLoader:
    names = ", ".join(f"{each.number}: {one_line(str(each.name), 40)}" for each in loaders[:_MOST_NAMED]) or "none"
    if len(loaders) > _MOST_NAMED:
        names += f" and {len(loaders) - _MOST_NAMED} more"
    if which is None:
        if len(loaders) == 1:
            return loaders[0]
        raise ConfigError(f"this run has {len(loaders)} loaders; choose one by name or number: {names}")
    found = [each for each in loaders if which in (each.name, each.number) or str(which) == str(each.number)]
    if len(found) != 1:
        wanted = one_line(str(which), 40)
        raise ConfigError(f"loader={wanted!r} matches {len(found)} of this run's loaders: {names}")
    return found[0]


def _state(recorder: Recorder, about: dict[str, Any]) -> dict[str, Any]:
    point = recorder.point
    loaders = [
        {
            "number": each.number,
            "name": each.name,
            "kind": "penstock" if each.is_penstock else "torch",
            "is_gone": each.loader is None,
            "configuration": each.configuration,
            "workers": each.workers(),
        }
        for each in recorder.loaders
    ]
    return {
        **about,
        "step": recorder.step,
        "t_s": None if point is None else point.t_s,
        "figures": {} if point is None else point.figures,
        "loaders": loaders,
        "is_recorded": recorder.record is not None,
    }


def _is_allowed(line: socket.socket) -> bool:
    """Whether the client belongs to the same user or to root. The folder already keeps other users out, unless its
    permissions were changed."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    _, user, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
    return user in (0, os.getuid())
