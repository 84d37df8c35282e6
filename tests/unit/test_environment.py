"""Environment variables: which one counts, and what happens to one that makes no sense."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock import environment
from penstock.errors import ConfigError


def test_state_folder_follows_the_variables_and_survives_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_HOME", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert environment.state_folder() == tmp_path / "state" / "penstock"
    monkeypatch.setenv("XDG_STATE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert environment.state_folder() == tmp_path / ".local" / "state" / "penstock"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_HOME", "mine")
    assert environment.state_folder() == tmp_path / "mine"


def test_runtime_folder_must_exist_and_belong_to_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert environment.runtime_folder() == tmp_path
    for unusable in ("", "relative", str(tmp_path / "missing")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
        assert environment.runtime_folder() is None


def test_ranks_without_a_launcher_are_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
    assert (environment.global_rank(), environment.world_size(), environment.local_ranks()) == (0, 1, 1)
    assert environment.local_ranks(default=4) == 4
    assert environment.launcher_ranks() == {}


def test_a_rank_that_is_not_a_number_is_refused_but_does_not_stop_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match="RANK='first' is not a whole number"):
        environment.global_rank()
    assert environment.launcher_ranks()["world_size"] == 8 and "rank" not in environment.launcher_ranks()


def test_no_other_file_reads_the_environment() -> None:
    top = Path(penstock.__file__).parent
    readers = [
        str(file.relative_to(top))
        for file in top.rglob("*.py")
        if re.search(r"\bos\.(environ|getenv)\b|from os import .*(environ|getenv)", file.read_text("utf-8"))
    ]
    assert readers == ["environment.py"]


def test_environment_loads_without_torch() -> None:
    check = "import sys, penstock.environment; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
