"""`penstock doctor TARGET` as people run it, on datasets in files of their own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support.ready_python import ReadyPython

DATASETS = """
from torch.utils.data import Dataset, IterableDataset
from penstock.data.shared.shared_list import SharedList

class Paths(Dataset):
    def __init__(self, paths):
        self.paths = paths
    def __len__(self):
        return len(self.paths)
    def __getitem__(self, index):
        return self.paths[index]

class Stream(IterableDataset):
    def __iter__(self):
        return iter([1])

def names():
    return (f"images/train/{number:08d}.jpg" for number in range(1_000_000))

def costly():
    return Paths(list(names()))

def shared():
    return Paths(SharedList(names()))

def failing():
    raise RuntimeError("the disk is not there")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(DATASETS)
    return tmp_path


Doctor = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def doctor(folder: Path, python: ReadyPython) -> Doctor:
    return lambda *arguments: python.run_command("doctor", *arguments, folder=folder)


def test_a_list_of_a_million_paths_is_found_with_its_cost_and_its_remedy(doctor: Doctor) -> None:
    done = doctor("mine.py:costly", "--json")
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    assert answer["dataset"]["type"] == "mine.Paths"
    assert answer["dataset"]["length"] == 1_000_000
    (container,) = answer["dataset"]["containers"]
    assert container["path"] == "dataset.paths"
    assert container["kind"] == "list"
    assert container["items"] == 1_000_000
    assert container["per_worker_bytes"] == pytest.approx(80_000_000, rel=0.1)
    assert container["bytes"] == pytest.approx(88_000_000, rel=0.1)
    (finding,) = [finding for finding in answer["findings"] if finding["id"] == "python-containers"]
    assert finding["severity"] in ("warning", "hurts")
    assert "penstock.data.SharedList" in finding["fix"]
    assert answer["memory"]["limit_bytes"] > 0


def test_a_shared_list_of_paths_is_no_finding(doctor: Doctor) -> None:
    answer = json.loads(doctor("mine.py:shared", "--json").stdout)
    (container,) = answer["dataset"]["containers"]
    assert (container["kind"], container["per_worker_bytes"]) == ("SharedList", 0)
    assert "python-containers" not in {finding["id"] for finding in answer["findings"]}


def test_the_page_fits_80_columns_and_names_the_container(doctor: Doctor) -> None:
    done = doctor("mine:costly")
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    words = " ".join(done.stdout.split())
    assert "What the dataset holds" in words
    assert "python-containers" in words
    assert "dataset.paths" in words


def test_a_stream_has_no_length(doctor: Doctor) -> None:
    answer = json.loads(doctor("mine.py:Stream", "--json").stdout)
    assert answer["dataset"] == {"type": "mine.Stream", "length": None, "containers": [], "complete": True}


@pytest.mark.parametrize(
    ("target", "status", "said"),
    [
        ("mine.py:failing", 1, "the disk is not there"),
        ("mine.py:nothing", 2, "has no 'nothing'"),
        ("absent.py:x", 2, "no file absent.py"),
        ("mine.py", 2, "names no attribute"),
    ],
)
def test_a_wrong_target_is_an_error_and_nothing_is_printed(doctor: Doctor, target: str, status: int, said: str) -> None:
    done = doctor(target)
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_without_a_target_the_answer_has_no_dataset(doctor: Doctor) -> None:
    assert "dataset" not in json.loads(doctor("--json").stdout)


def test_the_workers_option_sets_the_number_of_workers(doctor: Doctor) -> None:
    answer = json.loads(doctor("mine.py:costly", "--json", "--workers", "12").stdout)
    (finding,) = [finding for finding in answer["findings"] if finding["id"] == "python-containers"]
    assert " for 12 workers (" in finding["what"]
    for wrong in (("mine.py:costly", "--workers", "0"), ("--workers", "3")):
        done = doctor(*wrong)
        assert done.returncode == 2 and "--workers" in done.stderr
