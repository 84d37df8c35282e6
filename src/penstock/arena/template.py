"""What one sample looks like, learnt from samples, and where its parts lie when many of them form a batch.

In:  samples of one structure (nested dict, list, tuple, namedtuple of tensors, arrays, numbers, strings).
Out: rows written into a segment as samples are produced, and the batch ``default_collate`` would have made,
     viewing those rows.
Runs in: worker (learn, write), trainer and collating worker (read).

A template promises nothing it has not checked: a sample that differs in any shape, dtype, type or key does not
match, and its batch goes through torch's own collate, for its result or its error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate

from penstock.arena.codec import ALIGN_BYTES, is_plain

_PRISTINE_COLLATE_MAP = dict(torch_collate.default_collate_fn_map)
_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
_TEXTS = (str, bytes)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value inside a sample. ``dtype`` is that of the batch, None for what is only listed."""

    kind: str
    """tensor, array, scalar (numpy's), number, text"""
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    row_bytes: int
    exact_type: type
    """The type a matching value must have; for arrays and numpy scalars the numpy dtype is checked too."""
    np_dtype: np.dtype | None = None


@dataclass(frozen=True, slots=True)
class Template:
    """The structure of a sample: containers as nested tuples, values as leaves in order."""

    shape: Any
    """("leaf",) | ("dict", keys, children) | ("list" | "tuple" | namedtuple type, children)"""
    leaves: tuple[Leaf, ...]

    @property
    def row_bytes(self) -> int:
        return sum(leaf.row_bytes for leaf in self.leaves)


def is_default_collate(collate_fn: Callable[..., Any]) -> bool:
    """Whether rows may be written in place: torch's own collate with nothing registered by the user."""
    return collate_fn is torch_collate.default_collate and torch_collate.default_collate_fn_map == _PRISTINE_COLLATE_MAP


def learn(sample: Any) -> Template | None:
    """The template of ``sample``, or None where only torch's collate knows what to do."""
    leaves: list[Leaf] = []
    try:
        shape = _learn(sample, leaves)
    except _Unknown:
        return None
    return Template(shape, tuple(leaves))


def matcher(template: Template) -> Callable[[Any], Sequence[Any] | None]:
    """A function that gives a sample's values in leaf order, or None if the sample does not match.

    Checks are what a batch's layout depends on. Tensors that are not plain bytes (sparse, on a device, requiring
    gradients) are refused when they are written.
    """
    checks = [_check(leaf) for leaf in template.leaves]
    if template.shape == _LEAF:
        leaf, check = template.leaves[0], checks[0]
        if leaf.kind == "tensor":  # the most common sample of all, without a second call
            kind, dtype, shape = leaf.exact_type, leaf.dtype, leaf.shape
            return lambda v: (v,) if type(v) is kind and v.dtype is dtype and v.shape == shape else None
        return lambda v: (v,) if check(v) else None

    def match(sample: Any) -> Sequence[Any] | None:
        values: list[Any] = []
        if not _flatten(template.shape, sample, values):
            return None
        for check, value in zip(checks, values, strict=True):
            if not check(value):
                return None
        return values

    return match


def _check(leaf: Leaf) -> Callable[[Any], bool]:
    kind, dtype, shape, np_dtype = leaf.exact_type, leaf.dtype, leaf.shape, leaf.np_dtype
    if leaf.kind == "tensor":
        return lambda v: type(v) is kind and v.dtype is dtype and v.shape == shape
    if leaf.kind == "array":
        # torch refuses arrays that run backwards, so they are left to it.
        return lambda v: type(v) is kind and v.dtype == np_dtype and v.shape == shape and min(v.strides, default=0) >= 0
    if kind is int:
        return lambda v: type(v) is kind and -(1 << 63) <= v < 1 << 63
    return lambda v: type(v) is kind


