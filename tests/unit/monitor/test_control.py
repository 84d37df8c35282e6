"""The control socket: no client can hold up the thread that answers."""

from __future__ import annotations

import json
import selectors
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.monitor.control import server as control
from penstock.monitor.control.server import LONGEST_MESSAGE_BYTES, Control

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no unix sockets")


class Served:
    """A control socket whose events are handled when a test says so."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "socket"
        self.selector = selectors.DefaultSelector()
        self.control = Control(self.path, self.selector, self.answer)

    @staticmethod
    def answer(message: Any) -> dict[str, Any]:
        if message == "refuse":
            raise ConfigError("workers=-1 is not a number")
        if message == "break":
            raise RuntimeError("engine trouble")
        return {"ok": True, "echo": message}

    def handle(self) -> None:
        """Handle every event that waits."""
        while events := self.selector.select(0.02):
            for key, mask in events:
                key.data(mask)

    def connect(self) -> socket.socket:
        line = socket.socket(socket.AF_UNIX)
        line.connect(str(self.path))
        line.settimeout(2.0)
        return line

    def ask(self, line: socket.socket, sent: bytes) -> Any:
        line.sendall(sent)
        self.handle()
        return json.loads(line.recv(1 << 20))


@pytest.fixture
def served(home: Path) -> Iterator[Served]:
    served = Served(home)
    yield served
    served.control.close()
    served.selector.close()
    assert not served.path.exists()


def test_only_this_user_can_open_it(served: Served) -> None:
    assert stat.S_IMODE(served.path.stat().st_mode) == 0o600


def test_answers_refusals_and_failures_are_all_answers(served: Served) -> None:
    with served.connect() as line:
        assert served.ask(line, b'{"do": "x"}\n') == {"ok": True, "echo": {"do": "x"}}
        assert served.ask(line, b'"refuse"\n') == {"ok": False, "why": "workers=-1 is not a number"}
        assert served.ask(line, b'"break"\n') == {
            "ok": False,
            "why": "the request failed: RuntimeError('engine trouble')",
        }
        for garbage in (b"\x00\xff\xfe\n", b"{\n", b"[" * 5000 + b"\n", b"\n"):
            assert served.ask(line, garbage) == {"ok": False, "why": "the message is not JSON"}
        assert served.ask(line, b'{"still": "here"}\n')["ok"]


def test_a_message_that_never_ends_is_refused_and_its_connection_closed(served: Served) -> None:
    with served.connect() as line:
        line.setblocking(False)
        sent = 0
        with pytest.raises(BrokenPipeError):
            while sent < 100 << 20:
                try:
                    sent += line.send(b"x" * 65536)
                except BlockingIOError:
                    served.handle()
        assert sent < 20 * LONGEST_MESSAGE_BYTES
        line.settimeout(2.0)
        assert json.loads(line.recv(4096))["why"] == f"the message has more than {LONGEST_MESSAGE_BYTES:,} bytes"


def test_a_client_that_does_not_read_its_answers_is_dropped(served: Served) -> None:
    with served.connect() as line, served.connect() as other:
        line.setblocking(False)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(10_000):
                try:
                    line.send(json.dumps("y" * 30_000).encode() + b"\n")
                except BlockingIOError:
                    served.handle()
        assert served.ask(other, b"1\n") == {"ok": True, "echo": 1}


def test_thousands_of_messages_at_once_are_refused(served: Served) -> None:
    with served.connect() as line:
        assert "messages at once" in served.ask(line, b"1\n" * 5000)["why"]


def test_silent_clients_are_closed_after_a_while_and_do_not_lock_out_others(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = []
    for _ in range(40):
        silent.append(served.connect())
        served.handle()
    with served.connect() as line:
        assert served.ask(line, b"1\n")["ok"]
        monkeypatch.setattr(control, "_PATIENCE_S", -1.0)
        served.control.close_silent()
        assert all(each.recv(10) == b"" for each in silent)
    for each in silent:
        each.close()
