"""Whatever a dataset gives, packed and read back, is what it gave: both formats, any mixture of samples."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.data import ArrowDataset, TarDataset
from penstock.data.arrow.columns import Layout
from penstock.data.pack.shard_writers import find_fault, write_arrow, write_tar
from penstock.data.sample_forms import to_members
from support.same_samples import is_same

pytest.importorskip("pyarrow")

_DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32,
           torch.complex64, torch.uint32, torch.float8_e5m2]  # fmt: skip
_shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
_tensors = st.builds(
    lambda dtype, shape, seed: torch.from_numpy(np.random.default_rng(seed).integers(0, 2, shape)).to(dtype),
    st.sampled_from(_DTYPES), _shapes, st.integers(0, 99),
)  # fmt: skip
_arrays = st.one_of(
    hnp.arrays(st.sampled_from(["?", "<i2", "<u4", ">f8", "<c8", "<M8[s]", "<U3", "S2"]), _shapes),
    hnp.arrays("<f4", (2, 2)),
)
_plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(st.characters()), st.binary(),
    st.complex_numbers(allow_nan=False), _tensors, _arrays, hnp.from_dtype(np.dtype("<f8"), allow_nan=False),
)  # fmt: skip
_values = st.recursive(
    _plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(), st.none()), inner, max_size=3),
    ),
    max_leaves=6,
)
_names = st.one_of(st.sampled_from(["image", "label", "Label", "a.b", "json"]), st.text(max_size=4))
_samples = st.one_of(
    st.dictionaries(_names, _values, max_size=4),
    st.fixed_dictionaries({"x": _tensors, "y": st.integers(0, 9)}),
    _values,
    st.tuples(hnp.arrays("<f4", (2,)), st.integers(0, 9)),
)


@settings(max_examples=150)
@given(st.lists(_samples, min_size=1, max_size=8), st.integers(0, 8))
def test_packed_and_read_back_is_identity(samples: list[Any], looked_at: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        layout = Layout()
        for sample in samples[:looked_at]:
            layout.learn(sample)
        record = write_arrow(folder / "00000.arrow", lambda: iter(samples), layout)
        assert record.samples == len(samples) and find_fault(folder / "00000.arrow", record) is None
        _compare(ArrowDataset(folder), samples)
        keyed = [(f"{place:09d}", sample) for place, sample in enumerate(samples)]
        record = write_tar(folder / "00000.tar", keyed, to_members(samples[0])[0])
        assert record.samples == len(samples) and find_fault(folder / "00000.tar", record) is None
        _compare(TarDataset(folder), samples)


def _compare(dataset: Any, samples: list[Any]) -> None:
    assert len(dataset) == len(samples)
    for place, sample in enumerate(samples):
        assert is_same(dataset[place], sample), f"{sample!r} came back as {dataset[place]!r}"
