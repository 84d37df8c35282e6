"""`penstock watch` on real processes that grow, shrink and end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.monitor.runs.format import RunOutcome
from support.recorded_runs import begin_run, point_at
from support.terminals import Terminal

WATCH = [sys.executable, "-m", "penstock", "watch"]
GROWS = """
import mmap, os, sys
held = None
print("up", flush=True)
for line in sys.stdin:
    mb = int(line)
    more = mmap.mmap(-1, mb << 20)
    for place in range(0, mb << 20, 4096): more[place] = 1
    if held is not None: held.close()
    held = more
    print("has", mb, flush=True)
"""


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ps-"))
    monkeypatch.setenv("PENSTOCK_HOME", str(folder))
    yield folder
    shutil.rmtree(folder)


class Growing:
    """A process that holds a given number of megabytes."""

    def __init__(self) -> None:
        self.marker = f"growing-{uuid.uuid4().hex}"  # these tests may run in parallel
        command = [sys.executable, "-S", "-c", GROWS, self.marker]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "up\n"

    def hold(self, mb: int) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{mb}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"has {mb}\n"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def growing() -> Iterator[Growing]:
    found = Growing()
    yield found
    found.end()


def watch(*arguments: str, status: int = 0) -> str:
    done = subprocess.run([*WATCH, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr + done.stdout
    return done.stdout if status in (0, 1) and done.stdout else done.stderr


class Following:
    """A running watch and the lines it has printed."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*WATCH, "--json", "--every", "0.1", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def next(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return json.loads(line)


@pytest.fixture
def received() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", bodies
    server.shutdown()
    server.server_close()


def wait_until(condition: Callable[[], Any], within_s: float = 120.0) -> Any:
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "did not happen"
        time.sleep(0.02)
    return found


def test_a_growing_process_raises_one_alert_clears_it_and_its_end_ends_the_watch(
    growing: Growing, tmp_path: Path, received: tuple[str, list[dict[str, Any]]]
) -> None:
    url, bodies = received
    note = f'echo "$PENSTOCK_ALERT $PENSTOCK_ALERT_VALUE $PENSTOCK_PID" >> {tmp_path / "notes"}'
    pid = str(growing.process.pid)
    following = Following("--pid", pid, "--above", "100MiB", "--run", note, "--webhook", url)
    growing.hold(150)
    raised = following.next()
    assert (raised["state"], raised["alert"], raised["pid"]) == ("raised", "tree", int(pid))
    assert 100 << 20 <= raised["value"] < 190 << 20 and raised["threshold"] == 100 << 20
    assert f"process {pid} has 1" in raised["text"] and "alert at 100 MiB" in raised["text"]
    growing.hold(160)
    growing.hold(10)
    assert following.next()["state"] == "cleared", "once per crossing"
    growing.hold(130)
    assert following.next()["state"] == "raised"
    growing.end()
    ended = following.next()
    if ended["state"] == "cleared":  # sampled while the kernel freed its memory
        ended = following.next()
    assert (ended["state"], ended["text"]) == ("ended", f"process {pid} has ended")
    assert following.process.wait(30) == 0
    notes = (tmp_path / "notes").read_text().split("\n")[:-1]
    assert len(notes) == 2 and notes[0] == f"tree {raised['value']} {pid}"
    assert [body["state"] for body in bodies][:3] == ["raised", "cleared", "raised"]
    following.process.communicate()


def test_a_peak_shorter_than_the_for_option_raises_no_alert(growing: Growing) -> None:
    following = Following("--pid", str(growing.process.pid), "--above", "100MiB", "--for", "60")
    assert following.process.stderr is not None
    assert "watching, process" in following.process.stderr.readline()
    growing.hold(150)
    time.sleep(0.5)
    growing.end()
    assert following.next()["state"] == "ended"
    following.process.communicate()


