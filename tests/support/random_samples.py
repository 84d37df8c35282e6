"""Samples of every kind of structure that people return from datasets, and what it means that two values are the same.

In:  a seed, and the row of a sample.
Out: ``RandomSamples``: a dataset whose stretches of rows each have a structure of their own; ``difference``.
Runs in: test processes and workers. The same seed and row give the same sample everywhere.
"""

from __future__ import annotations

import dataclasses
import enum
import fractions
import random
import warnings
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

Make = Callable[[random.Random], Any]
"""Makes one value from a generator that depends on the row."""

PLAIN_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
RARE_DTYPES = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32]
NUMPY_DTYPES = [
    "f4", "f8", "f2", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", "c8", "c16", ">f4", ">i2", ">i8", "<U5",
    "S3", "M8[s]", "m8[ms]", "O", "f4,i2",
]  # fmt: skip


class Pair(NamedTuple):
    first: Any
    second: Any


Point = namedtuple("Point", "x y")


class Subclass(torch.Tensor):
    """A tensor class of a user's."""


class ArrayClass(np.ndarray):
    """An array class of a user's."""


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Record:
    value: Any
    name: str


class Plain:
    """An object of a user's own class."""

    def __init__(self, value: Any) -> None:
        self.value = value


class RandomSamples(Dataset[Any]):
    """Rows in stretches of ``rows``, each with a structure of its own. Now and then one row has another structure."""

    def __init__(self, seed: int, stretches: int, rows: int) -> None:
        self._seed, self._stretches, self._rows = seed, stretches, rows

    def __len__(self) -> int:
        return self._stretches * self._rows

    def __getitem__(self, index: int) -> Any:
        stretch = index // self._rows
        chance = random.Random(self._seed * 1_000_003 + stretch)
        structure = random_structure(chance)
        if chance.random() < 0.15 and index % self._rows == chance.randrange(self._rows):
            # Another structure, no sample at all, or an error.
            odd = chance.randrange(3)
            if odd == 0:
                raise ValueError(f"row {index} is damaged")
            structure = random_structure(chance) if odd == 1 else lambda _: None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return structure(random.Random(self._seed * 7_000_003 + index))


