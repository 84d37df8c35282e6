"""`penstock settings` on the teams' own files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.commands import RunHere

FILES = Path(__file__).parents[1] / "unit" / "settings" / "files"


@pytest.fixture
def settings(run_here: RunHere) -> Callable[..., str]:
    def here(*arguments: str, status: int = 0) -> str:
        done = run_here("settings", *arguments, columns=200)
        assert done.returncode == status, done.stderr
        return done.stdout if status == 0 else done.stderr

    return here


@pytest.mark.parametrize("name", sorted(path.name for path in FILES.iterdir() if path.name != "s3_24gb.yaml"))
def test_every_team_s_file_is_shown(settings: Callable[..., str], name: str) -> None:
    page = settings(str(FILES / name))
    assert page.splitlines()[1].split() == ["their", "key", "our", "argument", "value", "remark"]
    assert "num_workers" in page and "will hurt" in page


def test_the_page_names_the_files_keys_penstocks_arguments_and_the_changes(settings: Callable[..., str]) -> None:
    page = settings(str(FILES / "s4_usual.yaml"))
    row = next(line for line in page.splitlines() if "CACHE_SIZE_GB" in line)
    assert row.split()[:4] == ["DATA.CACHE_SIZE_GB", "cache", "50.0", "GiB"]
    assert "workers-not-kept: persistent_workers is off" in page and "fix: set persistent_workers to true" in page


def test_json_has_arguments_rows_and_findings_for_evaluation_too(settings: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("dataloader_prefetch_per_worker = 1\nnum_workers = 5000\n[eval]\nbatch_size = 2\n")
    answer = json.loads(settings(str(path), "--section", "eval", "--json"))
    assert answer["arguments"] == {"batch_size": 2, "num_workers": 5000, "prefetch_factor": 1}
    assert answer["file"] == str(path) and answer["section"] == "eval"
    rows = {row["key"]: row for row in answer["entries"]}
    assert rows["dataloader_prefetch_per_worker"]["argument"] == "prefetch_factor"
    assert rows["dataloader_prefetch_per_worker"]["remark"] == "from training"
    worst = answer["findings"][0]
    assert (worst["id"], worst["severity"]) == ("workers-over-cpus", "hurts") and "num_workers=5000" in worst["what"]


def test_an_unusable_file_gives_one_line_and_status_1(settings: Callable[..., str], tmp_path: Path) -> None:
    error = settings(str(FILES / "s3_24gb.yaml"), status=1)
    assert error.count("\n") == 1 and "train_ds.batch_size='16-32' is a range" in error
    assert "No such file" in settings(str(tmp_path / "none.yaml"), status=1)
    assert "neither training nor evaluation" in settings(str(FILES / "s0.toml"), "--section", "x", status=2)
    settings(status=2)


def test_the_command_does_not_import_torch() -> None:
    code = (
        "import sys; from penstock.cli.app import run\n"
        f"assert run(['settings', {str(FILES / 's0.toml')!r}]) == 0 and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
