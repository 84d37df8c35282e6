"""TARGET on the command line: the user's own dataset, by name.

In:  ``module:attribute`` or ``file.py:attribute``.
Out: the dataset, made if the attribute is a function or class that makes one.
Runs in: command line.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from penstock.errors import PenstockError

_FORM = "TARGET is module:attribute or file.py:attribute, for example train.py:make_dataset"

_NOT_THE_USERS = ("<frozen", __file__, str(Path(importlib.__file__).parent))


class TargetError(PenstockError):
    """The user's code failed while it was asked for the dataset."""


def load_target(target: str) -> Any:
    """The dataset ``target`` names. Wrong usage is a click error; an exception in the user's code, a TargetError."""
    value = _attribute(target)
    if isinstance(value, type) or (callable(value) and not _is_dataset(value)):
        try:
            value = value()
        except Exception as error:
            raise failed(f"{target}() failed", error) from error
    problem = _problem_with(value)
    if problem is not None:
        raise _wrong(f"{target} is {_a(value)}, which is no dataset: {problem}")
    return value


def load_function(target: str) -> Any:
    """The function ``target`` names."""
    value = _attribute(target)
    if not callable(value):
        raise _wrong(f"{target} is {_a(value)}, which cannot be called")
    return value


def _attribute(target: str) -> Any:
    where, found, attribute = target.rpartition(":")
    if not found or not where or not attribute:
        raise _wrong(f"{target!r} names no attribute. {_FORM}")
    value: Any = _module(where)
    path = where
    for name in attribute.split("."):
        if not hasattr(value, name):
            known = ", ".join(n for n in getattr(value, "__dict__", {}) if not n.startswith("_"))
            raise _wrong(f"{path} has no {name!r}" + (f"; it has {known}" if known else ""))
        value, path = getattr(value, name), f"{path}.{name}"
    return value


def _wrong(message: str) -> click.BadParameter:
    return click.BadParameter(message, param_hint="TARGET")


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _is_dataset(value: Any) -> bool:
    return hasattr(type(value), "__getitem__") or hasattr(type(value), "__iter__")


def _problem_with(value: Any) -> str | None:
    from torch.utils.data import IterableDataset

    if isinstance(value, IterableDataset):
        return None
    if hasattr(type(value), "__getitem__"):
        return None if hasattr(type(value), "__len__") else "it has no __len__, so nobody knows which indices there are"
    if hasattr(type(value), "__iter__"):
        return "it can only be iterated; make it a torch.utils.data.IterableDataset"
    return "it has neither __getitem__ nor __iter__"


def _module(where: str) -> ModuleType:
    is_file = where.endswith(".py")
    if is_file and not Path(where).is_file():
        raise _wrong(f"there is no file {where} in {Path.cwd()}")
    # Workers that start afresh import the module again, by name.
    folder = str(Path(where).resolve().parent) if is_file else str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = Path(where).stem if is_file else where
    try:
        return _from_file(name, Path(where)) if is_file else importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name is not None and name.split(".")[: missing.name.count(".") + 1] == missing.name.split("."):
            raise _wrong(f"there is no module {name}. {_FORM}") from None
        raise failed(f"importing {where} failed", missing) from missing
    except Exception as error:
        raise failed(f"importing {where} failed", error) from error


def _from_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        raise
    return module


def failed(what: str, error: BaseException) -> TargetError:
    """The user's own frames, without ours or the import system's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    lines = "".join([*traceback.format_list(own), *traceback.format_exception_only(error)]).rstrip()
    return TargetError(f"{what}\n{lines}")
