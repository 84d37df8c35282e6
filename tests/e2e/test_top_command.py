"""`penstock top` on a real terminal, with a real training."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from penstock.cli.top.keys import parsed
from penstock.cli.top.trainings import TrainingSnapshot
from penstock.cli.top.view import Choice, Page
from penstock.monitor.runs.format import Alert, Note, RunOutcome
from support.faults import processes
from support.recorded_runs import GIB, begin_run, fill, point_at
from support.terminals import Terminal

TOP = [sys.executable, "-m", "penstock", "top"]
TRAINING = """
import sys, time, torch, penstock
class Frames(torch.utils.data.Dataset):
    def __len__(self): return 1_000_000
    def __getitem__(self, index):
        time.sleep(0.004); return torch.zeros(1 << 18)
loader = penstock.DataLoader(Frames(), 8, num_workers=2, memory="256MB", name="train")
held = torch.ones(50 << 18)
with penstock.Monitor(loader, every=None, run="frames") as monitor:
    for number, batch in enumerate(loader):
        monitor.step()
        if number == 0: print("up", flush=True)
        time.sleep(0.01)
"""
STRANGER = """
import mmap, os, time
shared = mmap.mmap(-1, 64 << 20)
shared.write(b"x" * (64 << 20))
own = b"y" * (48 << 20)
for _ in range(2):
    if os.fork() == 0:
        more = b"z" * (32 << 20)
        break
else:
    print("up", flush=True)
