"""What it means for two runs to have given the same batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def assert_same(got: Any, want: Any, where: str) -> None:
    """Same types, containers, dtypes, shapes and bits, all the way down."""
    assert type(got) is type(want), f"{where}: {type(got)} is not {type(want)}"
    if isinstance(want, torch.Tensor):
        assert (got.dtype, got.shape) == (want.dtype, want.shape), where
        assert torch.equal(got, want), f"{where}: values differ"
    elif isinstance(want, np.ndarray):
        assert (got.dtype, got.shape) == (want.dtype, want.shape), where
        assert np.array_equal(got, want), f"{where}: values differ"
    elif isinstance(want, dict):
        assert list(got) == list(want), where
        for key in want:
            assert_same(got[key], want[key], f"{where}[{key!r}]")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), f"{where}: {len(got)} is not {len(want)}"
        for place, (one, other) in enumerate(zip(got, want, strict=True)):
            assert_same(one, other, f"{where}[{place}]")
    else:
        assert got == want, f"{where}: {got!r} is not {want!r}"
