"""`penstock dash` as a process: beside a real training, started, refused and ended as users do it."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.monitor.runs.format import RunOutcome
from support.commands import RunHere
from support.recorded_runs import begin_run, fill

LONG_S = 120.0
TRAINING = """
import time, torch, penstock
class Frames(torch.utils.data.Dataset):
    def __len__(self): return 1_000_000
    def __getitem__(self, index):
        time.sleep(0.002); return torch.zeros(64)
loader = penstock.DataLoader(Frames(), 8, num_workers=1, memory="64MB", name="train")
with penstock.Monitor(loader, every=None, run="frames") as monitor:
    for number, batch in enumerate(loader):
        monitor.step()
        if number == 0: print("up", flush=True)
"""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ps-"))
    monkeypatch.setenv("PENSTOCK_HOME", str(folder))
    monkeypatch.delenv("PENSTOCK_DASH_TOKEN", raising=False)
    yield folder
    shutil.rmtree(folder)


class Dash:
    """A server that runs, and what it printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr and process.stderr.read()
        self.printed: dict[str, Any] = json.loads(line)
        self.port: int = self.printed["port"]
        self.token: str = self.printed["token"]

    def line(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG_S)

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        """As the page does; with a body, a change."""
        headers = {"Authorization": f"Bearer {self.token}"}
        if body is not None:
            headers |= {"Origin": f"http://127.0.0.1:{self.port}", "Content-Type": "application/json"}
        line = self.line()
        try:
            line.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
            answer = line.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            line.close()

    def end(self, number: int) -> tuple[int, str]:
        """Exit status and stderr."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=LONG_S)
        assert out == ""
        return self.process.returncode, err


@contextmanager
def dash(*arguments: str, **environment: str) -> Iterator[Dash]:
    command = [sys.executable, "-m", "penstock", "dash", "--json", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    try:
        yield Dash(process)
    finally:
        process.kill()
        process.communicate()


def until(response: http.client.HTTPResponse, wanted: str, holds: Callable[[Any], bool]) -> Any:
    name, deadline_s = "", time.monotonic() + LONG_S
    while time.monotonic() < deadline_s:
        field, _, text = response.readline().decode().rstrip("\n").partition(": ")
        if field == "event":
            name = text
        elif field == "data" and name == wanted and holds(value := json.loads(text)):
            return value
    raise AssertionError(f"no {wanted} that will do within {LONG_S:.0f} s")


def test_a_training_is_followed_and_changed_until_it_is_killed(home: Path) -> None:
    training = subprocess.Popen([sys.executable, "-c", TRAINING], stdout=subprocess.PIPE, text=True)
    try:
        assert training.stdout is not None and training.stdout.readline() == "up\n"
        with dash("frames", "--port", "0") as page:
            run_id = page.printed["run"]
            assert page.printed["url"] == f"http://127.0.0.1:{page.port}/#token={page.token}&run={run_id}"
            line = page.line()
            line.request("GET", f"/api/events?run={run_id}")
            stream = line.getresponse()
            until(stream, "live", lambda state: state.get("loaders") and len(state["loaders"][0]["workers"]) == 1)
            status, answer = page.ask(f"/api/runs/{run_id}/set", {"loader": "train", "workers": 2})
            assert status == 200 and answer["now"]["workers"] == 2
            until(stream, "live", lambda state: state.get("loaders") and len(state["loaders"][0]["workers"]) == 2)
            until(stream, "points", lambda points: points["figures"]["loader.0.workers"][-1] == 2)
            notes = page.ask(f"/api/runs/{run_id}")[1]["journal"]
            assert any("workers 1 -> 2" in note["what"] for note in notes if note["who"] == "page"), notes
            status, answer = page.ask(f"/api/runs/{run_id}/set", {"memory": "900TB"})
            assert status == 409 and "900TB is more than" in answer["why"]
            training.kill()
            assert until(stream, "ended", lambda _: True)["state"] == "killed"
            line.close()
            status, answer = page.ask(f"/api/runs/{run_id}/set", {"workers": 1})
            assert status == 409 and "is over (killed)" in answer["why"]
    finally:
        training.kill()
        training.communicate()


def test_it_ends_by_signal_with_streams_open_and_its_port_is_free_again(home: Path, run_here: RunHere) -> None:
    now_s = time.time()
    record = begin_run(home, "x" * 20_000, started_s=now_s - 1500)
    fill(record, 1500, ended_s=now_s)
    record.finish(RunOutcome(state="finished", t_s=now_s))
    port = 0
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with dash("--port", str(port)) as page, socket.socket() as deaf:
            assert port in (0, page.port), "the same port at once, after a server with open connections"
            port = page.port
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", port))
            for _ in range(5):
                deaf.sendall(f"GET /api/runs/{record.id}/points HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            line = page.line()
            line.request("GET", f"/api/events?run={record.id}", headers={"Authorization": f"Bearer {page.token}"})
            until(line.getresponse(), "ended", lambda _: True)
            taken = run_here("dash", "--port", str(port))
            assert taken.returncode == 1 and f"port {port} of 127.0.0.1 is in use" in taken.stderr
            assert "--port 0" in taken.stderr and taken.stdout == ""
            # Without a limit for the unread answer this would time out.
            found_status, err = page.end(number)
            line.close()
            assert found_status == status and err.strip() == "", "no traceback, and nothing of the token"
    assert sorted(path.name for path in home.iterdir()) == ["runs"]


def test_the_token_is_kept_where_the_user_says(home: Path) -> None:
    file = home / "token"
    with dash("--port", "0", "--token-file", str(file)) as page:
        token = page.token
        assert file.read_text() == f"{token}\n" and file.stat().st_mode & 0o777 == 0o600
        assert len(token) >= 40 and page.ask("/api/runs")[0] == 200
    with dash("--port", "0", "--token-file", str(file), PENSTOCK_DASH_TOKEN="another") as page:
        assert page.token == token
    chosen = "a+b/c=~._-0123456789"
    with dash("--port", "0", "--host", "0.0.0.0", PENSTOCK_DASH_TOKEN=chosen) as page:
        assert page.token == chosen and page.printed["url"].endswith("/#token=a%2Bb%2Fc%3D~._-0123456789")
        assert page.ask("/api/runs")[0] == 200
        line = page.line()
        line.request("GET", "/api/runs")
        assert line.getresponse().status == 401
        line.close()
        _, err = page.end(signal.SIGTERM)
        assert "other machines can reach" in err and "encrypted" in err and chosen not in err


def test_a_browser_is_opened_without_the_token_on_its_command_line(home: Path) -> None:
    browser, seen = home / "browser", home / "seen"
    browser.write_text(f'#!/bin/sh\n{{ echo "$@"; cat "${{1#file://}}"; echo end; }} > {seen}\n')
    browser.chmod(0o700)
    (home / "tmp").mkdir()
    with dash("--port", "0", "--open", BROWSER=f"{browser} %s", TMPDIR=str(home / "tmp")) as page:
        deadline_s = time.monotonic() + LONG_S
        while not (seen.exists() and seen.read_text().endswith("end\n")):
            assert time.monotonic() < deadline_s, "no browser was started"
            time.sleep(0.02)
        arguments, content, _ = seen.read_text().splitlines()
        assert page.token not in arguments and page.printed["url"] in content
        assert page.end(signal.SIGINT)[0] == 130
    assert list((home / "tmp").iterdir()) == []


def test_an_error_is_one_line(home: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    loose = home / "loose"
    loose.write_text("a-token-that-is-long-enough")
    loose.chmod(0o644)
    short = home / "short"
    short.write_text("short")
    short.chmod(0o600)
    wrongs = [
        (["nobody"], "no run in"),
        (["--host", "no.such.host.invalid"], "is not an address"),
        (["--host", "192.0.2.1"], "not an address of this machine"),
        (["--token-file", str(loose)], "chmod 600"),
        (["--token-file", str(home)], "--token-file"),
        (["--token-file", str(home / "none" / "token")], "cannot be used"),
        (["--host", "0.0.0.0", "--token-file", str(short)], "can be guessed"),
        # Other users of the machine can guess as well.
        (["--token-file", str(short)], "can be guessed by other users"),
    ]
    for arguments, why in wrongs:
        found = run_here("dash", "--port", "0", *arguments)
        assert found.returncode in (1, 2) and why in found.stderr and found.stdout == "", found
    assert run_here("dash", "--port", "65536").returncode == 2
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "starlette" else real(name))
    found = run_here("dash", "--port", "0")
    assert found.returncode == 1 and found.stderr.count("\n") == 1
    assert 'needs starlette, which is not installed; run: pip install "penstock[dash]"' in found.stderr


def test_it_does_not_import_torch(home: Path) -> None:
    code = (
        "import sys, penstock.cli.dash, penstock.web.server, penstock.monitor.export.prometheus;"
        "from penstock.cli.app import run; run(['dash', 'nobody']);"
        "sys.exit(3 if {'torch', 'numpy'} & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_a_dashboard_for_grafana_is_printed_without_a_server(run_here: RunHere) -> None:
    done = run_here("dash", "--grafana")
    assert done.returncode == 0 and json.loads(done.stdout)["panels"]


def test_the_help_says_who_can_read_and_puts_no_token_on_a_command_line(run_here: RunHere) -> None:
    said = " ".join(run_here("dash", "--help").stdout.split())
    assert "other users of this machine can read the figures but change nothing" in said
    assert "curl -H @FILE" in said and "$TOKEN" not in said
