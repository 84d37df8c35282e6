"""TARGET gives the user's dataset, or an error about the name or the user's code."""

from __future__ import annotations

import pickle
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")

import click
import torch
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from penstock.cli.target import TargetError, load_function, load_target, unreadable

SOURCE = """
import torch
class Squares(torch.utils.data.Dataset):
    def __init__(self, count=10):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return index * index
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(3))
class Callable(Squares):
    def __call__(self):
        raise AssertionError("this dataset is not to be called")
made = Squares(3)
called = Callable(4)
plain = [1, 2, 3]
number = 7
class Shelf:
    made = Squares(5)
def make():
    return Squares(6)
def generate():
    yield 1
class Endless:
    def __getitem__(self, index):
        return index
def fails():
    return {}["missing"]
def collate(samples):
    return samples
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own_data.py").write_text(SOURCE)
    (tmp_path / "own_broken.py").write_text("import no_such_thing_anywhere\n")
    (tmp_path / "own_raising.py").write_text("raise ValueError('on purpose')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]


@pytest.mark.parametrize("where", ["own_data", "own_data.py", "./own_data.py"])
@pytest.mark.parametrize(
    ("attribute", "length"), [("made", 3), ("Squares", 10), ("make", 6), ("called", 4), ("plain", 3), ("Shelf.made", 5)]
)
def test_a_target_is_a_dataset_or_a_function_that_returns_one(where: str, attribute: str, length: int) -> None:
    assert len(load_target(f"{where}:{attribute}")) == length


def test_a_file_in_another_folder_can_import_its_neighbours(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "own_second.py").write_text("from own_data import made\n")
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert len(load_target("../own_second.py:made")) == 3
    assert list(load_target(f"{here}/own_data.py:Stream")) == [0, 1, 2]


def test_spawned_workers_find_the_module_by_name() -> None:
    dataset = load_target("own_data.py:made")
    assert sys.modules[type(dataset).__module__].__file__ == str(Path.cwd() / "own_data.py")


def test_load_function_does_not_call_the_function() -> None:
    assert load_function("own_data:collate")([1]) == [1]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("own_data", "names no attribute"),
        (":made", "names no attribute"),
        ("own_data:", "names no attribute"),
        ("nowhere.py:made", "there is no file nowhere.py"),
        ("no_such_module:made", "there is no module no_such_module"),
        ("own_data.inner:made", "there is no module own_data.inner"),
        ("own_data:maid", "own_data has no 'maid'; it has"),
        ("own_data:number", "is an int, which is not a dataset"),
        ("own_data:Shelf.maid", "own_data.Shelf has no 'maid'; it has made"),
        ("own_data:generate", "can only be iterated"),
        ("own_data:Endless", "has no __len__"),
    ],
)
def test_a_wrong_name_is_wrong_usage(target: str, said: str) -> None:
    with pytest.raises(click.BadParameter, match=said.replace(".", r"\.")):
        load_target(target)


def test_a_files_own_names_are_suggested_before_imported_ones(here: Path) -> None:
    (here / "own_names.py").write_text("import os\nfrom pathlib import Path\nhome = Path()\ndef make(): pass\n")
    with pytest.raises(click.BadParameter, match=r"has no 'maid'; it has home, make, Path$"):
        load_target("own_names.py:maid")


def test_a_number_is_not_a_function() -> None:
    with pytest.raises(click.BadParameter, match="cannot be called"):
        load_function("own_data:number")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("own_data:fails", ["own_data:fails() failed", 'return {}["missing"]', "KeyError: 'missing'"]),
        ("own_broken:made", ["importing own_broken failed", "no_such_thing_anywhere"]),
        ("own_raising.py:made", ["importing own_raising.py failed", "ValueError: on purpose"]),
    ],
)
def test_a_failure_in_the_users_code_is_shown_where_it_happened(target: str, said: list[str]) -> None:
    with pytest.raises(TargetError) as caught:
        load_target(target)
    text = str(caught.value)
    assert all(part in text for part in said)
    assert "importlib" not in text and "target.py" not in text


def test_each_file_runs_once(here: Path) -> None:
    counting = "from pathlib import Path\nwith Path('runs').open('a') as file:\n    file.write('x')\n"
    (here / "own_counting.py").write_text(counting + "class Made(list):\n    pass\ndef make():\n    return Made([1])\n")
    first = load_target("own_counting.py:make")
    again = load_target("./own_counting.py:make")
    assert type(again) is type(first) and pickle.loads(pickle.dumps(first)) == [1]
    assert load_function("own_counting.py:make").__globals__ is sys.modules["own_counting"].__dict__
    assert (here / "runs").read_text() == "x"
    (here / "other").mkdir()
    (here / "other" / "own_counting.py").write_text(counting + "make = [2, 3]\n")
    assert load_target("other/own_counting.py:make") == [2, 3]
    assert pickle.loads(pickle.dumps(load_target("own_counting.py:make"))) == [1]
    assert (here / "runs").read_text() == "xx"


def test_a_file_that_failed_runs_again(here: Path) -> None:
    with pytest.raises(TargetError):
        load_target("own_raising.py:made")
    (here / "own_raising.py").write_text("made = [1]\n")
    assert load_target("own_raising.py:made") == [1]


@pytest.mark.parametrize("closed", ["", ">&-", "2>&-"])
def test_prints_go_to_stderr_unless_it_is_closed(closed: str) -> None:
    code = """
import os
from penstock.cli.target import prints_to_stderr
with prints_to_stderr():
    os.system("echo aside")
print("answer")
"""
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    if not closed:
        assert (done.stdout, done.stderr) == ("answer\n", "aside\n")


RAGGED = [torch.zeros(4), torch.zeros(5)]


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("make", [TorchDataLoader, penstock.DataLoader])
def test_samples_that_torch_cannot_collate_ask_for_a_collate_function(make: Any, workers: int) -> None:
    with pytest.raises(Exception, match=r"equal size|not resizable") as raised:
        list(make(RAGGED, 2, num_workers=workers))
    line = str(unreadable("mine.py:Ragged", raised.value, has_collate=False))
    assert line.startswith("mine.py:Ragged failed while it was read: RuntimeError: ") and "\n" not in line
    assert line.endswith("give a function that makes a batch of these samples: --collate file.py:function, "
                         "or collate_fn= in a program")  # fmt: skip
    # With a collate function there is nothing to suggest.
    assert "--collate" not in str(unreadable("mine.py:Ragged", raised.value, has_collate=True))
    assert "--collate" not in str(unreadable("mine.py:Ragged", ValueError("broken"), has_collate=False))
