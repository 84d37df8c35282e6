"""A dataset's fingerprint: a digest of its code and attributes, which identifies its samples.

In:  a dataset.
Out: a text that is the same in every process and run, until the class, a transform or an argument changes.
Runs in: trainer.

It covers the code of classes and functions, what that code refers to by name in its module, and the attributes of
objects and classes, at any depth. Of objects without visible attributes, it covers what pickle would store; of
installed packages, name and version; of objects that hold no data (open files, locks, random generators), only the
type. It does not cover the files that a dataset reads, with two exceptions: files of penstock.data's datasets and of
mapped arrays are covered by size and modification time.
"""

from __future__ import annotations

import contextlib
import copyreg
import enum
import functools
import hashlib
import inspect
import io
import logging
import os
import random
import sys
import types
import warnings
import weakref
from collections.abc import Iterable, Mapping, Set
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from penstock.arena.codec import bytes_of

_DEEPEST = 40
_SIMPLE = (str, int, float, bool, type(None), bytes, complex)
_AT_A_TIME = 1000
_INSTALLED = ("site-packages", "dist-packages")
_STANDARD = str(Path(os.__file__).parent)


def fingerprint_of(dataset: Any) -> str:
    taken = hashlib.blake2b(digest_size=16)
    _Digester(taken).add(dataset, 0)
    if hasattr(dataset, "__len__"):
        taken.update(b"len%d" % len(dataset))
    return taken.hexdigest()


def fingerprint_again(dataset: Any) -> str:
    """A dataset's fingerprint; warns if it differs from the previous fingerprint of the same dataset."""
    found = fingerprint_of(dataset)
    before = _fingerprints.get(id(dataset))
    if before is not None and before[0]() is dataset and before[1] != found:
        warnings.warn(
            f"An attribute or the code of this {type(dataset).__name__} has changed since its samples were cached, so "
            "the cached samples are not used. If the change does not affect the samples (a file opened late, a "
            "counter), pass fingerprint= to wrap() or precompute().",
            RuntimeWarning,
            stacklevel=3,
        )
    with contextlib.suppress(TypeError):
        # Removed with the dataset, because another object may get its id.
        gone = functools.partial(_fingerprints.pop, id(dataset), None)
        _fingerprints[id(dataset)] = (weakref.ref(dataset, lambda _: gone()), found)
    return found


_fingerprints: dict[int, tuple[Any, str]] = {}
"""The last fingerprint of each dataset that is still alive, by the id of the dataset."""


