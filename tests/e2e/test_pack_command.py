"""`penstock pack` as a user runs it: every kind of source, Ctrl-C, mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli import app
from penstock.data import ArrowDataset, TarDataset
from support.ready_python import ReadyPython

pytest.importorskip("pyarrow")

SCRIPT = """
import time
import torch

class Dataset:
    def __init__(self, count=40, wait_s=0.0):
        self.count, self.wait_s = count, wait_s

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(self.wait_s)
        return torch.full((1000,), index), index

def slow():
    return Dataset(400, 0.02)

class Augmented(Dataset):
    def __getitem__(self, index):
        return torch.rand(10)

def broken():
    return [1, 2, object()]
"""


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "penstock", "pack", *map(str, arguments)]


Run = Callable[..., str]


@pytest.fixture
def run(folder: Path, python: ReadyPython) -> Run:
    def ran(*arguments: str, status: int = 0) -> str:
        done = python.run_command("pack", *arguments, folder=folder)
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout if status == 0 else done.stderr

    return ran


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pack_me.py").write_text(SCRIPT)
    return tmp_path


def test_a_target_is_packed_and_packed_again(folder: Path, run: Run) -> None:
    told = json.loads(run("pack_me.py:Dataset", "out", "--shard-size", "100KB", "--workers", "2", "--json"))
    assert (told["samples"], told["shards"], told["kept"], told["format"]) == (40, 4, 0, "arrow")
    dataset = ArrowDataset(folder / "out")
    assert [dataset[place][1] for place in range(40)] == list(range(40)) and (dataset[7][0] == 7).all()
    shown = run("pack_me.py:Dataset", "out", "--shard-size", "100KB")
    assert shown.startswith("40 samples, ") and "(4 of them from an earlier run)" in shown
    assert "format was 'arrow' and is 'tar'" in run(
        "pack_me.py:Dataset", "out", "--to", "tar", "--shard-size", "100KB", status=1
    )
    run("pack_me.py:Dataset", "out", "--to", "tar", "--force")
    assert TarDataset(folder / "out")[39][1] == 39 and not list((folder / "out").glob("*.arrow"))


def test_ctrl_c_leaves_nothing_behind_and_the_same_command_continues(folder: Path, run: Run) -> None:
    arguments = ("pack_me.py:slow", "out", "--shard-size", "100KB", "--workers", "2", "--json")
    running = subprocess.Popen(
        command(*arguments), cwd=folder, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    until_s = time.monotonic() + 60
    journal = folder / "out" / "penstock-pack.journal"
    # The plan, and two shards that are finished: a file that lies there may not be entered yet.
    while not journal.exists() or journal.read_bytes().count(b"\n") < 3:
        assert running.poll() is None and time.monotonic() < until_s
        time.sleep(0.01)
    # As a terminal does: to the whole group.
    os.killpg(running.pid, signal.SIGINT)
    told = running.communicate(timeout=60)[1]
    assert running.returncode == 130 and "Traceback" not in told, told
    assert told.splitlines()[-1] == "stopped; finished shards stay in out, and the same command continues from here"
    with pytest.raises(ProcessLookupError):
        os.killpg(running.pid, 0)
    left = sorted(path.name for path in (folder / "out").iterdir())
    assert left[-1] == "penstock-pack.journal" and not [name for name in left if "partial" in name]
    told = json.loads(run(*arguments))
    assert told["kept"] >= 2 and told["samples"] == 400
    assert ArrowDataset(folder / "out")[399][1] == 399


def test_mistakes_are_reported_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("a b.tar.gz", "zipped/1.tar.gz"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"\x1f\x8b")
    for arguments, status, told in (
        (("pack_me.py:broken", "out"), 1, "sample 2 of dataset builtins.list: A builtins.object cannot be packed"),
        (("pack_me.py:nothing", "out"), 2, "pack_me.py has no 'nothing'"),
        (("nowhere", "out"), 1, "there is no nowhere. SRC may be a dataset (module:attribute or file.py:attribute), a"),
        (("a b.tar.gz", "out"), 1, "Unpack it first: gunzip -k 'a b.tar.gz'"),
        (("zipped/", "out"), 1, "Unpack it first: gunzip -k zipped/*.tar.gz"),
        (("pack_me.py:Dataset", "zipped"), 1, "zipped is not empty: it holds 1.tar.gz, which penstock pack did not"),
        (("x:" + "y" * 300, "out"), 1, "File name too long"),
        (("nowhere/*.tar", "out"), 1, "names no .tar file"),
        ((".", "out"), 1, "overlap"),
        (("pack_me.py:Dataset", "out", "--shard-size", "0"), 2, "is zero"),
        (("pack_me.py:Dataset", "pack_me.py"), 2, "is a file"),
    ):
        assert app.run(["pack", *arguments]) == status
        said = capsys.readouterr()
        assert told in " ".join(said.err.split()) and not said.out and "Traceback" not in said.err
    assert not (folder / "out").exists() or not list((folder / "out").iterdir())
    sys.modules.pop("pack_me", None)


def test_a_warning_and_what_was_left_out_are_lines_of_their_own(folder: Path, run: Run, python: ReadyPython) -> None:
    done = python.run_command("pack", "pack_me.py:Augmented", "out", folder=folder)
    assert done.returncode == 0 and done.stdout.startswith("40 samples, ")
    (told,) = done.stderr.splitlines()
    assert told.startswith("warning: Augmented draws random numbers, and pack stores what it drew: every epoch gets")
    for name in ("in/1.txt", "in/.git/x.txt", "in/README"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    (folder / "in/more").symlink_to(folder)
    shown = run("in", "files", "--to", "tar")
    assert "left out: 3 files and folders outside samples, such as .git/, README" in shown
