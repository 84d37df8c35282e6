"""`penstock tune` with short real searches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.commands import RunHere
from support.ready_python import ReadyPython

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
MIB = 1 << 20

DATASETS = """
import time
import torch
from torch.utils.data import Dataset, IterableDataset

class Slow(Dataset):
    size = 1 << 16
    def __len__(self):
        return 500
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.zeros(self.size, dtype=torch.uint8)

class Crawling(Slow):
    def __getitem__(self, index):
        time.sleep(0.1)
        return torch.zeros(4)

class Large(Slow):
    size = 8 << 20

class Stream(IterableDataset):
    def __iter__(self):
        for _ in range(100):
            time.sleep(0.005)
            yield torch.zeros(1000)

class Broken(Slow):
    def __getitem__(self, index):
        raise ValueError("frame is broken")

class Empty(Slow):
    def __len__(self):
        return 0

def failing():
    raise RuntimeError("the disk is not there")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(DATASETS)
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "NO_COLOR", "TERM"}}
    return kept | {"PENSTOCK_HOME": str(folder / "home")}


Tune = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def tune(folder: Path, python: ReadyPython) -> Tune:
    """In a separate process: memory left by other tests must not change the measurements."""
    home = {"PENSTOCK_HOME": str(folder / "home")}
    return lambda *arguments: python.run_command("tune", *arguments, folder=folder, environment=home)


@pytest.fixture
def answer(tune: Tune) -> Callable[..., dict[str, Any]]:
    def found(*arguments: str) -> dict[str, Any]:
        done = tune(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return found


def test_waiting_samples_get_more_workers_and_a_record_is_kept(tune: Tune, folder: Path, run_here: RunHere) -> None:
    done = tune("mine.py:Slow", "--batch-size", "4", "--seconds", "15", "--most-workers", "4")
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines() if "The record is" not in line) <= 80
    assert "Best: " in done.stdout and "The prediction was off by" in done.stdout

    (record,) = (folder / "home" / "tune").iterdir()
    assert str(record) in "".join(done.stdout.splitlines())
    found = json.loads(record.read_text())
    tried = [(each["setting"]["workers"], each["samples_per_s"]) for each in found["trials"]]
    assert [workers for workers, _ in tried[:3]] == [1, 2, 4]
    assert tried[2][1] > 1.5 * tried[0][1]
    assert found["winner"]["workers"] > 1
    assert all(each["memory_bytes"] <= found["budget_bytes"] for each in found["trials"])
    assert {"samples_per_s", "memory_bytes"} <= set(found["trials"][0]["expected"])

    page = run_here("tune", "./mine.py:Slow", "--compare", folder=folder, PENSTOCK_HOME=str(folder / "home"))
    assert page.returncode == 0, page.stderr
    assert "1 record" in page.stdout and "…" not in page.stdout + done.stdout
    assert max(len(line) for line in page.stdout.splitlines()) <= 80


def test_the_climb_ends_when_the_training_step_no_longer_waits(
    answer: Callable[..., dict[str, Any]], folder: Path
) -> None:
    found = answer("mine.py:Slow", "--batch-size", "2", "--seconds", "20", "--step-time", "0.06")
    assert found["winner"]["workers"] == 1
    assert "faster loading gains nothing" in found["why"]
    assert Path(found["record"]).parent == folder / "home" / "tune"
    assert json.loads(Path(found["record"]).read_text())["winner"] == found["winner"]


def test_a_small_budget_limits_the_settings_that_are_tried(answer: Callable[..., dict[str, Any]]) -> None:
    found = answer("mine.py:Large", "--batch-size", "2", "--seconds", "5", "--memory", "250MB")
    assert found["winner"] is not None, found
    assert all(each["expected"]["memory_bytes"] <= found["budget_bytes"] for each in found["trials"])
    assert all(each["is_over"] or each["memory_bytes"] <= 1.01 * found["budget_bytes"] for each in found["trials"])


def test_a_budget_too_small_for_any_setting_exits_with_status_1(folder: Path, run_here: RunHere) -> None:
    given = ("mine.py:Large", "--batch-size", "16", "--seconds", "3", "--memory", "20MB")
    done = run_here("tune", *given, folder=folder, PENSTOCK_HOME=str(folder / "home"))
    assert done.returncode == 1
    assert "No setting could be tried" in done.stdout + done.stderr
    assert not (folder / "home").exists()


def test_a_stream_can_be_tuned(answer: Callable[..., dict[str, Any]]) -> None:
    found = answer("mine.py:Stream", "--batch-size", "4", "--seconds", "6", "--most-workers", "2")
    assert found["winner"]["workers"] in (1, 2)
    # Every worker yields the whole stream: more workers add nothing to the 200 samples a second of one.
    assert "get_worker_info" in found["verdict"]
    assert all(each["samples_per_s"] < 260 for each in found["trials"])
    assert all(each["expected"]["samples_per_s"] < 260 for each in found["trials"])


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["mine.py:failing"], 1, "the disk is not there"),
        (["mine.py:Broken"], 1, "frame is broken"),
        (["mine.py:Empty"], 1, "the dataset is empty"),
        (["mine.py:Crawling", "--seconds", "2"], 1, "a batch of 32 takes about "),
        (["mine.py:nothing"], 2, "has no 'nothing'"),
        (["absent.py:x"], 2, "no file absent.py"),
        (["mine.py:Slow", "--memory", "lots"], 2, "lots"),
        (["mine.py:Slow", "--seconds", "nan"], 2, "nan is not a finite number"),
        (["mine.py:Slow", "--compare"], 1, "there are no records"),
    ],
)
def test_errors_of_tune_go_to_stderr_and_nothing_to_stdout(
    folder: Path, run_here: RunHere, arguments: list[str], status: int, said: str
) -> None:
    done = run_here("tune", *arguments, folder=folder, PENSTOCK_HOME=str(folder / "home"))
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert done.stdout == ""


def test_ctrl_c_leaves_no_process_and_no_record(folder: Path) -> None:
    program = subprocess.Popen(
        [PENSTOCK, "tune", "mine.py:Slow", "--batch-size", "4"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder, env=environment(folder), start_new_session=True,
    )  # fmt: skip
    try:
        started = psutil.Process(program.pid)
        deadline_s = time.monotonic() + 90
        family: list[psutil.Process] = []
        while len(family) < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
            family = started.children(recursive=True)
        os.killpg(program.pid, signal.SIGINT)
        assert program.wait(30) == 130
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive
    finally:
        if program.poll() is None:
            program.kill()
        program.communicate()
    assert not (folder / "home").exists()
