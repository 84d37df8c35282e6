"""The template of a sample: its structure, types and shapes, learnt from earlier samples.

In:  samples of one structure (nested dict, list, tuple, namedtuple of tensors, arrays, numbers, strings).
Out: rows written into a segment as samples are produced, and the batch that ``default_collate`` would have made, as
     views of these rows.
Runs in: worker (learn, write), trainer and collating worker (read).

Every sample is checked against the template: if it differs in any shape, dtype, type or key, its batch goes through
torch's own collate, which returns its own result or raises its own error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate

from penstock.arena.codec import is_plain

_PRISTINE_COLLATE_MAP = dict(torch_collate.default_collate_fn_map)
_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
_TEXTS = (str, bytes)
_LEAF = ("leaf",)


@dataclass(frozen=True, slots=True)
class TemplateLeaf:
    """One value inside a sample. ``dtype`` is the batch's dtype, or None for texts, which a batch only lists."""

    kind: str
    """What the value is: tensor, array, scalar (numpy's), number or text."""
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    row_bytes: int
    exact_type: type
    """The type that a matching value must have; for arrays and numpy scalars the numpy dtype must match too."""
    np_dtype: np.dtype | None = None

    @property
    def needs_more_than_type(self) -> bool:
        """Whether a value of the right type may still not match."""
        return self.kind not in ("text", "number") or self.exact_type is int


@dataclass(frozen=True, slots=True)
class Template:
    """The structure of a sample: its containers as nested tuples, and its values as leaves in order."""

    shape: Any
    """("leaf",) | ("dict", keys, children) | ("list" | "tuple" | namedtuple type, children)"""
    leaves: tuple[TemplateLeaf, ...]

    @property
    def row_bytes(self) -> int:
        return sum(leaf.row_bytes for leaf in self.leaves)


def is_default_collate(collate_fn: Callable[..., Any]) -> bool:
    """Whether rows may be written in place: ``collate_fn`` is torch's own, and the user registered nothing with it."""
    return collate_fn is torch_collate.default_collate and torch_collate.default_collate_fn_map == _PRISTINE_COLLATE_MAP


def learn(sample: Any) -> Template | None:
    """The template of ``sample``, or None if only torch's collate can handle it."""
    leaves: list[TemplateLeaf] = []
    try:
        shape = _learn(sample, leaves)
    except _Unknown:
        return None
    return Template(shape, tuple(leaves))


def matcher(template: Template) -> Callable[[Any], Sequence[Any] | None]:
    """A function that returns a sample's values in leaf order, or None if the sample does not match the template.

    The function checks everything on which a batch's layout depends. Tensors that are not plain bytes (sparse, on a
    device, requiring gradients) are refused later, when a row is written.
    """
    checks = [_check(leaf) for leaf in template.leaves]
    if template.shape == _LEAF:
        leaf, check = template.leaves[0], checks[0]
        if leaf.kind == "tensor":  # the most common kind of sample, handled without a second call
            kind, dtype, shape = leaf.exact_type, leaf.dtype, leaf.shape

            def match_tensor(v: Any) -> Sequence[Any] | None:
                try:
                    return (v,) if type(v) is kind and v.dtype is dtype and v.shape == shape else None
                except RuntimeError:  # a nested tensor has no shape
                    return None

            return match_tensor
        return lambda v: (v,) if check(v) else None
    if all(child == _LEAF for child in template.shape[-1]):
        return _flat_matcher(template, checks)

    def match(sample: Any) -> Sequence[Any] | None:
        values: list[Any] = []
        if not _flatten(template.shape, sample, values):
            return None
        try:
            for check, value in zip(checks, values, strict=True):
                if not check(value):
                    return None
        except RuntimeError:
            return None
        return values

    return match


def _flat_matcher(template: Template, checks: list[Callable[[Any], bool]]) -> Callable[[Any], Sequence[Any] | None]:
    """A faster matcher for one container of values. Most samples are such containers, and small samples gain most from
    it."""
    head, types = template.shape[0], [leaf.exact_type for leaf in template.leaves]
    kind = dict if head == "dict" else list if head == "list" else tuple if head == "tuple" else head
    further = [(i, check) for i, check in enumerate(checks) if template.leaves[i].needs_more_than_type]

    def match(sample: Any) -> Sequence[Any] | None:
        if type(sample) is not kind:
            return None
        if kind is dict:
            if tuple(sample) != template.shape[1]:
                return None
            sample = sample.values()
        values = tuple(sample)  # a dataset may use its own list again
        if [*map(type, values)] != types:
            return None
        try:
            for i, check in further:
                if not check(values[i]):
                    return None
        except RuntimeError:  # a nested tensor has no shape
            return None
        return values

    return match


def _check(leaf: TemplateLeaf) -> Callable[[Any], bool]:
    kind, dtype, shape, np_dtype = leaf.exact_type, leaf.dtype, leaf.shape, leaf.np_dtype
    if leaf.kind == "tensor":
        return lambda v: type(v) is kind and v.dtype is dtype and v.shape == shape
    if leaf.kind == "array":
        # torch refuses arrays with negative strides, so these arrays are left to torch.
        return lambda v: type(v) is kind and v.dtype == np_dtype and v.shape == shape and min(v.strides, default=0) >= 0
    if kind is int:
        return lambda v: type(v) is kind and -(1 << 63) <= v < 1 << 63
    return lambda v: type(v) is kind


class _Unknown(Exception):
    pass


def _learn(value: Any, leaves: list[TemplateLeaf]) -> Any:
    kind = type(value)
    if kind is torch.Tensor:
        if not is_plain(value):
            raise _Unknown
        leaves.append(TemplateLeaf("tensor", value.dtype, tuple(value.shape), value.nbytes, kind))
    elif kind is np.ndarray or isinstance(value, np.generic):
        leaves.append(_numpy_leaf(value, kind))
    elif kind in _NUMBERS:
        dtype = _NUMBERS[kind]
        leaves.append(TemplateLeaf("number", dtype, (), dtype.itemsize, kind))
    elif kind in _TEXTS:
        leaves.append(TemplateLeaf("text", None, (), 0, kind))
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


def _numpy_leaf(value: Any, kind: type) -> TemplateLeaf:
    if value.dtype.kind in "SUOVMm" or not value.dtype.isnative or min(value.strides, default=0) < 0:
        raise _Unknown
    try:
        dtype = torch.as_tensor(np.zeros((), value.dtype) if kind is np.ndarray else [value]).dtype
    except TypeError:
        raise _Unknown from None
    shape, what = (tuple(value.shape), "array") if kind is np.ndarray else ((), "scalar")
    if dtype.itemsize != value.dtype.itemsize:
        raise _Unknown
    return TemplateLeaf(what, dtype, shape, int(value.nbytes), kind, value.dtype)


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