while True: sum(range(10_000)); time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ps-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def training(home: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=environment(home),
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.communicate()


def environment(home: Path, **changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES", "NO_COLOR", "TERM"}}
    return kept | {"PENSTOCK_HOME": str(home), "TERM": "xterm-256color", "PYTHONUTF8": "1"} | changes


def top(home: Path, *arguments: str, status: int = 0, **changes: str) -> str:
    done = subprocess.run(
        [*TOP, *arguments], capture_output=True, text=True, encoding="utf-8", timeout=60,
        env=environment(home, COLUMNS="80", **changes),
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    return done.stdout or done.stderr


def wait_until(condition: Callable[[], Any], within_s: float = 120.0) -> Any:
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "did not happen"
        time.sleep(0.05)
    return found


def tree_pss(pid: int) -> int:
    """The memory of a process and its descendants, from /proc."""
    root = psutil.Process(pid)
    return sum(each.memory_full_info().pss for each in (root, *root.children(recursive=True)))


def test_one_snapshot_agrees_with_proc_and_lists_the_workers(home: Path, training: subprocess.Popen[str]) -> None:
    def agreeing() -> Any:
        (seen,) = json.loads(top(home, "--json"))["trainings"]
        has_workers = seen["figures"].get("samples_per_s") and len(seen["loaders"][0]["workers"]) == 2
        is_right = seen["figures"]["tree_bytes"] == pytest.approx(tree_pss(training.pid), rel=0.05)
        return seen if has_workers and is_right else None

    seen = wait_until(agreeing)
    truth = tree_pss(training.pid)
    parts = ("trainer_bytes", "workers_bytes", "arena_bytes", "cache_bytes", "other_bytes")
    assert sum(seen["figures"][name] for name in parts) == pytest.approx(truth, rel=0.15)
    assert (seen["name"], seen["state"], seen["pid"]) == ("frames", "running", training.pid)
    workers = {each["pid"] for each in seen["loaders"][0]["workers"]}
    assert workers <= {each.pid for each in psutil.Process(training.pid).children()}
    outside = json.loads(top(home, "--pid", str(training.pid), "--json"))["trainings"][0]
    assert outside["figures"]["tree_bytes"] == pytest.approx(tree_pss(training.pid), rel=0.05)
    assert workers <= {each["pid"] for each in outside["processes"]} and outside["figures"]["processors_busy"] > 0


def test_a_frame_fits_80_columns_and_without_colour_it_is_plain_text(
    home: Path, training: subprocess.Popen[str]
) -> None:
    for arguments in (["frames", "--once"], ["--pid", str(training.pid), "--once"]):
        shown = top(home, *arguments)
        assert "\x1b" not in shown and max(map(len, shown.splitlines())) <= 80
        assert re.search(r"^memory +\S+ +\d+ MiB  of \S+ [GT]iB", shown, re.MULTILINE), shown
    # A pipe gets one frame. A rate needs a second of training, and at some moments no worker is at a sample.
    processes.until(lambda: "samples/s" in top(home, "frames"))
    processes.until(lambda: "fetching" in top(home, "frames"))
    ascii_only = top(home, "frames", "--once", PYTHONUTF8="0", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert ascii_only.isascii() and re.search(r"^memory +[#.]{20,}", ascii_only, re.MULTILINE)


def test_keys_change_settings_and_the_terminal_is_restored(home: Path, training: subprocess.Popen[str]) -> None:
    with Terminal([*TOP, "--every", "0.5"], environment(home)) as terminal:
        terminal.wait_for(r"train +2 workers, depth \d+")
        assert terminal.settings != terminal.before, "keys come without Enter"
        terminal.press("++")
        terminal.wait_for(r"train: workers 3 -> 4")
        terminal.wait_for(r"train +4 workers[\s\S]*terminal   train: workers 3 -> 4")
        terminal.press("-]")
        terminal.wait_for(r"train: depth \d+ -> \d+")
        terminal.wait_for(r"train +3 workers")
        terminal.press("\x1b[A\x1bOB\x1b[C\x1b[15~x")  # arrows and other keys: there is only one run to choose
        terminal.resize(60, 12)
        frame = terminal.wait_for(r"  and \d+ more")
        assert "frames" in frame
        terminal.press("q")
        assert terminal.wait() == 0
        assert terminal.settings == terminal.before
        assert terminal.raw.rfind("\x1b[?1049l") > terminal.raw.rfind("\x1b[?1049h") > -1, "the screen is back"
        assert terminal.raw.rfind("\x1b[?25h") > terminal.raw.rfind("\x1b[?25l") > -1, "and the cursor"
        assert "Traceback" not in terminal.raw
    notes = json.loads(top(home, "--json"))["trainings"][0]["events"]
    changes = [note["what"] for note in notes if note["who"] == "terminal"]
    assert changes[:3] == ["train: workers 2 -> 3", "train: workers 3 -> 4", "train: workers 4 -> 3"]


def test_a_worker_that_is_killed_shows_as_a_restart(home: Path, training: subprocess.Popen[str]) -> None:
    with Terminal([*TOP, "frames", "--every", "0.3"], environment(home, NO_COLOR="1")) as terminal:
        terminal.wait_for(r"fetching")
        (seen,) = json.loads(top(home, "--json"))["trainings"]
        victim = next(each for each in seen["loaders"][0]["workers"] if not each["leaving"])
        os.kill(victim["pid"], signal.SIGKILL)
        shown = terminal.wait_for(r"1 restarted[\s\S]*restarted 1, [\s\S]*was killed by signal SIGKILL")
        assert str(victim["worker_id"]) in shown
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", terminal.raw), "no colour was asked for"
        terminal.press("\x03")
        assert terminal.wait() == 130 and terminal.settings == terminal.before


def test_on_a_dumb_terminal_each_frame_is_printed_below_the_last(home: Path, training: subprocess.Popen[str]) -> None:
    with Terminal([*TOP, "--every", "0.3"], environment(home, TERM="dumb")) as terminal:
        terminal.wait_for(r"(memory in use[\s\S]*q quit[\s\S]*){2}")
        assert "\x1b" not in terminal.raw
        terminal.process.terminate()
        assert terminal.wait() == 143 and terminal.settings == terminal.before


def test_any_other_training_is_shown_by_pattern_with_its_children(home: Path) -> None:
    marker = f"stranger-{uuid.uuid4().hex}"
    process = subprocess.Popen([sys.executable, "-S", "-c", STRANGER, marker], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        wait_until(lambda: tree_pss(process.pid) > 170 << 20)
        seen = json.loads(top(home, "--match", marker, "--json"))["trainings"]
        assert [each["pid"] for each in seen] == [process.pid], "children belong to their parent"
        figures = seen[0]["figures"]
        assert figures["tree_bytes"] == pytest.approx(tree_pss(process.pid), rel=0.05)
        assert figures["processes"] == 3 and figures["workers_bytes"] == pytest.approx(64 << 20, rel=0.2)
        with Terminal([*TOP, "--match", marker, "--every", "0.3"], environment(home)) as terminal:
            terminal.wait_for(r"processors busy")
            terminal.press("+")
            terminal.wait_for(r"has no loader whose workers can be changed")
            for each in (*psutil.Process(process.pid).children(), psutil.Process(process.pid)):
                each.kill()
            process.wait()
            terminal.wait_for(r"ended \d+:\d\d")
            terminal.press("q")
            assert terminal.wait() == 0
    finally:
        process.kill()
        process.communicate()


def test_without_a_training_the_page_says_how_to_show_one(tmp_path: Path) -> None:
    assert "no training with a monitor is running" in top(tmp_path, "--once")
    assert json.loads(top(tmp_path, "--json"))["trainings"] == []
    assert "no run" in top(tmp_path, "nobody", "--once", status=1)
    assert "there is no process" in top(tmp_path, "--pid", "4194304", "--once", status=1)
    assert "no process matches" in top(tmp_path, "--match", "nobody-of-this-name", "--once", status=1)
    assert json.loads(top(tmp_path, "--match", "nobody-of-this-name", "--json", status=1))["trainings"] == []
    assert "Usage:" in top(tmp_path, "--pid", "1", "--match", "x", status=2)


def test_control_characters_in_names_are_harmless_and_an_ended_run_is_shown(tmp_path: Path) -> None:
    now_s = time.time()
    record = begin_run(tmp_path, "[red]x[/] \x1b[31mescape\x07\n" + "🎉" * 5000, started_s=now_s - 200)
    fill(record, 100, ended_s=now_s - 100)
    record.write(notes=[Note(t_s=now_s, who="training", kind="moment", what="\x1b]0;title\x07 [bold]epoch 2")])
    record.finish(RunOutcome(state="failed", t_s=now_s - 100, what="RuntimeError: [bold]CUDA[/] out of memory"))
    shown = top(tmp_path, "last", "--once")
    assert "[red]x[/] [31mescape 🎉" in shown and "\x1b" not in shown and "\x07" not in shown
    assert "failed" in shown and "[bold]CUDA[/] out of memory" in shown and "[bold]epoch 2" in shown
    assert "ALERT memory above 90%" in shown and "hit rate 80%" in shown
    assert "GPU 0 H200   busy 90%, 25.0 GiB of 141 GiB, torch 20.0 GiB, reserved 24.0 GiB\n" in shown
    assert "no training with a monitor" in top(tmp_path, "--once"), "it is over"


def test_the_command_does_not_import_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from penstock.cli.app import run; run(['top', '--once']); run(['top', '--pid', '1', '--once']);"
        "sys.exit(3 if {'torch', 'numpy'} & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60, env=environment(tmp_path))


@pytest.mark.parametrize(
    ("sent", "keys", "rest"),
    [
        ("q", ["q"], ""), ("+-[]", ["+", "-", "[", "]"], ""), ("\x1b[A\x1b[B", ["up", "down"], ""),
        ("\x1bOC\x1bOD", ["right", "left"], ""), ("\x1b[1;5Aq", ["up", "q"], ""), ("\x1b[15~]", ["]"], ""),
        ("+\x1b", ["+"], "\x1b"), ("\x1b[", [], "\x1b["), ("\x1b[1;", [], "\x1b[1;"),
    ],
)  # fmt: skip
def test_brackets_and_arrows_are_one_key_each(sent: str, keys: list[str], rest: str) -> None:
    assert parsed(sent) == (keys, rest)


def many_workers(number: int) -> TrainingSnapshot:
    workers = [
        {"worker_id": place, "pid": 1000 + place, "doing": "fetching", "batch": 7, "index": "12", "since_s": 2.5,
         "samples": 10**6, "restarts": 1, "private_bytes": GIB, "leaving": True}
        for place in range(64)
    ]  # fmt: skip
    return TrainingSnapshot(
        id=f"261116-00000{number}-aaaa", name="x" * 500, is_recorded=True, state="running", what=None, pid=1,
        started_s=0.0, heard_s=time.time(), measure="pss", figures=point_at(0.0, 1).figures, gpus=["NVIDIA H200"],
        loaders=[{"number": 0, "name": "train", "kind": "penstock", "configuration": {}, "workers": workers}],
        events=[{"t_s": 0.0, "who": "alert", "kind": "raised", "what": "y" * 500}] * 50, alerts=["full"],
    )  # fmt: skip


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (20, 5), (40, 10), (300, 200), (80, 50)])
def test_the_page_fits_a_screen_of_any_size(columns: int, rows: int) -> None:
    trainings = [many_workers(number) for number in range(9)]
    trainings.append(replace(trainings[0], id="process 7", is_recorded=False, loaders=[], figures={}))
    for chosen in (trainings[0], trainings[5], trainings[9]):
        out = io.StringIO()
        console = Console(file=out, width=columns, height=rows, force_terminal=True, color_system=None)
        machine = {"used_bytes": 15.5 * GIB, "limit_bytes": 16.0 * GIB, "swap_used_bytes": 1.0}
        console.print(Page(console, has_keys=True).live(machine, trainings, Choice(training=chosen.id), ""))
        lines = out.getvalue().split("\n")[:-1]
        assert len(lines) <= rows and max(map(len, lines)) <= columns
        assert f"> {chosen.id}"[: columns - 1] in out.getvalue() or rows < 10
        if (columns, rows) == (80, 24) and chosen is trainings[5]:
            assert "leaving, fetching" in out.getvalue() and "  and 63 more\n" in out.getvalue()
            assert "busy 90%" in out.getvalue() and "ALERT y" in out.getvalue()


def test_raised_alerts_are_shown_until_they_clear(tmp_path: Path) -> None:
    record = begin_run(tmp_path)
    details = {"threshold": 9.0}
    record.write([point_at(time.time(), 1)], alerts=[
        Alert(t_s=1.0, rule="memory", state="raised", what="memory is full", details=details),
        Alert(t_s=2.0, rule="swap", state="raised", what="swap has grown", details=details),
        Alert(t_s=3.0, rule="memory", state="cleared", what="memory is calm", details=details),
    ])  # fmt: skip
    seen = json.loads(top(tmp_path, "last", "--json"))["trainings"][0]
    assert seen["alerts"] == ["swap has grown"] and len(seen["events"]) == 3
    assert "no socket" in seen["problem"]
    record.abandon()
