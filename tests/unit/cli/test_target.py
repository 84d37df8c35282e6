"""TARGET finds the user's dataset, or says what is wrong with the name or with the user's code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from penstock.cli.target import TargetError, load_function, load_target

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
def test_a_dataset_is_found_or_made(where: str, attribute: str, length: int) -> None:
    assert len(load_target(f"{where}:{attribute}")) == length


def test_a_file_elsewhere_can_import_what_lies_beside_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "own_second.py").write_text("from own_data import made\n")
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert len(load_target("../own_second.py:made")) == 3
    assert list(load_target(f"{here}/own_data.py:Stream")) == [0, 1, 2]


def test_workers_that_start_afresh_find_the_module_by_name() -> None:
    dataset = load_target("own_data.py:made")
    assert sys.modules[type(dataset).__module__].__file__ == str(Path.cwd() / "own_data.py")


def test_a_function_is_left_as_it_is() -> None:
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
        ("own_data:number", "is an int, which is no dataset"),
        ("own_data:Shelf.maid", "own_data.Shelf has no 'maid'; it has made"),
        ("own_data:generate", "can only be iterated"),
        ("own_data:Endless", "has no __len__"),
    ],
)
def test_a_wrong_name_is_wrong_usage(target: str, said: str) -> None:
    with pytest.raises(click.BadParameter, match=said.replace(".", r"\.")):
        load_target(target)


def test_a_number_is_no_function() -> None:
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
