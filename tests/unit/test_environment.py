"""Environment variables: which one counts, and what happens to one that makes no sense."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from penstock import environment
from penstock.cache import registry
from penstock.errors import ConfigError, PenstockError
from penstock.lab.tune_records import keep
from support.recorded_runs import begin_run


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


def without_home(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> Path:
    """A user with no home and no runtime folder, as in many containers. Returns its folder in the temporary one."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("PENSTOCK_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    return temporary / f"penstock-{os.getuid()}"


def test_without_a_home_a_recorded_run_leaves_folders_that_the_cache_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = without_home(monkeypatch, tmp_path)
    with begin_run(environment.state_folder()):
        assert registry.folder() == below
        for folder in (below, below / "state", below / "state" / "runs"):
            assert folder.stat().st_mode & 0o777 == 0o700, folder


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user")
@pytest.mark.parametrize("squat", [lambda path: path.mkdir(mode=0o777), lambda path: path.symlink_to("/")])
def test_without_a_home_a_folder_that_another_user_has_put_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squat: Callable[[Path], None]
) -> None:
    below = without_home(monkeypatch, tmp_path)
    squat(below)
    os.chown(below, 4711, 4711, follow_symlinks=False)
    for use in (environment.state_folder, lambda: environment.user_cache_folder("shards"), registry.folder):
        with pytest.raises(PenstockError, match=r"belongs to user 4711.*TMPDIR or XDG_RUNTIME_DIR"):
            use()
    assert below.is_symlink() or not list(below.iterdir())


def test_folders_of_records_are_private_whichever_command_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_HOME", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    keep("numbers:dataset", {})
    for folder in ("state", "state/penstock", "state/penstock/tune"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700, folder
    (tmp_path / "state/penstock").chmod(0o755)  # as earlier versions made it
    (tmp_path / "state/penstock/tune").chmod(0o755)
    keep("numbers:dataset", {})
    for folder in ("state/penstock", "state/penstock/tune"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700, folder


def test_a_folder_that_the_user_chose_keeps_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    with begin_run(environment.state_folder()):
        assert tmp_path.stat().st_mode & 0o777 == 0o755
        assert (tmp_path / "runs").stat().st_mode & 0o777 == 0o700


def test_a_home_that_cannot_be_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", "~nosuchuser/x")
    with pytest.raises(ConfigError, match="PENSTOCK_HOME='~nosuchuser/x' is not a folder"):
        environment.state_folder()


def test_ranks_without_a_launcher_are_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
    assert (environment.global_rank(), environment.world_size(), environment.local_ranks()) == (0, 1, 1)
    assert environment.local_ranks(default=4) == 4
    assert environment.launcher_ranks() == {}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "6"}, 3),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "5"}, 5),
        ({"SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "4"}, 4),
        ({"SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, 2),
        # Lightning on one node, and on the first and a later one of several.
        ({"LOCAL_RANK": "0", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, 2),
        ({"LOCAL_RANK": "3", "NODE_RANK": "2", "RANK": "19", "WORLD_SIZE": "32"}, 8),
        ({"LOCAL_RANK": "0", "NODE_RANK": "0", "WORLD_SIZE": "32", "SLURM_NNODES": "4"}, 8),
        ({"LOCAL_RANK": "0", "NODE_RANK": "0", "WORLD_SIZE": "32"}, 32),
        # Lightning deletes WORLD_SIZE when it is done.
        ({"LOCAL_RANK": "1", "NODE_RANK": "0"}, 2),
        ({"WORLD_SIZE": "64", "RANK": "5"}, 1),
    ],
    ids=str,
)
def test_the_ranks_of_this_node_are_found_whatever_the_launcher(
    variables: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment.local_ranks() == expected


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
