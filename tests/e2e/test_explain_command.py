"""`penstock explain` on datasets in files of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.ready_python import ReadyPython

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
MIB = 1 << 20

DATASETS = """
import time
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

SAMPLE = 1 << 19

class Big(Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.zeros(SAMPLE, dtype=torch.uint8)

class InMemory(Big):
    def __init__(self):
        self.rows = np.ones((1000, 1 << 16), dtype=np.uint8)

class Listed(Big):
    def __init__(self):
        self.paths = [f"images/train/{number:08d}.jpg" for number in range(300_000)]
    def __len__(self):
        return len(self.paths)

made = Big()

class Stream(IterableDataset):
    def __iter__(self):
        for _ in range(40):
            yield torch.zeros(1000)

class Broken(Big):
    def __getitem__(self, index):
        raise ValueError("frame is broken")

class Ragged(Big):
    def __getitem__(self, index):
        return torch.zeros(4 + index % 3)

class Empty(Big):
    def __len__(self):
        return 0

class Stuck(Big):
    def __getitem__(self, index):
        time.sleep(1000)

def failing():
    raise RuntimeError("the disk is not there")

def step(batch):
    print("a word on stdout")
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("explain")
    (made / "mine.py").write_text(DATASETS)
    (made / "s4.yaml").write_text("TRAIN:\n  NUM_WORKERS: 3\n  BATCH_SIZE: 16\n  PREFETCH_FACTOR: 3\n")
    return made


Explain = Callable[..., subprocess.CompletedProcess[str]]
Answer = Callable[..., dict[str, Any]]


@pytest.fixture
def explain(folder: Path, python: ReadyPython) -> Explain:
    """The process that measures is spawned, and imports torch itself."""
    return lambda *arguments: python.run_command("explain", *arguments, "--seconds", "0.2", folder=folder)


@pytest.fixture
def answer(explain: Explain) -> Answer:
    def found(*arguments: str) -> dict[str, Any]:
        done = explain(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return found


def parts_of(answer: dict[str, Any], loader: str) -> dict[str, dict[str, Any]]:
    return {part["name"]: part for part in answer["loaders"][loader]["components"]}


def test_memory_is_split_for_both_loaders_with_a_step_and_against_no_workers(answer: Answer) -> None:
    """One run of several seconds; what it prints is not in the answer."""
    usual = answer(
        "mine.py:Big", "--batch-size", "16", "--workers", "2", "--depth", "2", "--train", "mine.py:step",
        "--against", "workers=0,target=mine.py:made",
    )  # fmt: skip
    ours, theirs = parts_of(usual, "penstock"), parts_of(usual, "torch")
    batch_bytes = 16 * MIB // 2
    assert ours["batch"]["bytes"] == theirs["batch"]["bytes"] == batch_bytes
    # Penstock has two batches ahead, torch 2 workers × 2.
    assert ours["buffers"]["bytes"] == pytest.approx(2 * batch_bytes, rel=0.1)
    assert theirs["buffers"]["bytes"] == pytest.approx(4 * batch_bytes, rel=0.1)
    assert ours["torch"]["bytes"] > 50 * MIB
    assert 0 < ours["workers"]["bytes"] < 200 * MIB
    assert ours["batch"]["grows_with"] == ["batch size"]
    assert ours["buffers"]["grows_with"] == ["batch size"]
    assert theirs["buffers"]["grows_with"] == ["batch size", "workers"]
    assert "workers" in ours["workers"]["grows_with"]
    assert ours["python"]["grows_with"] == ours["torch"]["grows_with"] == []
    for loader in ("penstock", "torch"):
        whole = usual["loaders"][loader]
        assert whole["total_bytes"] == sum(part["bytes"] for part in whole["components"]) <= whole["most_bytes"]

    # Batches grow with the batch size; the memory that heaps keep does not matter here.
    ours, theirs = (usual["loaders"][name]["by_batch_size"]["per_sample_bytes"] for name in ("penstock", "torch"))
    # The current batch and those ahead; with torch also one in each worker.
    assert ours == pytest.approx((1 + 2) * MIB / 2, rel=0.1)
    assert theirs == pytest.approx((1 + 4 + 2) * MIB / 2, rel=0.1)

    # The other configuration has no workers and no batches ahead.
    changes = {each["name"]: each for each in usual["against"]["changes"]["torch"]}
    assert changes["workers"]["after_bytes"] == 0
    assert changes["buffers"]["change_bytes"] == pytest.approx(-4 * 8 * MIB, rel=0.1)
    assert usual["against"]["settings"]["workers"] == 0

    # The step takes longer than loading.
    found = usual["loading"]
    assert found["verdict"].startswith("Loading is not the bottleneck")
    assert found["compute_s"] / found["batches"] == pytest.approx(0.1, rel=0.2)


def test_a_list_of_paths_and_a_short_step_are_findings_in_the_names_of_the_settings_file(answer: Answer) -> None:
    starved = answer("mine.py:Listed", "--settings", "s4.yaml", "--step-time", "0.002")
    # The list grows with the dataset.
    parts = parts_of(starved, "penstock")
    assert parts["dataset"]["grows_with"] == ["dataset size"]
    assert parts["dataset"]["bytes"] > 15 * MIB
    (finding,) = [each for each in starved["findings"] if each["id"] == "python-containers"]
    assert set(finding) == {"id", "severity", "what", "fix"}
    assert "dataset.paths" in finding["what"]

    # The step is shorter than loading.
    assert starved["loading"]["verdict"].startswith("Loading is the bottleneck")
    assert starved["loading"]["wait_fraction"] > 0.5

    # Options that are not given, and the names in the findings, come from the file.
    assert (starved["settings"]["batch_size"], starved["settings"]["workers"]) == (16, 3)
    assert starved["settings"]["prefetch_factor"] == 3
    (finding,) = [each for each in starved["findings"] if each["id"] == "data-starved"]
    assert "TRAIN.NUM_WORKERS" in finding["fix"]


def test_a_stream_can_be_explained_against_a_dataset_that_is_in_memory(answer: Answer) -> None:
    given = ("--batch-size", "4", "--workers", "1", "--against", "target=mine.py:InMemory")
    stream = answer("mine.py:Stream", *given)
    assert stream["dataset"]["length"] is None
    assert parts_of(stream, "penstock")["batch"]["bytes"] == 4 * 4000

    changes = {each["name"]: each["change_bytes"] for each in stream["against"]["changes"]["penstock"]}
    assert changes["dataset"] == pytest.approx(1000 * (1 << 16), rel=0.1)
    assert abs(changes["torch"]) < 10 * MIB


def test_the_page_and_the_chart_are_written(folder: Path, explain: Explain) -> None:
    done = explain("mine.py:Big", "--batch-size", "4", "--workers", "0", "--plot", "memory.svg")
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    for words in ("loader buffers", "together", "Is loading the bottleneck?", "Drawn: memory.svg"):
        assert words in done.stdout
    root = ElementTree.fromstring((folder / "memory.svg").read_text())
    lines = {each.get("class") for each in root.iter("{http://www.w3.org/2000/svg}polyline")}
    assert lines == {"penstock", "torch"}


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["mine.py:failing"], 1, "the disk is not there"),
        (["mine.py:Broken", "--workers", "1"], 1, "frame is broken"),
        (["mine.py:Empty"], 1, "the dataset is empty"),
        (["mine.py:Ragged", "--workers", "1"], 1, "these samples: --collate file.py:function"),
        (["mine.py:nothing"], 2, "has no 'nothing'"),
        (["mine.py:Big", "--against", "speed=9"], 2, "changes nothing"),
        (["mine.py:Big", "--against", "workers=-1"], 2, "not a whole number"),
        (["mine.py:Big", "--plot", "a.png"], 2, "does not end in .svg"),
        (["mine.py:Big", "--memory", "lots"], 2, "lots"),
    ],
)
def test_errors_of_explain_go_to_stderr_and_nothing_to_stdout(
    explain: Explain, arguments: list[str], status: int, said: str
) -> None:
    done = explain(*arguments)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert "penstock/" not in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_ctrl_c_in_a_dataset_that_hangs_leaves_no_process(folder: Path) -> None:
    command = [PENSTOCK, "explain", "mine.py:Stuck", "--workers", "2"]
    program = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder, start_new_session=True
    )
    try:
        started = psutil.Process(program.pid)
        deadline_s = time.monotonic() + 60
        family: list[psutil.Process] = []
        # The measuring process, and the one in which it reads a first sample.
        while len(family) < 2:
            assert time.monotonic() < deadline_s, family
            time.sleep(0.05)
            family = [each for each in started.children(recursive=True) if "resource_tracker" not in _line_of(each)]
        os.killpg(program.pid, signal.SIGINT)
        assert program.wait(30) == 130
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive
    finally:
        if program.poll() is None:
            program.kill()
        program.communicate()


def _line_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "resource_tracker"