def test_a_pattern_finds_the_training_and_not_the_watch_itself(growing: Growing) -> None:
    line = f"{sys.executable} -m penstock watch --match {growing.marker} --above 50MiB --once --json; exit $?"
    growing.hold(80)
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    seen = json.loads(done.stdout)
    assert seen["figures"]["processes"] == 1 and seen["alerts"][0]["alert"] == "tree"
    truth = psutil.Process(growing.process.pid).memory_full_info().pss
    assert seen["figures"]["tree_bytes"] == pytest.approx(truth, rel=0.05)
    growing.end()
    assert "no process matches" in watch("--match", growing.marker, "--above", "1GB", status=1)


def test_without_a_process_or_run_the_machine_is_watched() -> None:
    total = psutil.virtual_memory().total
    assert watch("--above", "1MB", "--once", status=1).startswith("ALERT memory in use is ")
    assert "; alert at 99.9%" in watch("--above", "99.9%", "--once")
    seen = json.loads(watch("--above", "99.9%", "--swap-growth", "1GB", "--every", "0.1", "--once", "--json"))
    assert 0 < seen["figures"]["used_bytes"] < seen["figures"]["limit_bytes"] <= total and seen["alerts"] == []


def test_a_run_is_watched_by_its_record_until_it_ends(home: Path) -> None:
    record = begin_run(home, "train [red]")
    record.write([point_at(time.time(), 1)])
    assert "has 6.02 GiB of 16.0 GiB" in watch("train [red]", "--above", "6GiB", "--once", status=1)
    following = Following("last", "--above", "6GiB")
    raised = following.next()
    assert raised["run"] == record.id and raised["state"] == "raised"
    record.finish(RunOutcome(state="failed", t_s=time.time(), what="RuntimeError: \x1b[31mx"))
    assert following.next()["text"] == f"run {record.id} has ended: failed, RuntimeError: [31mx"
    assert following.process.wait(30) == 0
    following.process.communicate()
    assert "nothing is left to watch" in watch("last", "--above", "1GB", status=1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_terminal_has_a_status_line_and_the_end_of_the_watch_ends_its_commands(number: int, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    hangs = f"echo $$ > {file}; exec sleep 60"
    env = {**os.environ, "TERM": "dumb"}
    with Terminal([*WATCH, "--above", "1MB", "--every", "0.2", "--run", hangs], env) as terminal:
        terminal.wait_for(r"ALERT memory in use is [^\n]+\n")
        shown = terminal.wait_for(r"\d\d:\d\d:\d\d ! memory in use \S+ [MG]iB of .*; alert at 1MB")
        assert "\x1b" not in terminal.raw
        wait_until(lambda: file.exists() and file.read_text())
        if number == signal.SIGINT:
            terminal.press("\x03")
        else:
            terminal.process.terminate()
        assert terminal.wait() == (130 if number == signal.SIGINT else 143)
        assert "Traceback" not in terminal.raw and all(len(line) < 80 for line in shown.split("\r"))
    wait_until(lambda: not psutil.pid_exists(int(file.read_text())))


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["--every", "5"], ["--above", "much"], ["--above", "auto"], ["--above", "1GB", "--every", "0"],
        ["--above", "1GB", "--pid", "1", "--match", "x"],
        ["last", "--pid", "1", "--above", "1GB"], ["--above", "1GB", "--match", "("], ["--swap-growth", "5%"],
        ["--above", "1GB", "--webhook", "file:///etc/passwd"], ["--above", "1GB", "--run", " "],
    ],
)  # fmt: skip
def test_wrong_usage_is_status_2(arguments: list[str]) -> None:
    from click.testing import CliRunner

    from penstock.cli.watch.command import command

    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 2, done.output


def test_a_missing_run_or_process_is_one_line() -> None:
    assert watch("--pid", "4194304", "--above", "1GB", status=1).count("\n") == 1
    assert "no run" in watch("nobody", "--above", "1GB", status=1)


def test_the_watch_does_not_import_torch() -> None:
    code = (
        "import sys; from penstock.cli.app import run; run(['watch', '--above', '99%', '--once']);"
        "sys.exit(3 if {'torch', 'numpy'} & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
