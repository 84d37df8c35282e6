"""Runs recorded by real processes that are killed, fill their disk, fork, or end without a word."""

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
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock.monitor.runs.reader import list_runs, open_run

WRITER = """
import os, sys, time
from pathlib import Path
from support.recorded_runs import begin_run, point_at
record = begin_run(Path(os.environ["PENSTOCK_HOME"]), f"writer {sys.argv[1]}")
began_s, written = time.time(), 0
ends_s = began_s + float(sys.argv[2])
while time.time() < ends_s:
    record.write([point_at(time.time(), written)], totals={"t_s": time.time(), "step": float(written)})
    written += 1
    print(written, flush=True)
    time.sleep(0.02)
record.__exit__(None, None, None)
"""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ps-"))
    monkeypatch.setenv("PENSTOCK_HOME", str(folder))
    yield folder
    shutil.rmtree(folder)


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(code: str, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    return done


class Reader:
    """Reads every run over and over, as lists, pages and reports do, and keeps the problems."""

    def __init__(self, home: Path) -> None:
        self._home, self._ended = home, threading.Event()
        self.problems: list[str] = []
        self.rounds = 0
        self._seen: dict[str, int] = {}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not self._ended.is_set():
            try:
                for summary in list_runs(self._home):
                    with open_run(self._home, summary.id) as found:
                        steps = [point.figures["step"] for point in found.points()]
                    if steps != sorted(steps) or len(steps) < self._seen.get(summary.id, 0):
                        self.problems.append(f"{summary.id}: points are missing or out of order")
                    self._seen[summary.id] = len(steps)
                self.rounds += 1
            except Exception as problem:
                self.problems.append(repr(problem))
            self._ended.wait(0.05)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def test_eight_runs_and_five_readers_lose_nothing_when_one_writer_is_killed(home: Path) -> None:
    # The victim runs until it is killed.
    writers = [start(WRITER, str(number), "600" if number == 3 else "3") for number in range(8)]
    readers = [Reader(home) for _ in range(5)]
    victim = writers[3]
    assert victim.stdout is not None and victim.stderr is not None
    lines = [victim.stdout.readline() for _ in range(40)]
    victim.send_signal(signal.SIGKILL)
    # communicate() would miss lines that readline() has buffered.
    with victim:
        printed_by_victim = "".join(lines) + victim.stdout.read(), victim.stderr.read()
    printed = [printed_by_victim if each is victim else each.communicate(timeout=60) for each in writers]
    for reader in readers:
        reader.end()
    assert [problem for reader in readers for problem in reader.problems] == []
    assert all(reader.rounds > 3 for reader in readers)
    assert [error for _, error in printed] == [""] * 8
    runs = {summary.name: summary for summary in list_runs(home)}
    for number, (output, _) in enumerate(printed):
        written = int(output.split()[-1])
        summary = runs[f"writer {number}"]
        assert summary.state == ("killed" if number == 3 else "finished")
        with open_run(home, summary.id) as found:
            points = found.points(most=10**6)
            # The killed writer may have recorded a point whose number it did not print.
            assert len(points) - written in ((0, 1) if number == 3 else (0,))
            assert [point.figures["step"] for point in points] == [20.0 * each for each in range(len(points))]


TRAINING = """
import sys, time
import penstock
{before}
monitor = penstock.Monitor(every=10, run="training")
for _ in range(20):
    time.sleep(0.005)
    monitor.step()
{after}
"""


@pytest.mark.parametrize(
    ("after", "status", "state", "what"),
    [
        ("", 0, "finished", None),
        ("raise ValueError('loss is NaN')", 1, "failed", "ValueError: loss is NaN"),
        ("import os; os.kill(os.getpid(), 9)", -9, "killed", None),
    ],
)
def test_a_monitor_that_is_not_closed_records_how_the_program_ended(
    home: Path, after: str, status: int, state: str, what: str | None
) -> None:
    done = run(TRAINING.format(before="", after=after), status=status)
    assert "[Step 20] Memory - Process: " in done.stderr
    (summary,) = list_runs(home)
    assert (summary.state, summary.what) == (state, what)
    # What came since the last point, a second before, goes with a killed process.
    assert summary.step == (0 if state == "killed" else 20)


def test_a_forked_child_that_ends_normally_does_not_affect_the_run(home: Path) -> None:
    after = """
import os
pid = os.fork()
if pid == 0:
    monitor.step(); monitor.log("child")
    sys.exit(0)   # runs exit handlers, frees everything
assert os.waitpid(pid, 0)[1] == 0
monitor.log("parent")
"""
    run(TRAINING.format(before="", after=after))
    with open_run(home, "last") as found:
        assert found.state == "finished" and [note.what for note in found.journal()] == ["parent"]


def test_a_folder_that_is_removed_stops_recording_and_not_training(home: Path) -> None:
    after = """
import os, shutil
shutil.rmtree(os.environ["PENSTOCK_HOME"])
for _ in range(12):
    monitor._recorder.tick()
print("trained")
"""
    done = run(TRAINING.format(before="", after=after))
    assert done.stdout == "trained\n" and done.stderr.count("recording of this run has stopped, training goes on") == 1
    assert "Traceback" not in done.stderr
    home.mkdir()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root to mount a small tmpfs")
def test_a_full_disk_stops_recording_and_not_training(home: Path) -> None:
    after = """
import errno, json, os
from pathlib import Path
with open(os.environ["PENSTOCK_HOME"] + "/filler", "wb", buffering=0) as filler:
    try:
        while True:
            filler.write(bytes(4096))
    except OSError as full:
        assert full.errno == errno.ENOSPC
for _ in range(200):
    monitor.step()
    monitor._recorder.tick()
monitor.close()
from penstock.monitor.runs.reader import list_runs, open_run
(summary,) = list_runs(Path(os.environ["PENSTOCK_HOME"]))
with open_run(Path(os.environ["PENSTOCK_HOME"]), "last") as found:
    print(json.dumps([summary.state, len(found.points())]))
"""
    mount = 'mount -t tmpfs -o size=512k none "$PENSTOCK_HOME" || exit 77; exec "$@"'
    code = TRAINING.format(before="", after=after)
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", mount, "sh", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("mounting is not allowed here")
    assert done.returncode == 0, done.stderr
    state, points = json.loads(done.stdout)
    assert state == "finished" and 1 <= points < 200
    assert done.stderr.count("recording of this run has stopped, training goes on") == 1
    assert "[Step 220] Memory" in done.stderr


def test_a_worker_that_is_killed_is_in_the_journal_with_its_signal(home: Path) -> None:
    code = """
import os, signal, time, torch, penstock
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 1000
    def __getitem__(self, index):
        time.sleep(0.01); return torch.zeros(4)
loader = penstock.DataLoader(Slow(), 4, num_workers=2, memory="64MB", name="train")
with penstock.Monitor(loader, every=None) as monitor:
    killed = False
    for number, batch in enumerate(loader):
        if number == 5:
            os.kill(monitor._recorder.loaders[0].workers()[0]["pid"], signal.SIGKILL)
        if loader.stats().worker_restarts:
            break
"""
    run(code)
    with open_run(home, "last") as found:
        (note,) = [each for each in found.journal() if each.kind == "restart"]
        assert note.who == "loader" and "was killed by signal SIGKILL; it was replaced" in note.what
        assert found.summary().worker_restarts == 1


def test_a_stopped_process_is_reported_as_not_answering(home: Path) -> None:
    from penstock.errors import PenstockError
    from penstock.monitor.runs.reader import ask

    training = start(TRAINING.format(before="", after="print('up', flush=True); time.sleep(1000)"))
    try:
        assert training.stdout is not None and training.stdout.readline() == "up\n"
        with open_run(home, "last") as found:
            assert ask(found, {"do": "state"})["state"]["step"] == 20
            training.send_signal(signal.SIGSTOP)
            while psutil.Process(training.pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
            began_s = time.monotonic()
            with pytest.raises(PenstockError, match=r"did not answer within 0.3 s; is its process stopped\?"):
                ask(found, {"do": "state"}, timeout_s=0.3)
            assert time.monotonic() - began_s < 120 and found.state == "running"
            training.kill()
            training.wait()
            with pytest.raises(PenstockError, match="cannot be reached"):
                ask(found, {"do": "state"})
            assert found.state == "killed"
    finally:
        training.kill()
        training.communicate()


def test_a_worker_forked_while_the_monitor_writes_can_use_sqlite_itself(home: Path) -> None:
    code = """
import os, signal, sqlite3, sys, threading, time
from pathlib import Path
from support.recorded_runs import begin_run, point_at
record = begin_run(Path(os.environ["PENSTOCK_HOME"]))
ended = threading.Event()
def write():
    number = 0
    while not ended.is_set():
        record.write([point_at(time.time(), number)])
        number += 1
writer = threading.Thread(target=write)
writer.start()
stuck = 0
for _ in range(150):
    pid = os.fork()
    if pid == 0:
        signal.alarm(3)
        db = sqlite3.connect(":memory:")
        db.execute("CREATE TABLE t (a)")
        os._exit(0)
    stuck += os.waitpid(pid, 0)[1] != 0
    if stuck:
        break
ended.set()
writer.join()
record.abandon()
print(stuck)
"""
    assert run(code).stdout == "0\n"
