"""TARGET on the command line: the user's own dataset, by name.

In:  ``module:attribute`` or ``file.py:attribute``.
Out: the dataset; if the attribute is a function or class, its result.
Runs in: command line.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from penstock.errors import PenstockError
from penstock.planner.wording import GIVE_COLLATE

_FORM = "TARGET is module:attribute or file.py:attribute, for example train.py:make_dataset"

_FILES: dict[Path, ModuleType] = {}
"""Files that have run. Each file runs once: a second run would repeat its effects and define new classes with the same
names."""

_NOT_THE_USERS = ("<frozen", __file__, str(Path(importlib.__file__).parent))
_COLLATE_FILE = str(Path("torch", "utils", "data", "_utils", "collate.py"))


class TargetError(PenstockError):
    """The user's code failed while it made the dataset."""


def load_target(target: str) -> Any:
    """The dataset called ``target``. Raises a click error for wrong usage, TargetError for an error in the user's
    code."""
    value = _attribute(target)
    if isinstance(value, type) or (callable(value) and not _is_dataset(value)):
        try:
            value = value()
        except Exception as error:
            raise failed(f"{target}() failed", error) from error
    problem = _problem_with(value)
    if problem is not None:
        raise _wrong(f"{target} is {_a(value)}, which is not a dataset: {problem}")
    return value


def load_function(target: str) -> Any:
    """The function called ``target``."""
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
            known = ", ".join(_own_names(value))
            raise _wrong(f"{path} has no {name!r}" + (f"; it has {known}" if known else ""))
        value, path = getattr(value, name), f"{path}.{name}"
    return value


def _own_names(value: Any) -> list[str]:
    """The public names of a value. For a module, names defined in it come before imported names; imported modules are
    left out."""
    names = {name: each for name, each in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
    if not isinstance(value, ModuleType):
        return list(names)
    here = value.__name__
    imported = [name for name, each in names.items() if hasattr(each, "__qualname__") and each.__module__ != here]
    own = [name for name, each in names.items() if name not in imported and not isinstance(each, ModuleType)]
    return own + imported


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Text that the user's code prints, in workers too, goes to stderr: programs read the answer from stdout."""
    if sys.stdout is None or sys.stderr is None:  # closed before the start
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _wrong(message: str) -> click.BadParameter:
    return click.BadParameter(message, param_hint="TARGET")


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _is_dataset(value: Any) -> bool:
    return hasattr(type(value), "__getitem__") or hasattr(type(value), "__iter__")


def _problem_with(value: Any) -> str | None:
    from torch.utils.data import IterableDataset

    if isinstance(value, IterableDataset):
        return None
    if hasattr(type(value), "__getitem__"):
        return None if hasattr(type(value), "__len__") else "it has no __len__, so its indices are unknown"
    if hasattr(type(value), "__iter__"):
        return "it can only be iterated; make it a torch.utils.data.IterableDataset"
    return "it has neither __getitem__ nor __iter__"


def _module(where: str) -> ModuleType:
    is_file = where.endswith(".py")
    if is_file and not Path(where).is_file():
        raise _wrong(f"there is no file {where} in {Path.cwd()}")
    # Workers started by spawn import the module again, by name.
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
    known = _FILES.get(path.resolve())
    if known is not None:
        # Pickle looks classes up by the module's name, and another file may have taken that name.
        sys.modules[name] = known
        return known
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
    _FILES[path.resolve()] = module
    return module


def unreadable(target: str, error: Exception, *, has_collate: bool) -> PenstockError:
    """The exception of a dataset that failed while it was read, in one line. ``has_collate``: whether the user gave a
    collate function."""
    if isinstance(error, PenstockError):
        return PenstockError(f"{target}: {' '.join(str(error).split())}")
    # The message of a worker's exception is a whole traceback; the last line is the exception itself.
    last = traceback.format_exception_only(error)[-1].rstrip().rpartition("\n")[2]
    advice = "" if has_collate or not _is_torchs_collate(error) else f"; {GIVE_COLLATE}"
    return PenstockError(f"{target} failed while it was read: {last}{advice}")


def _is_torchs_collate(error: Exception) -> bool:
    """Whether torch's own collate function raised the error, here or in a worker (its traceback is in the message)."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any(_COLLATE_FILE in each for each in (*files, str(error)))


def failed(what: str, error: BaseException) -> TargetError:
    """An error with the frames of the user's code, without penstock's and the import system's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    lines = "".join([*traceback.format_list(own), *traceback.format_exception_only(error)]).rstrip()
    return TargetError(f"{what}\n{lines}")
