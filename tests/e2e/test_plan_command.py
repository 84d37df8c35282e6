"""`penstock plan` and `penstock.plan`, as people run them: real datasets, real files, real signals."""

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

from penstock import settings
from penstock.planner.plans import NAMES
from support.commands import RunHere
from support.ready_python import ReadyPython

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

LIDAR = Path(__file__).parents[2] / "examples" / "lidar_profile.json"
SETTINGS = Path(__file__).parents[1] / "unit" / "settings" / "files"
DATASETS = """
import threading, time
import torch
from torch.utils.data import Dataset

class Images(Dataset):
    def __len__(self):
        return 200
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.zeros(3, 64, 64)

class Slow(Images):
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.zeros(3, 64, 64)

class Broken(Images):
    def __getitem__(self, index):
        if index == 0:
            raise ValueError("no header\\nat all")
        return super().__getitem__(index)

class Empty(Images):
    def __len__(self):
        return 0

class Ragged(Images):
    def __getitem__(self, index):
        return torch.zeros(4 + index % 3)

class Locked(Images):
    def __init__(self):
        self.lock = threading.Lock()

class Loud(Images):
    def __getitem__(self, index):
        print("reading", index, flush=True)
        return super().__getitem__(index)

class Missing(Images):
    def __getitem__(self, index):
        return open(f"/nowhere/{index}.png")

class Elsewhere(Images):
    def __init__(self):
        open("/nowhere/index.json")

number = 3

def pad(samples):
    return torch.zeros(len(samples), 6)

def step(batch):
    time.sleep(0.03)

def wrong_step(batch):
    raise RuntimeError("no such layer")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sets")
    (made / "sets.py").write_text(DATASETS)
    return made


Plan = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def plan(python: ReadyPython) -> Plan:
    def planned(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run it in a session of its own, and see that nothing of that session is left."""
        with python.start_command("plan", *arguments, folder=folder, own_session=True) as process:
            out, err = process.communicate()
        assert process.returncode == 0, (out, err)
        assert "Traceback" not in err
        assert is_session_empty(process.pid)
        return subprocess.CompletedProcess(["penstock", "plan", *arguments], process.returncode, out, err)

    return planned


def is_session_empty(session: int) -> bool:
    """Whether the session has no process left; processes that were asked to end get a minute for it."""
    for _ in range(600):
        left = [each.pid for each in psutil.process_iter() if _session_of(each.pid) == session]
        if not left:
            return True
        time.sleep(0.1)
    return False


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid) if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else None
    except (OSError, psutil.Error):
        return None


@pytest.fixture
def plan_here(run_here: RunHere) -> Plan:
    """The same in this process."""

    def here(*arguments: str, status: int = 0, **more: Any) -> subprocess.CompletedProcess[str]:
        done = run_here("plan", *arguments, **more)
        assert done.returncode == status, done.stderr
        return done

    return here


def as_json_of(run: Plan, *arguments: str, **more: Any) -> dict[str, Any]:
    return json.loads(run(*arguments, "--json", **more).stdout)


def lidar(*arguments: str) -> tuple[str, ...]:
    machine = ("--cores", "32", "--ram", "46GB", "--gpu-memory", "32GB", "--batch-size", "4")
    return ("--profile", str(LIDAR), *machine, *arguments)


def test_a_dataset_is_measured_and_five_plans_are_shown_within_80_columns(plan: Plan, folder: Path) -> None:
    page = plan("sets.py:Images", "--batch-size", "8", "--seconds", "1.5", "--step-time", "0.05", folder=folder).stdout
    assert max(map(len, page.splitlines())) <= 80
    rows = [line for line in page.splitlines() if line.startswith(NAMES)]
    assert [row.split(" *")[0].split("  ")[0].strip() for row in rows] == list(NAMES)
    assert sum(" * " in row for row in rows) == 1
    assert "A sample is 48.0 KiB" in page and "GPU" in page and "Bound by waiting" in page
    assert "Recommended: " in page and "per rank" in page and "For it: " in page


def test_samples_of_20_ms_are_planned_in_seconds(plan: Plan, folder: Path) -> None:
    answer = as_json_of(plan, "sets.py:Slow", folder=folder)
    assert answer["profile"]["wait_s"] == pytest.approx(0.02, rel=0.3)


