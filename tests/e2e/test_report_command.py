"""`penstock report` on a real training, and on everything it may be asked."""

from __future__ import annotations

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
from support.ready_python import ReadyPython
from support.recorded_runs import begin_run, fill

TRAINING = """
import time, torch, penstock
class Frames(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        time.sleep(0.004); return torch.zeros(4096)
loader = penstock.DataLoader(Frames(), 8, num_workers=1, memory="64MB", name="train")
with penstock.Monitor(loader, every=None, run="frames") as monitor:
    deadline_s = time.monotonic() + 30
    # Until a point was taken while batches were in flight.
    while not monitor._recorder.point.figures.get("loader.0.in_flight_bytes") and time.monotonic() < deadline_s:
        for batch in loader:
            monitor.step()
    monitor.log("that is enough")
    raise RuntimeError("<b>that was it</b>")
"""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ps-"))
    monkeypatch.setenv("PENSTOCK_HOME", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def run_id(home: Path) -> str:
    """A run of a minute that is over."""
    now_s = time.time()
    record = begin_run(home, "minute", started_s=now_s - 60)
    fill(record, 60, ended_s=now_s)
    record.finish(RunOutcome(state="finished", t_s=now_s))
    return record.id


def test_a_real_training_that_failed_is_reported_in_a_file_and_as_json(
    home: Path, tmp_path: Path, run_here: RunHere, python: ReadyPython
) -> None:
    done = python.run(TRAINING)
    assert "that was it" in done.stderr
    told = run_here("report", "frames", folder=tmp_path)
    assert told.returncode == 0, told.stderr
    (file,) = tmp_path.iterdir()
    assert file.name in told.stdout and file.name.startswith("penstock-report-")
    page = file.read_text(encoding="utf-8")
    assert "RuntimeError: &lt;b&gt;that was it&lt;/b&gt;" in page and "that is enough" in page
    answer = json.loads(run_here("report", "frames", "--json", folder=tmp_path).stdout)
    assert (
        answer["state"] == "failed"
        and answer["samples"] % 64 == 0 < answer["samples"]
        and len(list(tmp_path.iterdir())) == 1
    )
    assert [each["samples"] for each in answer["epochs"]] == [64.0] * (answer["samples"] // 64)
    budget = answer["predictions"][-1]
    assert budget["is_bound"] and budget["holds"] and budget["predicted"] == 64_000_000


def test_an_existing_file_is_kept_unless_forced(run_id: str, tmp_path: Path, run_here: RunHere) -> None:
    kept = tmp_path / f"penstock-report-{run_id}.html"
    kept.write_text("mine")
    refused = run_here("report", run_id, folder=tmp_path)
    assert refused.returncode == 1 and "exists already; overwrite it with --force" in refused.stderr
    assert kept.read_text() == "mine"
    assert run_here("report", run_id, "--force", folder=tmp_path).returncode == 0
    assert kept.read_text().startswith("<!doctype html>") and list(tmp_path.iterdir()) == [kept]


def test_a_file_is_made_at_the_given_path_and_a_plan_is_compared(
    run_id: str, tmp_path: Path, run_here: RunHere
) -> None:
    plan = {
        "name": "safe", "workers": 4, "batch_size": 32, "depth": 2, "wait": 0.1,
        "memory": {"low": 1e9, "expected": 2e9, "high": 3e9},
        "samples_per_s": {"low": 600, "expected": 640, "high": 700},
    }  # fmt: skip
    (tmp_path / "plan.json").write_text(json.dumps({"plans": [plan], "recommended": "safe"}))
    told = run_here("report", "minute", "-o", "out.html", "--plan", "plan.json", "--json", folder=tmp_path)
    assert told.returncode == 0, told.stderr
    speed = next(each for each in json.loads(told.stdout)["predictions"] if each["unit"] == "samples/s")
    assert speed["error"] == pytest.approx(0.0, abs=0.01) and speed["holds"]
    assert "plan.json, the safe plan" in (tmp_path / "out.html").read_text()
    printed = run_here("report", "minute", "-o", "-", folder=tmp_path)
    assert printed.stdout.startswith("<!doctype html>") and printed.stdout.endswith("</html>\n")


def test_the_report_is_opened_in_the_users_browser(run_id: str, tmp_path: Path) -> None:
    browser, heard = tmp_path / "browser", tmp_path / "heard"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {heard}\n')
    browser.chmod(0o755)
    # In a process of its own: Python looks at BROWSER once.
    command = [sys.executable, "-m", "penstock", "report", run_id, "-o", "a b.html", "--open"]
    env = {**os.environ, "BROWSER": str(browser)}
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path, env=env, timeout=60)
    deadline_s = time.monotonic() + 30
    while not (heard.exists() and heard.read_text()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert heard.read_text() == (tmp_path / "a b.html").as_uri()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["nobody"], 1, "no run in"),
        (["last", "-o", "no/such/folder.html"], 1, "there is no folder"),
        (["last", "-o", "."], 1, "is a folder"),
        (["last", "--plan", "missing.json"], 1, "cannot be read"),
        (["last", "--plan", "bad.json"], 1, "is not JSON"),
        (["last", "--plan", "empty.json"], 1, "contains no plans"),
        ([], 0, ""),
        (["last", "--json", "--open"], 2, "--open needs a file"),
        (["last", "--json", "-o", "-"], 2, "both write to stdout"),
        (["last", "--pdf"], 2, "No such option"),
    ],
)
def test_an_error_gives_the_reason_and_leaves_no_file(
    run_id: str, tmp_path: Path, run_here: RunHere, arguments: list[str], status: int, words: str
) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "empty.json").write_text("{}")
    told = run_here("report", *arguments, folder=tmp_path)
    assert (told.returncode if arguments else 0) == status and words in told.stderr
    assert {each.name for each in tmp_path.iterdir()} == {"bad.json", "empty.json"}


def test_a_folder_that_cannot_be_written_is_one_line(run_id: str, tmp_path: Path, run_here: RunHere) -> None:
    told = run_here("report", run_id, "-o", "/proc/report.html", folder=tmp_path)
    assert told.returncode == 1 and "cannot be written" in told.stderr and told.stderr.count("\n") == 1


def test_the_command_does_not_import_torch(run_id: str, tmp_path: Path) -> None:
    code = (
        "import sys; from penstock.cli.app import run; status = run(['report', 'last']);"
        "sys.exit(status or (3 if {'torch', 'numpy'} & set(sys.modules) else 0))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=dict(os.environ), timeout=60)
    assert len(list(tmp_path.iterdir())) == 1
