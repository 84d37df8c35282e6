"""Alerts of a run act, and whatever becomes of an action, the training does not notice."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.client import InvalidURL
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import penstock
from penstock.errors import ConfigError
from penstock.monitor.alerts.actions import ActionRunner
from penstock.monitor.alerts.rules import AlertRule, Command, GiveBack, Log, Webhook
from penstock.monitor.runs.reader import open_run

FACTS = {"alert": "memory", "state": "raised", "text": "memory is full", "value": 9.5, "run": "r1", "pid": 7}
NOW: dict[str, Any] = {"for_s": 0, "calm_s": 0}
FULL: dict[str, Any] = {"on": "memory", "at": "1MB", **NOW}
"""A machine always has this in use."""


def wait_until(condition: Callable[[], Any], within_s: float = 15.0) -> Any:
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "did not happen"
        time.sleep(0.02)
    return found


class Heard:
    """What is told, and a performer that tells it."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.performer = ActionRunner(self.said.append)

    def outcome(self) -> str:
        return wait_until(lambda: self.said)[-1]


@pytest.fixture
def heard() -> Iterator[Heard]:
    found = Heard()
    yield found
    found.performer.close(0.0)


class Hook:
    """A server on this machine that keeps what it is sent; ``status`` is what it answers, None: nothing, ever."""

    def __init__(self, status: int | None) -> None:
        self.received: list[dict[str, Any]] = []
        self.ended = threading.Event()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.received.append(json.loads(body))
                if status is None:
                    hook.ended.wait(30)
                    return
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.end_headers()

            def log_message(self, format: str, *_: Any) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/secret"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.ended.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def hook(request: pytest.FixtureRequest) -> Iterator[Hook]:
    found = Hook(request.param)
    yield found
    found.close()