def test_a_step_is_timed_and_the_profile_is_saved_for_later(plan_here: Plan, folder: Path, tmp_path: Path) -> None:
    kept, out = tmp_path / "kept.json", tmp_path / "plan.yaml"
    first = as_json_of(plan_here,
        "sets.py:Slow", "--train", "sets.py:step", "--seconds", "2", "--batch-size", "8",
        "--save-profile", str(kept), "--yaml", str(out),
        folder=folder,
    )  # fmt: skip
    assert 0.03 <= first["step_s"] < 0.12
    assert first["profile"]["is_picklable"] is True
    # Nothing runs this time; the machine is the same but for what is free of it.
    again = as_json_of(plan_here, "--profile", str(kept), "--memory", "1GB", "--batch-size", "8")
    assert again["step_s"] == first["step_s"]
    assert [each["workers"] for each in again["plans"]] == [each["workers"] for each in first["plans"]]
    best = next(each for each in first["plans"] if each["name"] == first["recommended"])
    written = settings.load(out).arguments
    assert (written["batch_size"], written["num_workers"]) == (8, best["workers"])


def test_the_lidar_example_has_five_plans_beside_the_teams_own_settings(plan_here: Plan) -> None:
    page = plan_here(*lidar()).stdout
    assert max(map(len, page.splitlines())) <= 80
    first, second = page.split("Compared with other settings")
    assert [line for line in first.splitlines() if line.startswith("fast *")]
    original = next(line for line in second.splitlines() if line.startswith("original"))
    assert original.split()[:5] == ["original", "16", "×", "8", "4"] and "55.9 GiB" in original
    answer = as_json_of(plan_here, *lidar())
    assert [each["name"] for each in answer["plans"]] == list(NAMES)
    assert len(answer["beside"]) == 6
    theirs = {each["stated"]["name"]: each for each in answer["beside"]}
    assert theirs["original"]["memory_bytes"] == pytest.approx(60e9, rel=0.15)
    assert all(each["memory"]["high"] < 6e9 for each in answer["plans"])


def test_output_of_the_dataset_is_no_part_of_the_answer(plan: Plan, folder: Path) -> None:
    done = plan("sets.py:Loud", "--seconds", "0.5", "--json", folder=folder)
    assert json.loads(done.stdout)["profile"]["name"] == "sets.py:Loud"
    assert "reading 0" in done.stderr


def test_a_step_of_zero_seconds_counts_as_none(plan_here: Plan) -> None:
    table = as_json_of(plan_here, *lidar("--step-time", "0"))
    assert table["step_s"] is None and all(each["wait"] is None for each in table["plans"])


def test_a_profile_needs_no_torch() -> None:
    code = (
        "import sys; from penstock.cli.app import run\n"
        f"assert run(['plan', '--profile', {str(LIDAR)!r}]) == 0 and run(['plan']) == 0\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_budget_too_small_for_any_plan_is_reported(plan_here: Plan) -> None:
    page = plan_here(*lidar("--memory", "200MB"), columns=200).stdout
    assert page.count("over budget") == 5 and "No plan fits 191 MiB" in page


@pytest.mark.parametrize(
    ("answers", "chosen"),
    [("yes\nno\n", "balanced"), ("n\nwhat\ny\nGPU\n", "bigger batch"), ("no\nno\nyes\n", "extreme")],
)
def test_answers_from_a_pipe_lead_to_the_plan_that_is_written(
    plan_here: Plan, answers: str, chosen: str, tmp_path: Path
) -> None:
    out = tmp_path / "plan.yaml"
    done = plan_here(*lidar("--ask", "--yaml", str(out)), stdin=answers)
    assert f"Your answers lead to: {chosen}" in done.stdout and "[yes/no]" in done.stderr
    assert settings.load(out).arguments["batch_size"] == (6 if chosen == "bigger batch" else 4)
    assert f"the {chosen} plan" in out.read_text()
    answer = as_json_of(plan_here, *lidar("--ask"), stdin=answers)
    assert answer["chosen"] == chosen


def test_missing_answers_are_wrong_usage(plan_here: Plan) -> None:
    done = plan_here(*lidar("--ask"), stdin="no\n", status=2)
    assert done.stdout == "" and "the answers ended before the questions did" in done.stderr


def test_without_a_dataset_starting_points_are_shown_and_named_as_such(plan_here: Plan, tmp_path: Path) -> None:
    out = tmp_path / "start.yaml"
    page = plan_here("--cores", "24", "--ram", "128GB", "--gpu-memory", "24GB", "--yaml", str(out)).stdout
    assert "nothing was measured" in page and "12 per rank, 12 on this node" in page and "team's settings" in page
    assert settings.load(out).arguments["num_workers"] == 12
    point = as_json_of(plan_here, "--cores", "24", "--ram", "128GB", "--gpu-memory", "8GB")["starting_point"]
    assert (point["batch_size"], point["workers"], point["prefetch_factor"]) == (4, 8, 2)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("sets.py:Broken", "index 0 failed: ValueError: no header at all"),
        ("sets.py:Ragged", "these samples: --collate"),
        ("sets.py:Empty", "the dataset is empty"),
        ("sets.py:Missing", "FileNotFoundError"),
    ],
)
def test_a_dataset_that_cannot_be_read_is_one_line_and_status_one(
    plan_here: Plan, folder: Path, target: str, said: str
) -> None:
    done = plan_here(target, "--seconds", "1", folder=folder, status=1)
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"penstock: {target}: ") and said in done.stderr
    # Where there is only no data, there is a place to begin nevertheless.
    assert ("Starting points" in done.stdout) == (target in ("sets.py:Empty", "sets.py:Missing"))
    assert "Name a dataset" not in done.stdout


