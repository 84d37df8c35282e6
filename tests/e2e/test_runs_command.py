"""`penstock runs` and `penstock set` on running and ended runs."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.monitor.runs.format import RunOutcome
from support.commands import RunHere
from support.recorded_runs import begin_run, fill

TRAINING = """
import time, torch, penstock
class Frames(torch.utils.data.Dataset):
    def __len__(self): return 100_000
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
    yield folder
    shutil.rmtree(folder)


def penstock(*arguments: str, status: int = 0, columns: int = 80) -> str:
    command = [sys.executable, "-m", "penstock", *arguments]
    env = {**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr


def test_a_running_training_is_listed_changed_by_set_and_compared(home: Path) -> None:
    training = subprocess.Popen([sys.executable, "-c", TRAINING], stdout=subprocess.PIPE, text=True)
    try:
        assert training.stdout is not None and training.stdout.readline() == "up\n"
        assert "running" in penstock("runs")
        said = penstock("set", "frames", "workers=2", "memory=32MB")
        assert "train: workers 2, depth " in said and "memory 30.5 MiB" in said
        now = json.loads(penstock("set", "last", "depth=5", "loader=train", "--json"))
        assert now["workers"] == 2 and now["depth"] == 5
        assert "900TB is more than" in penstock("set", "frames", "memory=900TB", status=1)
        assert "is running" in penstock("runs", "rm", "last", status=1)
        deadline_s = time.monotonic() + 120
        while len(rows := json.loads(penstock("runs", "compare", "--json"))) < 2:
            assert time.monotonic() < deadline_s, rows
        assert {row["configuration"]["workers"] for row in rows} == {1, 2}
        assert all(row["samples_per_s"] > 0 and row["peak_bytes"] > 0 for row in rows)
    finally:
        training.kill()
        training.communicate()
    (found,) = json.loads(penstock("runs", "--json"))
    assert found["state"] == "killed" and found["name"] == "frames" and found["samples"] > 0
    assert "has ended (killed): nothing is left to set" in penstock("set", "frames", "workers=1", status=1)


def test_lists_fit_80_columns_and_escape_control_characters(home: Path) -> None:
    now_s = time.time()
    for number, name in enumerate(["[red]markup[/] \x1b[31mescape\x07\nline", "🎉" * 5000, "x" * 10_000]):
        record = begin_run(home, name, started_s=now_s - 4000 + number)
        fill(record, 100, ended_s=now_s - 3000)
        what = "RuntimeError: [bold]CUDA[/] out of memory " * 9
        record.finish(RunOutcome(state="failed", t_s=now_s - 3000, what=what))
    shown = penstock("runs")
    assert "[red]markup[/] [31mescape line" in penstock("runs", columns=200)
    assert "\x1b" not in shown and "\x07" not in shown
    assert all(len(line) <= 80 for line in shown.splitlines() if "🎉" not in line)
    assert len(shown) < 8000 and shown.count("failed") == 3
    assert "4 workers, prefetch 2, 4GB, batch 32" in " ".join(penstock("runs", columns=120).split())
    assert "and 2 older runs" in penstock("runs", "-n", "1")
    compared = penstock("runs", "compare")
    assert compared.count("640") == 3 and compared.count("7.00 GiB") == 3 and "10%" in compared


def test_runs_are_removed_by_name_and_by_age(home: Path) -> None:
    now_s = time.time()
    for name, age_s in (("old", 40 * 86400), ("recent", 60)):
        begin_run(home, name, started_s=now_s - age_s).finish(RunOutcome(state="finished", t_s=now_s - age_s + 1))
    assert penstock("runs", "rm", "--older-than", "30d").startswith("removed ")
    assert penstock("runs", "rm", "--older-than", "30d") == "no run is older than 30d\n"
    assert [each["name"] for each in json.loads(penstock("runs", "--json"))] == ["recent"]
    penstock("runs", "rm", "recent")
    assert penstock("runs").startswith(f"no runs are recorded in {home}")
    assert json.loads(penstock("runs", "--json")) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["set"], ["set", "last"], ["set", "last", "workers"], ["set", "last", "workers=many"],
        ["set", "last", "memory=much"], ["set", "last", "colour=red"], ["set", "last", "loader=train"],
        ["set", "last", "depth=1", "depth=2"], ["runs", "rm"], ["runs", "rm", "--older-than", "soon"],
    ],
)  # fmt: skip
def test_wrong_usage_is_status_2(home: Path, arguments: list[str]) -> None:
    assert "Usage: penstock" in penstock(*arguments, status=2)


def test_an_unknown_run_is_one_line(home: Path) -> None:
    assert penstock("set", "nobody", "workers=1", status=1).count("\n") == 1
    assert "nothing to compare" in penstock("runs", "compare", status=1)
    assert "no run in" in penstock("runs", "compare", "nobody", status=1)


def test_the_commands_do_not_import_torch(home: Path) -> None:
    code = (
        "import sys; from penstock.cli.app import run; run(['runs']); run(['set', 'last', 'workers=1']);"
        "sys.exit(3 if {'torch', 'numpy'} & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def ended(home: Path) -> Path:
    with begin_run(home, "intact") as record:
        fill(record, 3, ended_s=time.time())
    return record.path


def test_commands_say_how_many_records_were_passed_over(home: Path, run_here: RunHere) -> None:
    ended(home)
    (home / "runs" / "261116-000000-aaaa.sqlite").write_text("no record")
    done = run_here("runs")
    assert done.returncode == 0 and "intact" in done.stdout
    assert f"1 file in {home}/runs is not an intact record and was left out: 261116-000000-aaaa.sqlite" in done.stderr


TOO_LONG = "/" + "long" * 100
"""A folder that no user can enter, not even root."""


@pytest.mark.parametrize(
    "command",
    ["runs", "top --once", "set last workers=1", "report last", "runs rm --older-than 1h"],
)
def test_a_home_that_cannot_be_entered_is_one_line(run_here: RunHere, command: str) -> None:
    done = run_here(*command.split(), PENSTOCK_HOME=TOO_LONG)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "cannot be read: File name too long; set PENSTOCK_HOME" in done.stderr


def test_a_record_that_cannot_be_removed_is_one_line(
    home: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ended(home)

    def refused(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        done = run_here("runs", "rm", path.stem)
    assert done.returncode == 1
    assert done.stderr == f"penstock: {path} cannot be removed: Read-only file system\n"


def test_a_number_of_thousands_of_digits_is_wrong_usage(run_here: RunHere) -> None:
    done = run_here("set", "last", f"workers={'9' * 5000}")
    assert done.returncode == 2 and "is not a number of workers; write workers=8" in done.stderr
    assert len(done.stderr) < 400