class Layout:
    """Where each leaf's rows lie for a batch of ``rows`` samples."""

    def __init__(self, template: Template, rows: int) -> None:
        self.template = template
        self.rows = rows
        self.offsets: list[int] = []
        end = 0
        for leaf in template.leaves:
            start = -(-end // ALIGN_BYTES) * ALIGN_BYTES
            self.offsets.append(start)
            end = start + leaf.row_bytes * rows
        self.total_bytes = end
        self.match = matcher(template)

    def spans(self, rows: range) -> list[tuple[int, int]]:
        """Where consecutive rows lie: first byte and end, per leaf that takes bytes."""
        return [
            (offset + rows.start * leaf.row_bytes, offset + rows.stop * leaf.row_bytes)
            for leaf, offset in zip(self.template.leaves, self.offsets, strict=True)
            if leaf.row_bytes
        ]

    def columns(self, source: np.ndarray) -> list[torch.Tensor | None]:
        """Per leaf, a tensor of all rows over ``source`` (None for text). Each keeps ``source`` alive."""
        return [
            None if leaf.dtype is None else _column(source, leaf, offset, self.rows)
            for leaf, offset in zip(self.template.leaves, self.offsets, strict=True)
        ]

    def batch(self, source: np.ndarray, texts: Sequence[list[Any]], rows: int) -> Any:
        """What ``default_collate`` gives for the first ``rows`` samples; ``texts`` has one list per text leaf."""
        columns = iter(self.columns(source))
        listed = iter(texts)
        if rows == self.rows:
            values = [next(listed) if c is None else c for c in columns]
        else:
            values = [next(listed)[:rows] if c is None else c[:rows] for c in columns]
        return _collated(self.template.shape, iter(values))

    def rebuild(self, values: Sequence[Any]) -> Any:
        """The sample a matcher took apart into ``values``."""
        return _rebuilt(self.template.shape, iter(values))

    def sample(
        self, columns: Sequence[torch.Tensor | None], texts: Sequence[Sequence[Any]], row: int, text_row: int
    ) -> Any:
        """The sample that was written at ``row``, as it was; its texts are at ``text_row`` of theirs."""
        listed = iter(texts)
        values = [
            next(listed)[text_row] if column is None else _row_value(leaf, column[row])
            for leaf, column in zip(self.template.leaves, columns, strict=True)
        ]
        return _rebuilt(self.template.shape, iter(values))


@functools.lru_cache(maxsize=256)
def layout_of(template: Template, rows: int) -> Layout:
    return Layout(template, rows)


class RowWriter:
    """Writes samples into their rows of one segment, a chunk at a time."""

    def __init__(self, layout: Layout, target: np.ndarray) -> None:
        self._layout = layout
        self._columns = layout.columns(target)
        self._arrays = [None if c is None else _as_numpy(c) for c in self._columns]

    def write(self, first_row: int, flat: Sequence[Sequence[Any]], texts: list[list[Any]]) -> None:
        """Write the values of matching samples at consecutive rows; texts are appended to ``texts``, a list per leaf.

        Raises TypeError or RuntimeError, before any text is appended, if a tensor is not plain bytes.
        """
        end = first_row + len(flat)
        found: list[Sequence[Any]] = []
        for leaf, column, array, values in zip(
            self._layout.template.leaves, self._columns, self._arrays, zip(*flat, strict=True), strict=True
        ):
            if column is None:
                found.append(values)
            elif leaf.row_bytes == 0:
                continue
            elif leaf.kind == "tensor":
                if array is not None and len(values) == 1:
                    np.copyto(array[first_row:end], values[0].numpy())
                else:
                    torch.stack(values, out=column[first_row:end])
            elif leaf.kind == "array":
                assert array is not None
                if len(values) == 1:
                    np.copyto(array[first_row:end], values[0])
                else:
                    np.stack(values, out=array[first_row:end])
            else:
                assert array is not None
                array[first_row:end] = values
        for listed, values in zip(texts, found, strict=True):
            listed.extend(values)


def _column(source: np.ndarray, leaf: Leaf, offset: int, rows: int) -> torch.Tensor:
    assert leaf.dtype is not None
    shape = (rows, *leaf.shape)
    if leaf.row_bytes == 0 or rows == 0:
        return torch.empty(shape, dtype=leaf.dtype)
    count = rows * leaf.row_bytes // leaf.dtype.itemsize
    return torch.frombuffer(source, dtype=leaf.dtype, count=count, offset=offset).view(shape)


def _as_numpy(column: torch.Tensor) -> np.ndarray | None:
    """The same rows for numpy, or None for dtypes numpy does not have (bfloat16, float8)."""
    try:
        return column.numpy()
    except TypeError:
        return None


def _row_value(leaf: Leaf, row: torch.Tensor) -> Any:
    if leaf.kind == "tensor":
        return row
    if leaf.kind == "number":
        return row.item()
    array = row.numpy()
    return array if leaf.kind == "array" else array[()]


_LEAF = ("leaf",)


class _Unknown(Exception):
    pass


def _learn(value: Any, leaves: list[Leaf]) -> Any:
    kind = type(value)
    if kind is torch.Tensor:
        if not is_plain(value):
            raise _Unknown
        leaves.append(Leaf("tensor", value.dtype, tuple(value.shape), value.nbytes, kind))
    elif kind is np.ndarray or isinstance(value, np.generic):
        leaves.append(_numpy_leaf(value, kind))
    elif kind in _NUMBERS:
        dtype = _NUMBERS[kind]
        leaves.append(Leaf("number", dtype, (), dtype.itemsize, kind))
    elif kind in _TEXTS:
        leaves.append(Leaf("text", None, (), 0, kind))
    elif kind is dict:
        return "dict", tuple(value), tuple(_learn(v, leaves) for v in value.values())
    elif kind is list:
        return "list", tuple(_learn(v, leaves) for v in value)
    elif kind is tuple:
        return "tuple", tuple(_learn(v, leaves) for v in value)
    elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind, tuple(_learn(v, leaves) for v in value)
    else:
        raise _Unknown
    return _LEAF


def _numpy_leaf(value: Any, kind: type) -> Leaf:
    if value.dtype.kind in "SUOVMm" or not value.dtype.isnative or min(value.strides, default=0) < 0:
        raise _Unknown
    try:
        dtype = torch.as_tensor(np.zeros((), value.dtype) if kind is np.ndarray else [value]).dtype
    except TypeError:
        raise _Unknown from None
    shape, what = (tuple(value.shape), "array") if kind is np.ndarray else ((), "scalar")
    if dtype.itemsize != value.dtype.itemsize:
        raise _Unknown
    return Leaf(what, dtype, shape, int(value.nbytes), kind, value.dtype)


def _flatten(shape: Any, value: Any, out: list[Any]) -> bool:
    head = shape[0]
    if head == "leaf":
        out.append(value)
        return True
    if head == "dict":
        if type(value) is not dict or tuple(value) != shape[1]:
            return False
        return all(_flatten(child, v, out) for child, v in zip(shape[2], value.values(), strict=True))
    expected = list if head == "list" else tuple if head == "tuple" else head
    if type(value) is not expected or len(value) != len(shape[1]):
        return False
    return all(_flatten(child, v, out) for child, v in zip(shape[1], value, strict=True))


def _collated(shape: Any, values: Any) -> Any:
    """Containers as ``default_collate`` returns them: a plain tuple becomes a list."""
    head = shape[0]
    if head == "leaf":
        return next(values)
    if head == "dict":
        return {key: _collated(child, values) for key, child in zip(shape[1], shape[2], strict=True)}
    # Texts inside a sequence come out of torch's transposition as a tuple, elsewhere as a list.
    items = [_collated(child, values) for child in shape[1]]
    items = [
        tuple(i) if child[0] == "leaf" and type(i) is list else i for child, i in zip(shape[1], items, strict=True)
    ]
    return items if head in ("list", "tuple") else head(*items)


def _rebuilt(shape: Any, values: Any) -> Any:
    head = shape[0]
    if head == "leaf":
        return next(values)
    if head == "dict":
        return {key: _rebuilt(child, values) for key, child in zip(shape[1], shape[2], strict=True)}
    items = [_rebuilt(child, values) for child in shape[1]]
    return items if head == "list" else tuple(items) if head == "tuple" else head(*items)