def test_a_dataset_whose_files_are_missing_still_gets_starting_points(plan_here: Plan, folder: Path) -> None:
    done = plan_here("sets.py:Elsewhere", folder=folder, status=1)
    assert "/nowhere/index.json" in done.stderr and "Starting points" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing_here:x",), "there is no module nothing_here"),
        (("sets.py:number",), "which is not a dataset"),
        (("sets.py:Images", "--collate", "sets.py:number"), "cannot be called"),
        (("sets.py:Images", "--profile", "p.json"), "give one of them"),
        (("sets.py:Images", "--train", "sets.py:step", "--step-time", "1"), "give one of them"),
        (("sets.py:Images", "--like", "a.yaml"), "give both"),
        (("sets.py:Images", "--yaml", "no/such/folder.yaml"), "there is no folder"),
        (("--train", "sets.py:step"), "needs a TARGET"),
        (("--ask",), "give a TARGET or --profile"),
        (("--memory", "much"), "is not a size"),
        (("--ram", "50%"), "is a fraction"),
        (("--batch-size", "0"), "0 is not in the range"),
        (("--profile", str(LIDAR), "--step-time", "nan"), "nan is not a finite number"),
        (("--profile", str(LIDAR), "--cores", "inf"), "inf is not a finite number"),
        (("--section", "x"), "neither training nor evaluation"),
    ],
)
def test_wrong_usage_is_status_two(plan_here: Plan, folder: Path, arguments: tuple[str, ...], said: str) -> None:
    done = plan_here(*arguments, folder=folder, status=2)
    # click folds lines.
    assert done.stdout == "" and said in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("{", "cannot be read as a profile"),
        ("[]", "it holds list"),
        ("{}", "neither samples nor sample_bytes"),
        ('{"samples": []}', "no samples"),
        ('{"samples": [{"size_bytes": "x", "wait_s": 0, "cpu_s": 0}]}', "is not a size or a length of time"),
        ('{"samples": [{"size_bytes": 1, "wait_s": NaN, "cpu_s": 0}]}', "is not a size or a length of time"),
        ('{"samples": [{"size_bytes": 1, "wait_s": 0, "cpu_s": 0}], "step_s": "x"}', "is not a length of time"),
        (
            '{"samples": [{"size_bytes": 1, "wait_s": 0, "cpu_s": 0}], "speed": 1}',
            "speed, which a profile cannot have",
        ),
        (
            '{"samples": [{"size_bytes": 1, "wait_s": 0, "cpu_s": 0}], "beside": 1}',
            "beside must have a section for each name",
        ),
    ],
)
def test_a_file_that_is_no_profile_is_one_line_that_names_it(
    plan_here: Plan, tmp_path: Path, content: str | None, said: str
) -> None:
    path = tmp_path / "p.json"
    if content is not None:
        path.write_text(content)
    error = plan_here("--profile", str(path), status=1).stderr
    assert error.count("\n") == 1 and str(path) in error and said in error


def test_a_dataset_that_cannot_be_pickled_is_planned_with_a_note(plan_here: Plan, folder: Path) -> None:
    page = plan_here("sets.py:Locked", "--seconds", "1", folder=folder, columns=300).stdout
    assert "The dataset cannot be pickled" in page and "Recommended: " in page


def test_a_custom_collate_function_makes_batches_of_uneven_samples(plan_here: Plan, folder: Path) -> None:
    answer = as_json_of(plan_here, "sets.py:Ragged", "--collate", "sets.py:pad", "--seconds", "1", folder=folder)
    assert len(answer["plans"]) == 5 and 16 <= answer["profile"]["sample_bytes"] <= 24


def test_a_step_that_fails_is_named(plan_here: Plan, folder: Path) -> None:
    done = plan_here("sets.py:Images", "--seconds", "1", "--train", "sets.py:wrong_step", folder=folder, status=1)
    assert (
        done.stderr == "penstock: sets.py:wrong_step failed on a batch of sets.py:Images: RuntimeError: no such layer\n"
    )


