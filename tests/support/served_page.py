"""A page's server in a thread of the test, on a real socket, and a training that answers it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.web.access import Access
from penstock.web.server import PageServer

TOKEN = "a-token-for-tests"
LONG_S = 30.0
"""For what comes at once, on a machine that is busy."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def value(self) -> Any:
        return json.loads(self.body, parse_constant=lambda text: 1 / 0)


class Served:
    """What a test needs of a server that runs."""

    def __init__(self, server: PageServer, port: int) -> None:
        self.server = server
        self.port = port
        self.origin = f"http://127.0.0.1:{port}"

    def ask(self, path: str, method: str = "GET", body: bytes | None = None, /, **headers: str) -> Answer:
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG_S)
        try:
            line.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            found = line.getresponse()
            names = {name.lower(): value for name, value in found.getheaders()}
            return Answer(status=found.status, headers=names, body=found.read())
        finally:
            line.close()

    def turn(self, run_id: str, body: Any, **headers: str | None) -> Answer:
        """As the page does it; a header that is None is left out."""
        sent = {
            "Origin": self.origin, "Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json", **headers
        }  # fmt: skip
        encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
        kept = {name: value for name, value in sent.items() if value is not None}
        return self.ask(f"/api/runs/{run_id}/set", "POST", encoded, **kept)

    @contextmanager
    def follow(self, query: str = "", **headers: str) -> Iterator[Events]:
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG_S)
        try:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            line.request("GET", f"/api/events{query}", headers=sent)
            yield Events(line.getresponse())
        finally:
            line.close()


class Events:
    """The events of a stream, one after another."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.response = response
        self.last_id = ""

    def next(self) -> tuple[str, Any]:
        """Name and value; a comment is ("", its words)."""
        name, value = "", None
        while True:
            line = self.response.readline()
            assert line, "the stream has ended"
            field, _, text = line.decode().rstrip("\n").partition(": ")
            if field == "event":
                name = text
            elif field == "id":
                self.last_id = text
            elif field == "data":
                value = json.loads(text, parse_constant=lambda text: 1 / 0)
            elif line == b"\n":
                return name, value
            elif not name and value is None:
                value = text

    def until(self, wanted: str, *, holds: Callable[[Any], bool] = lambda _: True) -> tuple[Any, list[str]]:
        """The first event of that name that will do, and the names of those before it."""
        passed: list[str] = []
        deadline_s = time.monotonic() + LONG_S
        while time.monotonic() < deadline_s:
            name, value = self.next()
            if name == wanted and holds(value):
                return value, passed
            passed.append(name)
        raise AssertionError(f"no {wanted} within {LONG_S:.0f} s, but {passed[-20:]}")


@contextmanager
def serve(
    home: Path, *, host: str = "127.0.0.1", every_s: float = 0.05, unread_ms: int = 60_000,
    patience_s: float = 10.0,
) -> Iterator[Served]:  # fmt: skip
    listener = socket.create_server((host, 0))
    access = Access.to(host, listener.getsockname()[0], TOKEN)
    server = PageServer(
        listener=listener, home=home, access=access, every_s=every_s, unread_ms=unread_ms, patience_s=patience_s
    )
    port = listener.getsockname()[1]
    thread = threading.Thread(target=server.run, name="page-server")
    thread.start()
    try:
        yield Served(server, port)
    finally:
        server.stop()
        thread.join(LONG_S)
        assert not thread.is_alive(), "the server does not end"


class FakeTraining:
    """Answers on a run's socket as a training would; counts what it was asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked: list[dict[str, Any]] = []
        self.is_silent = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._thread = threading.Thread(target=self._serve, name="fake-training")
        self._thread.start()

    def close(self) -> None:
        # Closing alone would not wake the thread that waits there.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(LONG_S)
        self.path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            with line, line.makefile("rwb") as file:
                message = json.loads(file.readline())
                self.asked.append(message)
                if not self.is_silent:
                    file.write(json.dumps(self._answer(message)).encode() + b"\n")

    @staticmethod
    def _answer(message: dict[str, Any]) -> dict[str, Any]:
        if message["do"] == "state":
            return {"ok": True, "state": {"step": 7, "figures": {"odd": float("nan")}, "loaders": [{"name": "train"}]}}
        if message.get("workers", 0) > 64:
            return {"ok": False, "why": f"workers={message['workers']} is more than 64"}
        return {"ok": True, "now": {"loader": "train", "workers": message.get("workers")}}
