"""The size of a Python object, and the objects that it holds, both found without running code of the object's class.

In:  any object.
Out: the objects in the given object, or some of them, each with its path; the bytes of the given object itself.
Runs in: trainer, command line.
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import mmap
import random
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

PAGE_BYTES = mmap.PAGESIZE
_HAVE_GC, _MANAGED_DICT = 1 << 14, 1 << 4
"""Flags of types whose objects have a header in front of the object."""
_HEAP_TYPE = 1 << 9
_HEAD_BYTES = 16
_TENSOR_BYTES = 400
"""The bytes of a tensor's Python object and C++ objects, without its data. The Python and the C++ objects hold
reference counts."""
_OWN_SIZE = (list, dict, set, frozenset, collections.deque, str, bytes, tuple, int, bytearray)
"""Types of which two objects can differ in size."""
_SEQUENCES = (list, tuple)
_STREAMS = (set, frozenset, collections.deque)
_CONTAINERS = (*_SEQUENCES, *_STREAMS, dict)
_LEAVES = (
    type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType, types.TracebackType,
    str, bytes, bytearray, memoryview, int, float, complex, type(None), type(Ellipsis), range, np.generic, np.dtype,
    mmap.mmap,
)  # fmt: skip
_OTHERS = {*sys.stdlib_module_names, "torch", "numpy", "pandas", "penstock"} - {"__main__"}
"""Packages whose classes hold no data of the user."""
_NOT_DATA = ("logging.", "threading.", "_thread.", "multiprocessing.", "ctypes.", "_ctypes.", "re.", "concurrent.")
"""Modules whose objects refer to the rest of the program, and are therefore not followed."""

Parts = tuple[float, list[tuple[str, Any]]]
"""How many objects each listed object represents, and the list: pairs of the last part of the path and the object."""


def kind_of(value: object) -> str | None:
    """The kind of container that ``value`` is; None if it is not a container."""
    kind = type(value)
    if issubclass(kind, np.ndarray):
        return f"array of {_dtype(value)}"
    return kind.__name__ if issubclass(kind, _CONTAINERS) else None


def items_of(value: Any) -> int:
    """The number of items in a container."""
    if issubclass(type(value), np.ndarray):
        return np.asarray(value).size
    base = next(base for base in _CONTAINERS if issubclass(type(value), base))
    return base.__len__(value)


def own_bytes(value: object) -> int:
    """The bytes of the object itself, rounded up as the allocator does."""
    kind = type(value)
    if is_tensor(value):
        return _TENSOR_BYTES
    # Types that are not listed may store anything in the field for the number of items.
    base = next((base for base in _OWN_SIZE if issubclass(kind, base)), None)
    return _rounded(kind.__basicsize__ if base is None else base.__sizeof__(value), kind)  # type: ignore[arg-type]


def copied_bytes(value: object) -> int:
    """The bytes that a forked worker copies when it changes the object's reference count: the page that holds the
    count, or the object's share of that page. Memory that the object allocated elsewhere is not copied."""
    kind = type(value)
    elsewhere = issubclass(kind, (list, dict, set, frozenset, collections.deque))
    own = _rounded(kind.__basicsize__, kind) if elsewhere else own_bytes(value)
    return min(own, PAGE_BYTES)


def _rounded(size_bytes: int, kind: type) -> int:
    heads = bool(kind.__flags__ & _HAVE_GC) + bool(kind.__flags__ & _MANAGED_DICT)
    return -(-(size_bytes + _HEAD_BYTES * heads) // 16) * 16


def is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(value), torch.Tensor)


def is_shared(value: object) -> bool:
    """Whether workers read the items of ``value`` without changing the items' reference counts."""
    module = sys.modules.get("penstock.data.shared.shared_list")
    if module is not None and type(value) is module.SharedList:
        return True
    return issubclass(type(value), np.ndarray) and not _dtype(value).hasobject


def shared_bytes(value: Any) -> int:
    """The bytes of an object whose items are read without changing reference counts."""
    return np.asarray(value).nbytes if issubclass(type(value), np.ndarray) else len(value._bytes)


def module_of(kind: type) -> str:
    """The module in which a class is defined, according to the class itself."""
    module = kind.__dict__.get("__module__")
    if type(module) is str:
        return module
    # Types that are written in C have the module in their name.
    return type.__dict__["__module__"].__get__(kind) if not kind.__flags__ & _HEAP_TYPE else ""


def held_in(value: Any) -> Iterator[Any]:
    """All objects directly in a container; for a dict, its keys and values."""
    kind = type(value)
    if issubclass(kind, np.ndarray):
        return iter(np.ndarray.reshape(np.asarray(value), -1))
    if issubclass(kind, dict):
        return itertools.chain(dict.keys(value), dict.values(value))
    base = next(base for base in (*_SEQUENCES, *_STREAMS) if issubclass(kind, base))
    return base.__iter__(value)


def _dtype(array: Any) -> np.dtype[Any]:
    return np.asarray(array).dtype