class _Digester:
    def __init__(self, taken: Any) -> None:
        self._taken = taken
        self._seen: dict[int, tuple[int, Any]] = {}
        """Id of an object met before -> its number, and the object, which stays alive so that no other object gets its
        id."""

    def _note(self, *words: object) -> None:
        for word in words:
            text = word if isinstance(word, bytes) else str(word).encode("utf-8", "surrogatepass")
            self._taken.update(b"%d:" % len(text) + text)

    def add(self, value: Any, depth: int) -> None:
        kind = type(value)
        self._note(_file_of(kind.__module__), kind.__qualname__)
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, PurePath, enum.Enum)):
            self._note(value if isinstance(value, bytes) else repr(value))
        elif isinstance(value, (torch.dtype, torch.device, np.dtype, np.generic)):
            self._note(str(value))
        elif id(value) in self._seen:
            # The object was met before, such as a list that contains itself, or a transform that is used twice.
            self._note("again", self._seen[id(value)][0])
        elif depth < _DEEPEST and not _has_no_data(value):
            self._seen[id(value)] = len(self._seen), value
            self._add_contents(value, depth + 1)

    def _add_contents(self, value: Any, depth: int) -> None:
        if isinstance(value, (np.ndarray, torch.Tensor)):
            self._add_array(value)
        elif _is_ours(value):
            self.add(value.made_of(), depth)
        elif isinstance(value, Mapping):
            self._add_items((part for item in value.items() for part in item), len(value), depth)
        elif isinstance(value, Set):
            self._add_items(sorted(map(repr, value)), len(value), depth)
        elif isinstance(value, range):
            self._note(repr(value))
        elif isinstance(value, (list, tuple)):
            self._add_items(value, len(value), depth)
        elif isinstance(value, functools.partial):
            self._add_items((value.func, value.args, value.keywords), 3, depth)
        elif isinstance(value, types.MethodType):
            self._add_items((value.__func__, value.__self__), 2, depth)
        elif isinstance(value, (type, types.FunctionType)):
            self._add_code(value, depth)
        elif isinstance(value, types.BuiltinFunctionType):
            self._note(_file_of(value.__module__), value.__qualname__)
            self.add(value.__self__, depth)
        else:
            self._add_code(type(value), depth)
            held = {**getattr(value, "__dict__", {}), **_slots_of(value)}
            self._add_items((part for item in sorted(held.items()) for part in item), len(held), depth)
            if not held:
                self._add_pickled(value, depth)

    def _add_pickled(self, value: Any, depth: int) -> None:
        try:
            reducer = copyreg.dispatch_table.get(type(value))
            reduced = value.__reduce_ex__(4) if reducer is None else reducer(value)
        except Exception:
            # Open files and locks cannot be pickled, and samples do not depend on them.
            return
        self.add(reduced, depth)

    def _add_items(self, items: Iterable[Any], count: int, depth: int) -> None:
        self._note("items", count)
        plain: list[str] = []
        for item in items:
            # For plain values their texts suffice, which are added quickly even for a million paths and labels.
            if is_plain := _is_plain(item, 3):
                plain.append(repr(item))
            if len(plain) >= _AT_A_TIME or (plain and not is_plain):
                self._note("\0".join(plain))
                plain.clear()
            if not is_plain:
                self.add(item, depth)
        self._note("\0".join(plain))

    def _add_code(self, value: Any, depth: int) -> None:
        self._note(_file_of(value.__module__), value.__qualname__)
        if isinstance(value, types.FunctionType):
            self._add_function(value, depth)
            return
        for kind in value.__mro__:
            self._note(kind.__qualname__)
            if self._is_installed(kind.__module__):
                continue
            for name, part in sorted(vars(kind).items()):
                part = getattr(part, "__func__", part)
                for each in (part.fget, part.fset) if isinstance(part, property) else (part,):
                    if isinstance(each, types.FunctionType):
                        self._note(name)
                        self._add_function(each, depth)
                    elif not name.startswith("__") and not hasattr(each, "__get__"):
                        self._note(name)
                        self.add(each, depth)

    def _is_installed(self, module: str | None) -> bool:
        """Whether a module belongs to Python or to an installed package, whose version is noted instead of its code."""
        top = (module or "").partition(".")[0]
        where = getattr(sys.modules.get(module or ""), "__file__", None)
        if where is None:
            return module not in ("__main__", None) and top not in ("__main__", "__mp_main__")
        # penstock always counts as installed: the state that its modules keep changes with every use.
        if top != "penstock" and not where.startswith(_STANDARD) and not any(part in where for part in _INSTALLED):
            return False
        self._note(top, getattr(sys.modules.get(top), "__version__", ""))
        return True

    def _add_function(self, function: types.FunctionType, depth: int) -> None:
        if self._is_installed(function.__module__):
            self._note(function.__qualname__)
            return
        self._add_source(function.__code__)
        for name in _names_in(function.__code__):
            if name in function.__globals__:
                self._note(name)
                self.add(function.__globals__[name], depth)
        self._add_items((function.__defaults__, function.__kwdefaults__), 2, depth)
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents, depth)
            except ValueError:
                self._note("empty")

    def _add_source(self, code: types.CodeType) -> None:
        try:
            self._note(inspect.getsource(code))
        except (OSError, TypeError):
            # The code was typed in, or created by exec.
            self._note_bytecode(code)
        if code.co_name == "<lambda>":
            # Two lambdas on one line have the same source.
            self._note_bytecode(code)

    def _note_bytecode(self, code: types.CodeType) -> None:
        self._note(code.co_code, code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._note_bytecode(constant)
            else:
                self._note(repr(constant))

    def _add_array(self, value: np.ndarray | torch.Tensor) -> None:
        self._note(value.dtype, tuple(value.shape))
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.device.type == "meta" or value.is_quantized:
                return
            flat = value.detach().resolve_conj().resolve_neg().reshape(-1).cpu().contiguous()
            raw = bytes_of(flat) if flat.numel() else np.empty(0, np.uint8)
        elif value.dtype.hasobject:
            self._add_items(value.reshape(-1).tolist(), value.size, _DEEPEST - 1)
            return
        elif isinstance(value, np.memmap) and value.filename is not None:
            found = Path(value.filename).stat()
            self._note(value.filename, value.offset, found.st_size, found.st_mtime_ns)
            return
        else:
            raw = np.ascontiguousarray(value.reshape(-1)).view(np.uint8)
        self._note("bytes", len(raw))
        self._taken.update(raw.data)


_NO_DATA = (
    types.ModuleType, logging.Logger, io.IOBase, random.Random, torch.Generator, np.random.Generator,
    np.random.RandomState, types.GeneratorType,
)  # fmt: skip


def _file_of(module: str | None) -> str:
    """The name of a module's file. A class has the same fingerprint in the script that defines it (``__main__``) and
    where that script is imported."""
    last = (module or "").rpartition(".")[2]
    if last not in ("__main__", "__mp_main__"):
        return last
    return Path(getattr(sys.modules.get(last), "__file__", None) or last).stem


def _is_ours(value: Any) -> bool:
    return not isinstance(value, type) and type(value).__module__.partition(".")[0] == "penstock"


def _has_no_data(value: Any) -> bool:
    """Whether samples do not depend on the contents of ``value``: penstock's caches and loaders, and objects whose
    state changes while samples stay the same. Penstock's datasets have ``made_of``, which returns what their samples
    depend on."""
    return (_is_ours(value) and not hasattr(value, "made_of")) or isinstance(value, _NO_DATA)


def _is_plain(value: Any, depth: int) -> bool:
    """Whether the text of a value describes it completely."""
    kind = type(value)
    if kind in _SIMPLE:
        return True
    if kind in (tuple, list):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    return kind is dict and depth > 0 and all(_is_plain(part, depth - 1) for item in value.items() for part in item)


def _names_in(code: types.CodeType) -> list[str]:
    """Names that a function and the functions inside it may look up in their module."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names_in(constant)
    return sorted(set(names))


def _slots_of(value: Any) -> dict[str, Any]:
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if isinstance(name, str)]
    return {name: getattr(value, name) for name in names if not name.startswith("__") and hasattr(value, name)}
