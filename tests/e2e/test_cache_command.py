"""`penstock cache` on live, stale and disk caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import penstock
from support.ready_python import ReadyPython

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memfd")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    yield
    assert not list((tmp_path / "run" / "penstock").glob("*")), "a cache's file was left behind"


def run(*arguments: str, status: int = 0) -> str:
    command = [sys.executable, "-m", "penstock", "cache", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr


def test_a_live_cache_is_listed_counted_and_cleared_while_it_is_used(tmp_path: Path) -> None:
    assert run("list").startswith("no caches on this node")
    assert json.loads(run("list", "--json")) == []
    with penstock.Cache("16MiB", name="frames") as cache:
        for number in range(10):
            cache.put(number, torch.zeros(100_000))
        assert cache.get(3) is not None and cache.get("nothing") is None
        listed = run("list").splitlines()
        assert listed[0].split() == ["cache", "state", "items", "memory", "hit", "rate", "processes"]
        assert listed[1].split()[:3] == ["frames", "live", "10"] and "50.00%" in listed[1]
        assert str(os.getpid()) in listed[1]
        (found,) = json.loads(run("list", "--json"))
        assert found["figures"]["items"] == 10 and found["figures"]["limit_bytes"] == 16 << 20
        shown = run("stats", "frames")
        assert "- items: 10" in shown and "- hit_rate: 50.00%" in shown
        assert json.loads(run("stats", "frames", "--json"))["pids"] == [os.getpid()]
        before = cache.stats().bytes
        assert run("clear", "frames").startswith("cleared frames: 10 items")
        assert cache.stats().items == 0 and cache.stats().bytes < before / 10
        assert cache.put("after", 1) and cache.get("after") == 1


def test_stale_caches_are_shown_and_removed(python: ReadyPython) -> None:
    code = "import os, penstock; cache = penstock.Cache('4MiB', name='gone'); cache.put(1, 1); os._exit(1)"
    python.run(code)
    assert "stale" in run("list")
    assert run("clear", "--stale") == "removed 1 stale cache: gone\n"
    assert run("list").startswith("no caches on this node")
    assert run("clear", "--stale") == "removed 0 stale caches\n"


def test_a_disk_cache_is_named_by_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "latents"
    with penstock.Cache("4MiB", disk=folder) as cache:
        cache.put("here", torch.zeros(1000))
    assert "disk" in run("list", str(folder))
    assert "- items: 1" in run("stats", str(folder))
    assert run("clear", str(folder)).startswith(f"cleared {folder}: 1 item,")
    with penstock.Cache("4MiB", disk=folder) as cache:
        assert cache.get("here") is None


def test_an_unknown_cache_is_one_line_with_the_known_names() -> None:
    with penstock.Cache("4MiB", name="frames"):
        error = run("stats", "frame", status=1)
        assert error.count("\n") == 1 and "no cache called 'frame'" in error and "known caches: frames" in error
    assert "give the names" in run("clear", status=2)


@pytest.mark.parametrize("command", ["stats", "list", "clear"])
def test_a_folder_that_cannot_be_entered_is_one_line(command: str) -> None:
    folder = "/" + "long" * 100  # which no user can enter, not even root
    assert run(command, folder, status=1) == f"penstock: {folder} cannot be read: File name too long\n"


def test_the_command_does_not_import_torch() -> None:
    code = (
        "import sys; from penstock.cli.app import run\n"
        "assert run(['cache', 'list']) == 0 and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