class ListedSamples(RandomSamples):
    """The same, asked for a whole batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


# -- structures ---------------------------------------------------------------------------------


def random_structure(chance: random.Random, depth: int = 0) -> Make:
    """How to make samples of one structure."""
    kind = chance.random()
    if depth >= 3 or kind < 0.45:
        return random_leaf(chance)
    parts = [random_structure(chance, depth + 1) for _ in range(chance.randrange(0 if depth else 1, 4))]
    wrap = chance.choice(_CONTAINERS)
    if wrap in (_as_pair, _as_point):
        parts = [*parts, random_leaf(chance), random_leaf(chance)][:2]
    return lambda rows: wrap([part(rows) for part in parts])


def _keyed(parts: list[Any]) -> dict[str, Any]:
    return {f"key {number}": part for number, part in enumerate(parts)}


def _as_pair(parts: list[Any]) -> Pair:
    return Pair(*parts)


def _as_point(parts: list[Any]) -> Point:
    return Point(*parts)


_CONTAINERS: list[Callable[[list[Any]], Any]] = [
    list, tuple, _keyed, _keyed, _keyed, _as_pair, _as_point, lambda parts: dict(enumerate(parts)),
    lambda parts: OrderedDict(_keyed(parts)), lambda parts: UserDict(_keyed(parts)), UserList, deque,
    lambda parts: defaultdict(list, _keyed(parts)), lambda parts: Record(parts, "record"), Plain,
]  # fmt: skip


def random_leaf(chance: random.Random) -> Make:
    """How to make one value."""
    maker = chance.choices(
        [_tensors, _odd_tensors, _arrays, _scalars, _numbers, _texts, _objects], weights=[5, 3, 4, 1, 2, 2, 1]
    )[0]
    return maker(chance)


def _shape(chance: random.Random) -> tuple[int, ...]:
    largest = chance.choice([3, 3, 3, 40])
    return tuple(chance.randrange(0 if chance.random() < 0.1 else 1, largest + 1) for _ in range(chance.randrange(4)))


def _filled(rows: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    start = rows.randrange(50)
    count = int(np.prod(shape, dtype=np.int64))
    values = (torch.arange(count, dtype=torch.int64) + start) % 100
    return (
        values.reshape(shape).to(torch.float32).to(dtype) if dtype in RARE_DTYPES else values.reshape(shape).to(dtype)
    )


def _tensors(chance: random.Random) -> Make:
    shape, dtype = _shape(chance), chance.choice(PLAIN_DTYPES if chance.random() < 0.8 else RARE_DTYPES)
    form = chance.choice(["plain", "plain", "plain", "turned", "every second", "expanded", "part", "ragged"])

    def make(rows: random.Random) -> torch.Tensor:
        if form == "ragged":
            return _filled(rows, (rows.randrange(4), *shape[:1]), dtype)
        value = _filled(rows, shape, dtype)
        if form == "turned":
            return value.permute(*reversed(range(value.dim())))
        if form == "every second" and value.dim():
            return value[::2]
        if form == "expanded":
            return value.unsqueeze(0).expand(3, *value.shape)
        if form == "part" and value.dim():
            return value[1:]
        return value

    return make


def _odd_tensors(chance: random.Random) -> Make:
    shape = _shape(chance)
    form = chance.choice(
        ["subclass", "subclass", "gradient", "sparse", "rows sparse", "quantized", "nested", "conjugate", "attribute"]
    )

    def make(rows: random.Random) -> torch.Tensor:
        value = _filled(rows, shape, torch.float32)
        if form == "subclass":
            return value.as_subclass(Subclass)
        if form == "gradient":
            return value.requires_grad_()
        if form == "sparse":
            return value.to_sparse() if value.dim() else value
        if form == "rows sparse":
            return value.reshape(1, -1).to_sparse_csr() if value.numel() else value
        if form == "quantized":
            return torch.quantize_per_tensor(value, 0.5, 3, torch.qint8)
        if form == "nested":
            return torch.nested.nested_tensor([torch.ones(2), torch.full((3,), float(rows.randrange(9)))])
        if form == "conjugate":
            return value.to(torch.complex64).conj()
        value.note = "a note of the user's"  # type: ignore[attr-defined]
        return value

    return make


def _arrays(chance: random.Random) -> Make:
    shape, dtype = _shape(chance), chance.choice(NUMPY_DTYPES)
    form = chance.choice(["plain", "plain", "plain", "turned", "every second", "backwards", "read only", "class"])

    def make(rows: random.Random) -> np.ndarray:
        value = _array(rows, shape, dtype)
        if form == "turned":
            return value.T
        if form == "every second" and value.ndim:
            return value[::2]
        if form == "backwards" and value.ndim:
            return value[::-1]
        if form == "read only":
            value.flags.writeable = False
        return value.view(ArrayClass) if form == "class" else value

    return make


def _array(rows: random.Random, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    counted = (np.arange(int(np.prod(shape, dtype=np.int64))) + rows.randrange(50)).reshape(shape) % 100
    if dtype == "f4,i2":
        value = np.zeros(shape, dtype)
        value["f0"] = counted
        return value
    return counted.astype("i8").astype(dtype)


def _scalars(chance: random.Random) -> Make:
    dtype = chance.choice([*NUMPY_DTYPES[:16], "M8[s]"])
    return lambda rows: _array(rows, (1,), dtype)[0]


def _numbers(chance: random.Random) -> Make:
    return chance.choice(
        [
            lambda rows: rows.randrange(1000), lambda rows: rows.random(), lambda rows: rows.random() < 0.5,
            lambda rows: 1 << rows.choice([3, 62, 63, 70]), lambda rows: complex(rows.randrange(9), 1),
            lambda rows: rows.choice([float("nan"), float("inf"), -0.0]), lambda rows: None,
            lambda rows: fractions.Fraction(rows.randrange(9), 7),
        ]
    )  # fmt: skip


def _texts(chance: random.Random) -> Make:
    long = chance.choice([1, 1, 3000])
    makers: list[Make] = [
        lambda rows: f"text {rows.randrange(1000)} é漢\ud800" * long,
        lambda rows: b"bytes %d" % rows.randrange(99) * long,
        lambda rows: "",
        lambda rows: bytearray(b"ab" * long),
        lambda rows: PurePosixPath(f"/data/{rows.randrange(99)}"),
    ]
    return chance.choice(makers)


def _objects(chance: random.Random) -> Make:
    makers: list[Make] = [
        lambda rows: rows.choice(list(Color)),
        lambda rows: {rows.randrange(9), 100},
        lambda rows: frozenset([1]),
        lambda rows: range(rows.randrange(9)),
        lambda rows: Counter("abca"),
        lambda rows: slice(1, rows.randrange(9)),
        lambda rows: int,
        lambda rows: torch.float32,
        lambda rows: torch.Size([1, 2]),
    ]
    return chance.choice(makers)


# -- comparing ------------------------------------------------------------------------------------


def difference(one: Any, other: Any) -> str | None:
    """In what two values differ, in words; None if they are the same in type, structure and bits."""
    if type(one) is not type(other):
        return f"{type(one)} is not {type(other)}"
    if isinstance(one, torch.Tensor):
        return _tensor_difference(one, other)
    if isinstance(one, (np.ndarray, np.generic)):
        if (_dtype_of(one), one.shape) != (_dtype_of(other), other.shape):
            return f"{one.dtype} {one.shape} is not {other.dtype} {other.shape}"
        return None if one.tolist() == other.tolist() or one.tobytes() == other.tobytes() else "array values differ"
    if isinstance(one, (dict, UserDict)):
        return difference(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple, deque, UserList)):
        if len(one) != len(other):
            return f"length {len(one)} is not {len(other)}"
        found = (difference(*pair) for pair in zip(one, other, strict=True))
        return next((f"[{place}] {text}" for place, text in enumerate(found) if text), None)
    if isinstance(one, (Plain, Record)):
        return difference(vars(one), vars(other))
    return None if one == other or repr(one) == repr(other) else f"{one!r} is not {other!r}"


def _dtype_of(value: Any) -> Any:
    # numpy's own pickles lose the byte order of array classes.
    return value.dtype.newbyteorder("=") if isinstance(value, ArrayClass) else value.dtype


def _tensor_difference(one: torch.Tensor, other: torch.Tensor) -> str | None:
    for name in ("dtype", "layout", "requires_grad", "is_nested", "is_quantized", "__dict__"):
        if getattr(one, name) != getattr(other, name):
            return f"{name} {getattr(one, name)} is not {getattr(other, name)}"
    if one.is_nested:
        return difference(list(one.unbind()), list(other.unbind()))
    if one.shape != other.shape:
        return f"shape {tuple(one.shape)} is not {tuple(other.shape)}"
    one, other = one.detach().resolve_conj(), other.detach().resolve_conj()
    if one.is_quantized:
        one, other = one.int_repr(), other.int_repr()
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    same = one.numel() == 0 or bool((_bits(one) == _bits(other)).all())
    return None if same else "tensor values differ"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.as_subclass(torch.Tensor).contiguous()
    # torch calls a single element contiguous whatever its stride is, and then refuses to view it as bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
