"""Rows written by a template make the batch torch's default collate would have made."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torch_collate

from penstock.arena.layout import RowWriter, layout_of
from penstock.arena.template import is_default_collate, learn, matcher
from support.arena_samples import ARRAY_DTYPES, Pair, assert_same, is_collated, sample_kinds


def batch_by_rows(samples: list[Any], *, chunk: int = 1, room: int | None = None) -> Any:
    """What penstock makes of samples of one structure, or None where it leaves them to torch."""
    template = learn(samples[0])
    if template is None:
        return None
    layout = layout_of(template, room or len(samples))
    target = np.full(max(1, layout.total_bytes), 0xA5, np.uint8)
    writer = RowWriter(layout, target)
    texts: list[list[Any]] = [[] for leaf in template.leaves if leaf.kind == "text"]
    flat = [layout.match(sample) for sample in samples]
    assert None not in flat, "a sample does not match the template of the first"
    for start in range(0, len(flat), chunk):
        writer.write(start, flat[start : start + chunk], texts)  # type: ignore[arg-type]
    return layout.batch(target, texts, len(samples))


@settings(max_examples=300, deadline=None)
@given(sample_kinds(), st.integers(1, 5), st.integers(1, 5), st.integers(0, 3))
def test_rows_equal_the_default_collate(kind: Any, count: int, chunk: int, spare: int) -> None:
    samples = [kind.make(seed * 10) for seed in range(count)]
    want = default_collate(samples)
    got = batch_by_rows(samples, chunk=chunk, room=count + spare)
    assert got is not None, "nothing in this sample is beyond a template"
    assert_same(got, want)


@settings(max_examples=150, deadline=None)
@given(sample_kinds(), st.integers(1, 4))
def test_samples_read_back_from_their_rows_are_as_they_were(kind: Any, count: int) -> None:
    samples = [kind.make(seed * 10) for seed in range(count)]
    template = learn(samples[0])
    assert template is not None
    layout = layout_of(template, count)
    target = np.zeros(max(1, layout.total_bytes), np.uint8)
    texts: list[list[Any]] = [[] for leaf in template.leaves if leaf.kind == "text"]
    RowWriter(layout, target).write(0, [layout.match(s) for s in samples], texts)  # type: ignore[misc]
    columns = layout.columns(target)
    for row, sample in enumerate(samples):
        assert_same(layout.sample(columns, texts, row, row), sample)
        assert_same(layout.rebuild(layout.match(sample)), sample)  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(sample_kinds(), sample_kinds())
def test_a_match_means_the_template_is_the_same(first: Any, second: Any) -> None:
    """The oracle of a mismatch: two samples of equal templates, and no others, share a layout."""
    one, other = first.make(1), second.make(2)
    template = learn(one)
    assert template is not None
    assert (matcher(template)(other) is not None) == (learn(other) == template)


@pytest.mark.parametrize("dtype", ARRAY_DTYPES)
def test_only_a_scalar_that_torch_collates_has_a_template(dtype: str) -> None:
    assert (learn(np.dtype(dtype).type(1)) is not None) == is_collated(dtype)


MISMATCHES: list[tuple[Any, Any]] = [
    (torch.zeros(3), torch.zeros(4)),
    (torch.zeros(3), torch.zeros(3, 1)),
    (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
    (torch.zeros(3), np.zeros(3, np.float32)),
    (torch.zeros(3), torch.nn.Parameter(torch.zeros(3))),
    (torch.zeros(()), 0.0),
    (np.zeros(3), np.zeros(3, ">f8")),
    (np.zeros(3), np.ma.zeros(3)),
    (np.zeros(3), [0.0, 0.0, 0.0]),
    (np.float32(1), np.float64(1)),
    (np.float64(1), 1.0),
    (1, True),
    (1, 1.0),
    (1, 1 << 63),
    (1, -(1 << 63) - 1),
    (1, None),
    ("a", b"a"),
    ("a", np.str_("a")),
    ({"a": 1}, {"a": 1, "b": 2}),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({"a": 1}, collections.OrderedDict(a=1)),
    ([1, 2], (1, 2)),
    ([1, 2], [1, 2, 3]),
    ((1, 2), Pair(1, 2)),
    (Pair(1, 2), (1, 2)),
    ([1, [2]], [1, 2]),
]


@pytest.mark.parametrize(("first", "other"), MISMATCHES, ids=lambda v: f"{type(v).__name__} {v!r}"[:30])
def test_samples_that_differ_do_not_match(first: Any, other: Any) -> None:
    template = learn(first)
    assert template is not None
    assert matcher(template)(first) is not None
    assert matcher(template)(other) is None


@pytest.mark.parametrize(
    "sample",
    [
        None,
        {"a": None},
        object(),
        {1, 2},
        torch.eye(2).to_sparse(),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, device="meta"),
        np.array(["a"]),
        np.array([None]),
        np.zeros(2, ">f4"),
        np.array(["2020"], dtype="datetime64[Y]"),
        np.longdouble(1),
        collections.OrderedDict(a=1),
        collections.deque([1]),
        range(3),
        1j,
        bytearray(b"a"),
    ],
    ids=lambda v: type(v).__name__ if type(v) is object else f"{type(v).__name__} {v!r}"[:30],
)
def test_samples_that_only_torch_can_collate_are_left_to_torch(sample: Any) -> None:
    assert learn(sample) is None


@pytest.mark.parametrize(
    "stray",
    [
        torch.eye(3).to_sparse(),
        torch.ones(3, 3, requires_grad=True),
        torch.ones(3, 3, device="meta"),
    ],
    ids=["sparse", "requires grad", "meta"],
)
@pytest.mark.parametrize("chunk", [1, 3])
def test_a_tensor_that_is_not_plain_bytes_is_refused_before_any_text_is_kept(stray: torch.Tensor, chunk: int) -> None:
    template = learn(("text", torch.ones(3, 3)))
    assert template is not None
    layout = layout_of(template, 3)
    writer = RowWriter(layout, np.zeros(layout.total_bytes, np.uint8))
    texts: list[list[Any]] = [[]]
    flat = [layout.match(("t", stray))] * chunk
    if flat[0] is None:
        return
    with pytest.raises((TypeError, RuntimeError)):
        writer.write(0, flat, texts)  # type: ignore[arg-type]
    assert texts == [[]]


@pytest.mark.parametrize("chunk", [1, 4])
def test_views_and_conjugates_are_written_by_value(chunk: int) -> None:
    base = torch.arange(24.0).view(4, 6)
    for sample in (base.t(), base[:, ::2], base[1], torch.ones(2, dtype=torch.complex64) * 1j):
        samples = [sample + i for i in range(4)]
        assert_same(batch_by_rows(samples, chunk=chunk), default_collate(samples))


def test_channels_last_samples_collate_as_torch_stacks_them() -> None:
    samples = [torch.rand(1, 3, 4, 4).to(memory_format=torch.channels_last)[0] for _ in range(3)]
    assert_same(batch_by_rows(samples), default_collate(samples))


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize(
    "label", [torch.tensor(3), np.array(3), np.float32(3), 3], ids=["tensor", "array", "scalar", "number"]
)
def test_a_label_without_dimensions_is_written_to_its_row(label: Any, chunk: int) -> None:
    """An image and its label as a tensor: one row at a time when images are large."""
    samples = [(torch.full((4, 4), i), label + i) for i in range(3)]
    assert_same(batch_by_rows(samples, chunk=chunk), default_collate(samples))


def test_large_rows_do_not_spill_into_each_other() -> None:
    samples = [{"a": torch.full((1000,), i), "b": np.full(77, i, np.int16), "c": i} for i in range(9)]
    assert_same(batch_by_rows(samples, chunk=4), default_collate(samples))


def test_a_registered_collate_function_switches_rows_off() -> None:
    assert is_default_collate(default_collate)
    assert not is_default_collate(lambda samples: samples)
    torch_collate.default_collate_fn_map[set] = lambda batch, *, collate_fn_map=None: batch
    try:
        assert not is_default_collate(default_collate)
    finally:
        del torch_collate.default_collate_fn_map[set]
    assert is_default_collate(default_collate)


def test_templates_are_equal_and_hash_alike_when_their_samples_are_alike() -> None:
    one = learn({"a": torch.zeros(2), "b": ("x", np.float32(1))})
    other = learn({"a": torch.ones(2), "b": ("y", np.float32(2))})
    assert one == other
    assert hash(one) == hash(other)
    assert layout_of(one, 4) is layout_of(other, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("like", [lambda t: t, lambda t: {"x": t}], ids=["alone", "in a dict"])
def test_a_nested_tensor_which_has_no_shape_does_not_match_a_plain_one(like: Any) -> None:
    template = learn(like(torch.ones(2)))
    assert template is not None
    match = matcher(template)
    assert match(like(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))) is None
    assert match(like(torch.zeros(2))) is not None