def test_a_command_gets_the_facts_and_none_of_the_trainings_files(heard: Heard, tmp_path: Path) -> None:
    open_here = os.open(tmp_path / "held", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(open_here, True)
    code = (
        "import json, os, sys; names = [os.readlink(f'/proc/self/fd/{n}') for n in (0, 1, 2)];"
        "facts = {k: v for k, v in os.environ.items() if k.startswith('PENSTOCK_') and k != 'PENSTOCK_HOME'};"
        f"held = os.path.exists('/proc/self/fd/{open_here}');"
        "open(sys.argv[1], 'w').write(json.dumps([facts, names, held, os.getsid(0) == os.getpid()]))"
    )
    heard.performer.perform(Command(command=[sys.executable, "-c", code, str(tmp_path / "out")]), FACTS)
    assert heard.outcome().endswith(": done")
    os.close(open_here)
    facts, names, is_held, has_own_session = json.loads((tmp_path / "out").read_text())
    assert facts == {
        "PENSTOCK_ALERT": "memory", "PENSTOCK_ALERT_TEXT": "memory is full", "PENSTOCK_ALERT_VALUE": "9.5",
        "PENSTOCK_RUN": "r1", "PENSTOCK_PID": "7",
    }  # fmt: skip
    assert names == ["/dev/null"] * 3 and not is_held and has_own_session


def test_a_line_goes_to_the_shell_and_its_failure_is_reported(heard: Heard) -> None:
    heard.performer.perform(Command(command='test "$PENSTOCK_ALERT" = memory && exit 3'), FACTS)
    assert heard.outcome().endswith("failed with status 3")
    heard.said.clear()
    heard.performer.perform(Command(command=["/nonexistent/program"]), FACTS)
    assert "failed: FileNotFoundError" in heard.outcome()


def test_a_command_that_hangs_is_killed_with_its_children(heard: Heard, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    heard.performer.perform(Command(command=f"sleep 60 & echo $! > {file}; wait", within_s=0.5), FACTS)
    assert heard.outcome().endswith("killed after 0.5 s, its time limit")
    child = int(file.read_text())
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def test_closing_ends_commands_in_progress_without_waiting_for_them(heard: Heard) -> None:
    heard.performer.perform(Command(command="trap '' TERM; sleep 1000", within_s=1000), FACTS)
    (process,) = wait_until(lambda: list(heard.performer._commands))
    heard.performer.close(0.1)
    # It was killed: a close() that had waited for the command would have run into the time limit of the test.
    assert process.wait(60) == -9


def test_actions_that_never_end_do_not_accumulate(heard: Heard) -> None:
    for _ in range(6):
        heard.performer.perform(Command(command="sleep 60"), FACTS)
    assert [said.partition(": ")[2] for said in heard.said] == ["not started, 4 earlier actions are still running"] * 2


@pytest.mark.parametrize("hook", [204], indirect=True)
def test_a_webhook_gets_json(hook: Hook, heard: Heard) -> None:
    heard.performer.perform(Webhook(url=hook.url), FACTS)
    assert heard.outcome() == "webhook to 127.0.0.1: answered 204"
    assert hook.received == [FACTS]


@pytest.mark.parametrize(
    ("hook", "said"), [(500, "answered 500"), (302, "answered 302"), (None, "timed out")], indirect=["hook"]
)
def test_a_webhook_that_refuses_redirects_or_hangs_is_reported(hook: Hook, said: str, heard: Heard) -> None:
    heard.performer.perform(Webhook(url=hook.url, within_s=0.3), FACTS)
    assert "failed: " in heard.outcome() and said in heard.said[-1] and "secret" not in heard.said[-1]


class Frames(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64,), float(index))


def test_an_alert_is_logged_recorded_and_its_actions_are_in_the_journal(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = [
        AlertRule(**FULL, then=[Log(), Command(command="exit 0")]),
        AlertRule(on="stall", at=1.0, then=[Log()]),
        AlertRule(on="tree", at=10**15, **NOW),
    ]
    with penstock.Monitor(every=None, alerts=rules), open_run(home, "last") as run:
        (alert,) = wait_until(run.alerts)
        assert (alert.rule, alert.state) == ("memory", "raised") and alert.details["threshold"] == 1e6
        assert alert.details["actions"] == ["command exit 0"] and alert.details["value"] > 1e6
        wait_until(lambda: any(note.kind == "action" and "done" in note.what for note in run.journal()))
        points = len(run.points())
        wait_until(lambda: len(run.points()) > points)
        assert len(run.alerts()) == 1, "once per crossing, not per point"
    assert [line for line in caplog.messages if "ALERT" in line] == [f"ALERT: {alert.what}"]


def test_memory_is_released_step_by_step_while_the_alert_is_raised(home: Path) -> None:
    loader = penstock.DataLoader(Frames(), 4, num_workers=2, memory="64MB")
    loader.resize(depth=3)
    rule = AlertRule(**FULL, then=[GiveBack(every_s=1)])
    with loader, penstock.Monitor(loader, every=None, alerts=[rule]), open_run(home, "last") as run:
        batches = iter(loader)
        seen = [int(next(batches)[0, 0])]

        def is_given_back() -> bool:
            seen.append(int(next(batches)[0, 0]))
            return any("nothing is left" in note.what for note in run.journal())

        wait_until(is_given_back)
        notes = [note for note in run.journal() if note.who == "alert"]
        assert [note.what.partition(": ")[2] for note in notes if note.kind == "resize"] == [
            "depth 3 -> 2", "depth 2 -> 1", "workers 2 -> 1",
        ]  # fmt: skip
        assert loader.num_workers == 1 and loader.stats().depth == 1
        assert seen == list(range(0, 4 * len(seen), 4)), "the same batches in the same order"


@pytest.mark.parametrize("hook", [None], indirect=True)
def test_actions_that_hang_do_not_slow_the_training(hook: Hook, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    rules = [
        AlertRule(**FULL, then=[Command(command="sleep 1000", within_s=1000), Webhook(url=hook.url, within_s=1000)])
    ] * 2
    with penstock.Monitor(every=None, alerts=rules) as monitor, open_run(home, "last") as run:
        wait_until(lambda: len(hook.received) >= 1 and len(run.alerts()) == 2)
        before = len(run.points())
        # A step, or the end of the run, that waited for an action would run into the time limit of the test.
        for _ in range(100_000):
            monitor.step()
        wait_until(lambda: len(run.points()) > before)
    assert not [each for each in psutil.Process().children(recursive=True) if "sleep" in each.name()]


@pytest.mark.parametrize("alerts", [["memory"], [None], {"memory": 0.9}])
def test_alerts_that_are_not_rules_are_refused(home: Path, alerts: Any) -> None:
    with pytest.raises(ConfigError, match="AlertRule"):
        penstock.Monitor(alerts=alerts)


class SlowHook:
    """A server that sends its answer a byte at a time, without end."""

    def __init__(self) -> None:
        self.received = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(15)
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            line, _ = self._listener.accept()
            with line:
                self.received = line.recv(1 << 16)
                line.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                while not self._ended.wait(0.05):
                    line.sendall(b"x")


def test_a_webhook_whose_answer_comes_a_byte_at_a_time_ends_in_time(heard: Heard) -> None:
    hook = SlowHook()
    try:
        heard.performer.perform(Webhook(url=f"http://me:p%40ss@127.0.0.1:{hook.port}/secret", within_s=0.4), FACTS)
        assert heard.outcome() == "webhook to 127.0.0.1: failed: timed out, no complete answer within 0.4 s"
    finally:
        hook.close()
    assert f"Authorization: Basic {base64.b64encode(b'me:p@ss').decode()}".encode() in hook.received
    assert f"Host: 127.0.0.1:{hook.port}\r\n".encode() in hook.received


def test_no_failure_of_a_webhook_tells_its_address(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    heard.performer.perform(Webhook(url=f"http://127.0.0.1:{port}/secret"), FACTS)
    assert heard.outcome() == "webhook to 127.0.0.1: failed: Connection refused"
    heard.said.clear()
    heard.performer.perform(Webhook(url=f"https://user:secret@127.0.0.1:{port}/secret"), FACTS)
    assert heard.outcome() == "webhook to 127.0.0.1: failed: Connection refused"
    heard.said.clear()

    def fail(*_: object, **__: object) -> None:
        raise InvalidURL("URL can't contain control characters. '/secret token'")

    monkeypatch.setattr("urllib.request.OpenerDirector.open", fail)
    heard.performer.perform(Webhook(url=f"http://127.0.0.1:{port}/secret"), FACTS)
    assert heard.outcome() == "webhook to 127.0.0.1: failed: InvalidURL"