def test_a_settings_file_supplies_batch_and_workers_and_the_plan_is_written_in_its_layout(
    plan_here: Plan, tmp_path: Path
) -> None:
    theirs, out = SETTINGS / "s1_balanced.yaml", tmp_path / "new.yaml"
    given = settings.load(theirs).arguments
    machine = ("--cores", "32", "--ram", "46GB", "--profile", str(LIDAR), "--batch-size", "4")
    answer = as_json_of(plan_here, *machine, "--settings", str(theirs), "--like", str(theirs), "--yaml", str(out))
    yours = answer["beside"][-1]["stated"]
    assert (yours["name"], yours["workers"], yours["prefetch_factor"]) == (
        "your settings", given["num_workers"], given["prefetch_factor"],
    )  # fmt: skip
    best = next(each for each in answer["plans"] if each["name"] == answer["recommended"])
    written = settings.load(out)
    assert written.arguments["num_workers"] == best["workers"] != given["num_workers"]
    keys = {entry.argument: entry.key for entry in settings.load(theirs).entries}
    assert {entry.argument: entry.key for entry in written.entries}["num_workers"] == keys["num_workers"]


@pytest.mark.parametrize("pins", [True, False])
def test_a_plan_made_without_a_gpu_leaves_pinning_as_the_settings_file_has_it(
    plan_here: Plan, tmp_path: Path, pins: bool
) -> None:
    """The training may have a GPU, although the machine on which it is planned has none."""
    theirs, out = tmp_path / "mine.yaml", tmp_path / "new.yaml"
    theirs.write_text(f"batch_size: 4\nnum_workers: 1\npin_memory: {str(pins).lower()}\n")
    machine = ("--cores", "32", "--ram", "46GB", "--profile", str(LIDAR), "--batch-size", "4")
    for gpu, expected in (((), pins), (("--gpu-memory", "24GB"), True)):
        as_json_of(plan_here, *machine, *gpu, "--like", str(theirs), "--yaml", str(out))
        assert settings.load(out).arguments["pin_memory"] is expected
        assert settings.load(out).arguments["num_workers"] > 1


def test_batch_size_and_ranks_come_from_a_settings_file(plan_here: Plan, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("train:\n  batch_size: 6\n  num_workers: 2\n  memory: 3GB\n")
    answer = as_json_of(plan_here, "--profile", str(LIDAR), "--settings", str(path))
    assert answer["plans"][0]["batch_size"] == 6 and answer["budget_bytes"] == 3 * 10**9
    answer = as_json_of(
        plan_here, "--profile", str(LIDAR), "--settings", str(path), "--batch-size", "2", "--memory", "4GB"
    )
    assert answer["plans"][0]["batch_size"] == 2 and answer["budget_bytes"] == 4 * 10**9
    assert "cannot be read" in plan_here("--settings", str(tmp_path / "none.yaml"), status=1).stderr


def test_ctrl_c_leaves_nothing_running(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "penstock", "plan", "sets.py:Slow", "--seconds", "30"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        me = psutil.Process(process.pid)
        deadline_s = time.monotonic() + 60
        while not me.children() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert me.children(), "no process was started to read samples"
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=280)
    assert process.returncode == 130 and out == "" and "Traceback" not in err
    assert is_session_empty(process.pid)


def test_in_python_a_plan_is_made_for_the_share_of_each_rank_and_names_containers(
    python: ReadyPython, folder: Path
) -> None:
    code = """
import json, sets, penstock
listed = sets.Images()
listed.paths = [f"images/{number:08d}.jpg" for number in range(300_000)]
table = penstock.plan(listed, 8, memory="600MB", step_s=0.05, seconds=1.0)
assert isinstance(table, penstock.PlanTable) and table.recommended in table.plans
assert table.profile.containers_bytes > 8 << 20 and "The dataset has large Python containers" in table.explain()
with penstock.DataLoader(sets.Images(), **table.recommended.arguments()) as loader:
    batches = sum(1 for _ in loader)
for wrong in ({"batch_size": 0}, {"batch_size": 4, "step_s": -1}, {"batch_size": 4, "seconds": 0}):
    try:
        penstock.plan(sets.Images(), **wrong)
    except penstock.ConfigError as error:
        assert str(error).split("=")[0] in wrong, error
    else:
        raise AssertionError(wrong)
print(json.dumps([table.facts.ranks, table.budget_bytes, len(table.plans), batches, table.recommended.workers_on_node]))
"""
    done = python.run(code, folder=folder, environment={**os.environ, "LOCAL_WORLD_SIZE": "2"})
    assert done.returncode == 0, done.stderr
    ranks, budget, plans, batches, on_node = json.loads(done.stdout)
    assert (ranks, budget, plans, batches) == (2, 600 * 10**6, 5, 25)
    assert on_node % 2 == 0