def parts(value: Any, most: int, chance: random.Random) -> Parts:
    """Some of the objects that ``value`` holds, at most about ``most``."""
    try:
        return _parts(value, type(value), most, chance)
    except Exception:
        return 1.0, []  # an unfinished object of an extension type, or an object that changes while it is read


def _parts(value: Any, kind: type, most: int, chance: random.Random) -> Parts:
    if issubclass(kind, _LEAVES) or is_tensor(value) or is_shared(value) or _leads_away(kind):
        return 1.0, []
    if kind is types.FunctionType:
        return 1.0, list(_function_parts(value))
    if kind is types.MethodType:
        return 1.0, [("", value.__self__), ("", value.__func__)]
    if issubclass(kind, functools.partial):
        members = functools.partial.__dict__
        return 1.0, [(f".{name}", members[name].__get__(value)) for name in ("func", "args", "keywords")]
    own = _own_dict(value, kind)
    attributes = [(f".{name}", held) for name, held in list(own.items())] + list(_slots(value, kind))
    if issubclass(kind, (*_CONTAINERS, np.ndarray)):
        scale, found = _items(value, kind, most, chance)
        return scale, found + attributes
    # For types that are written in C, only the garbage collector can list the objects that they hold.
    known = {id(own), id(kind), *(id(held) for _, held in attributes)}
    return 1.0, attributes + [("", held) for held in gc.get_referents(value)[:most] if id(held) not in known]


def class_parts(value: object) -> list[tuple[str, Any]]:
    """The containers and the functions with closures that are attributes of an object's class. Workers copy them as
    they copy the object's own attributes."""
    kind = type(value)
    if issubclass(kind, _LEAVES) or is_tensor(value) or _leads_away(kind):
        return []
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        # Attributes of library classes are left out: they are small, but refer to all modules of the library.
        is_users = base.__flags__ & _HEAP_TYPE and module_of(base).partition(".")[0] not in _OTHERS
        held = list(base.__dict__.items()) if is_users else []
        for name, attribute in held:
            found.setdefault(name, attribute)
    return [(f".{name}", held) for name, attribute in found.items() for held in _of_class(name, attribute)]


def _of_class(name: str, attribute: Any) -> Iterator[Any]:
    if type(attribute) in (staticmethod, classmethod):
        attribute = attribute.__func__
    functions = (attribute.fget, attribute.fset) if type(attribute) is property else (attribute,)
    for function in functions:
        if type(function) is types.FunctionType and function.__closure__:
            yield function
    is_container = issubclass(type(attribute), (*_CONTAINERS, np.ndarray)) or is_shared(attribute)
    if is_container and not name.startswith("__"):
        yield attribute


def _items(value: Any, kind: type, most: int, chance: random.Random) -> Parts:
    if issubclass(kind, np.ndarray):
        flat = np.ndarray.reshape(np.asarray(value), -1)
        places = _places(flat.size, most, chance)
        return flat.size / max(1, len(places)), [(f"[{at}]", flat[at]) for at in places]
    for base in _SEQUENCES:
        if issubclass(kind, base):
            count = base.__len__(value)
            places = _places(count, most, chance)
            return count / max(1, len(places)), [(f"[{at}]", base.__getitem__(value, at)) for at in places]
    for base in _STREAMS:
        if issubclass(kind, base):
            some = _every(base.__iter__(value), base.__len__(value), most)
            return base.__len__(value) / max(1, len(some)), [("[...]", item) for item in some]
    if issubclass(kind, dict):
        pairs = _every(dict.items(value).__iter__(), dict.__len__(value), most)
        found = [(_key(key), item) for key, item in pairs]
        found += [("[...]", key) for key, _ in pairs]
        return dict.__len__(value) / max(1, len(pairs)), found
    return 1.0, []


def _places(count: int, most: int, chance: random.Random) -> Sequence[int]:
    return range(count) if count <= most else chance.sample(range(count), most)


def _every(items: Iterator[Any], count: int, most: int) -> list[Any]:
    return list(itertools.islice(items, 0, None, max(1, -(-count // most))))


def _key(key: object) -> str:
    return f"[{key!r}]" if type(key) is int or (type(key) is str and len(key) <= 40) else "[...]"


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f".<closure>.{name}", cell.cell_contents
        except ValueError:
            continue  # the variable has no value yet
    yield ".<defaults>", function.__defaults__
    yield ".<defaults>", function.__kwdefaults__


def _own_dict(value: Any, kind: type) -> dict[Any, Any]:
    for base in kind.__mro__:
        if type(base.__dict__.get("__dict__")) is types.GetSetDescriptorType:
            own = base.__dict__["__dict__"].__get__(value)
            return own if type(own) is dict else {}
    return {}


def _slots(value: Any, kind: type) -> Iterator[tuple[str, Any]]:
    for base in kind.__mro__:
        if "__slots__" not in base.__dict__:
            continue
        for name, member in base.__dict__.items():
            if type(member) is types.MemberDescriptorType:
                try:
                    yield f".{name}", member.__get__(value)
                except AttributeError:
                    continue  # the slot is not set


def _leads_away(kind: type) -> bool:
    return f"{module_of(kind)}.".startswith(_NOT_DATA)
