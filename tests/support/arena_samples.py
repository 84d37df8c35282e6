"""Nested samples for the tests of codec and templates, and what it means for two of them to be the same."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch.utils.data import default_collate

TENSOR_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int16, torch.int64, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
ARRAY_DTYPES = ["f4", "f8", "f2", "u1", "i2", "i8", "?", "c8", "u4"]


class Pair(NamedTuple):
    left: Any
    right: Any


def assert_same(got: Any, want: Any) -> None:
    """Same types, same containers, same dtypes and shapes, same bits."""
    assert type(got) is type(want), f"{type(got)} is not {type(want)}"
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype and got.shape == want.shape
        assert _bits(got) == _bits(want)
    elif isinstance(want, np.ndarray):
        assert got.dtype == want.dtype and got.shape == want.shape
        assert got.tobytes() == want.tobytes() if want.dtype != object else got.tolist() == want.tolist()
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            assert_same(got[key], want[key])
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_same(one, other)
    elif isinstance(want, float) and math.isnan(want):
        assert math.isnan(got)
    else:
        assert got == want


def _bits(tensor: torch.Tensor) -> bytes:
    if tensor.numel() == 0:
        return b""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    raw = torch.randint(0, 100, (*shape, 1), generator=torch.Generator().manual_seed(seed))
    return raw.to(torch.float32).to(dtype).squeeze(-1)


def array_of(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
seeds = st.integers(0, 1000)
tensors = st.builds(tensor_of, st.sampled_from(TENSOR_DTYPES), shapes, seeds)
arrays = st.builds(array_of, st.sampled_from(ARRAY_DTYPES), shapes, seeds)
scalars = st.builds(lambda dtype, n: np.dtype(dtype).type(n), st.sampled_from(ARRAY_DTYPES), st.integers(0, 100))
numbers = st.one_of(st.booleans(), st.integers(-(1 << 63), (1 << 63) - 1), st.floats())
texts = st.one_of(st.text(max_size=5), st.binary(max_size=5))


def nested_values() -> st.SearchStrategy[Any]:
    """Anything the codec may meet."""
    leaves = st.one_of(
        tensors,
        tensors.map(lambda t: t.transpose(0, -1) if t.dim() > 1 else t),
        arrays,
        arrays.map(lambda a: a.T),
        scalars,
        numbers,
        texts,
        st.none(),
        st.integers(),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0, 9)), inner, max_size=3),
            st.builds(Pair, inner, inner),
        ),
        max_leaves=8,
    )


def is_collated(dtype: str) -> bool:
    """Whether torch's default collate makes a tensor of NumPy scalars of this dtype."""
    try:
        default_collate([np.dtype(dtype).type(1)])
    except TypeError:
        return False
    return True


COLLATED_SCALARS = [dtype for dtype in ARRAY_DTYPES if is_collated(dtype)]
"""torch 2.6 refuses the booleans of NumPy 2.4."""


class Kind(NamedTuple):
    """How to make samples of one structure; ``make(seed)`` gives one."""

    make: Any


def sample_kinds() -> st.SearchStrategy[Kind]:
    """Structures the default collate knows, each able to make any number of alike samples."""
    leaves = st.one_of(
        st.builds(lambda d, s: Kind(lambda n: tensor_of(d, s, n)), st.sampled_from(TENSOR_DTYPES), shapes),
        st.builds(lambda d, s: Kind(lambda n: array_of(d, s, n)), st.sampled_from(ARRAY_DTYPES), shapes),
        st.sampled_from(COLLATED_SCALARS).map(lambda d: Kind(lambda n: np.dtype(d).type(n % 100))),
        st.sampled_from([bool, int, float, str]).map(lambda kind: Kind(lambda n: kind(n))),
        st.just(Kind(lambda n: b"%d" % n)),
    )

    def boxed(inner: st.SearchStrategy[Kind]) -> st.SearchStrategy[Kind]:
        several = st.lists(inner, max_size=3)
        return st.one_of(
            several.map(lambda ks: Kind(lambda n: [k.make(n + i) for i, k in enumerate(ks)])),
            several.map(lambda ks: Kind(lambda n: tuple(k.make(n + i) for i, k in enumerate(ks)))),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(
                lambda ks: Kind(lambda n: {key: k.make(n) for key, k in ks.items()})
            ),
            st.builds(lambda a, b: Kind(lambda n: Pair(a.make(n), b.make(n + 1))), inner, inner),
        )

    return st.recursive(leaves, boxed, max_leaves=6)
