"""Anything a dataset may return, to bytes and back."""

from __future__ import annotations

import collections
import copyreg
import dataclasses
import datetime
import decimal
import enum
import pickle
import threading
import tracemalloc
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arena.codec import ALIGN_BYTES, decode, decode_bytes, decode_inline, encode, encode_inline
from support.arena_samples import assert_same, nested_values


class Point(NamedTuple):
    x: Any
    y: Any


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Record:
    image: torch.Tensor
    label: int
    tags: list[str]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and torch.equal(self.image, other.image) and self.label == other.label


class Boxed:
    """A custom class with tensors inside."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.inner = {"t": tensor}


class Marked(torch.Tensor):
    """A subclass of Tensor that torch rebuilds through its own reduction."""


class Boxes(torch.Tensor):
    """A subclass whose operations return plain tensors, with a state of its own."""

    canvas: tuple[int, int]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class WithState(torch.Tensor):
    """A subclass that restores its state itself."""

    def __setstate__(self, state: Any) -> None:
        self.restored = state


class Slotted:
    __slots__ = ("a",)

    def __init__(self, a: Any) -> None:
        self.a = a


def through_segment(value: Any) -> Any:
    encoded = encode(value)
    target = np.zeros(encoded.total_bytes + 64, np.uint8)
    encoded.write(target)
    return decode(encoded.pickled, encoded.offsets, target)


def through_message(value: Any) -> Any:
    return decode_inline(encode_inline(value))


def through_bytes(value: Any) -> Any:
    return decode_bytes(encode(value).as_bytes())


either_way = pytest.mark.parametrize("travel", [through_segment, through_bytes])

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@either_way
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (5, 7), (2, 3, 4, 5)], ids=str)
def test_tensors_of_every_dtype_come_back(travel: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    raw = torch.arange(count * dtype.itemsize, dtype=torch.int64).remainder(2 if dtype is torch.bool else 60)
    tensor = raw.to(torch.uint8).view(-1).view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    back = travel(tensor)
    assert_same(back, tensor)
    assert back.is_contiguous()


@either_way
@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda t: t.to(memory_format=torch.channels_last), id="channels last"),
        pytest.param(lambda t: t.transpose(1, 3), id="transposed"),
        pytest.param(lambda t: t.permute(3, 0, 2, 1), id="permuted"),
        pytest.param(lambda t: t[:, ::2], id="every other"),
        pytest.param(lambda t: t[1:, :, 1:], id="inner block"),
        pytest.param(lambda t: t[:1].expand(6, 3, 4, 5), id="expanded"),
        pytest.param(lambda t: t[0, 0, 0, 0], id="one number"),
        pytest.param(lambda t: t.flip(0), id="flipped"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_views_come_back_with_their_values_and_dense_ones_with_their_strides(
    travel: Any, view: Any, dtype: torch.dtype
) -> None:
    tensor = view(torch.arange(120.0).view(2, 3, 4, 5).to(dtype).float()).to(dtype)
    back = travel(tensor)
    assert_same(back, tensor)
    dense = tensor.numel() == tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    if dense and tensor.dim() == 4:
        assert back.stride() == tensor.stride()


@either_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda t: t[:4].view(4, 1, 1).expand(4, 8192, 1024), id="expanded"),
        pytest.param(lambda t: t[3].expand(1 << 20), id="one number expanded"),
        pytest.param(lambda t: t.unfold(0, 50, 1), id="windows that overlap"),
        pytest.param(lambda t: t[10:40:3].expand(1000, 10), id="every third expanded"),
        pytest.param(lambda t: t.view(10, 10).t().unsqueeze(1).expand(10, 7, 10), id="transposed and expanded"),
    ],
)
def test_elements_that_share_memory_travel_once_and_share_it_afterwards(
    travel: Any, view: Any, dtype: torch.dtype
) -> None:
    tensor = view(torch.arange(100.0).to(dtype))
    back = travel(tensor)
    assert_same(back, tensor)
    assert back.stride() == tensor.stride()
    assert encode(tensor).total_bytes <= 100 * dtype.itemsize
    assert back.untyped_storage().nbytes() <= 100 * dtype.itemsize + 64


@either_way
def test_a_single_element_out_of_a_column_comes_back(travel: Any) -> None:
    column = torch.arange(8.0).reshape(4, 2)[1:2, 0]
    assert column.is_contiguous() and column.stride() == (2,)
    assert torch.equal(travel(column), torch.tensor([2.0]))


@either_way
def test_a_slice_of_a_large_tensor_travels_without_the_rest(travel: Any) -> None:
    large = torch.zeros(1 << 20)
    assert_same(travel(large[5:10]), large[5:10])
    assert encode(large[5:10]).total_bytes == 20


ARRAYS = [
    np.arange(12, dtype=np.float32).reshape(3, 4),
    np.asfortranarray(np.arange(12, dtype=np.int16).reshape(3, 4)),
    np.arange(100)[::3],
    np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
    np.array(5.5),
    np.zeros((0, 3)),
    np.array(["a", "bcd"]),
    np.array([b"a", b"bcd"]),
    np.array([{"a": 1}, None, [1, 2]], dtype=object),
    np.array([1, 2], dtype=">i4"),
    np.array(["2020-01-01", "NaT"], dtype="datetime64[D]"),
    np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    np.ma.masked_array([1, 2, 3], mask=[False, True, False]),
    np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    np.array([1 + 2j], dtype=np.complex64),
    np.array([True, False]),
    np.array([1, 2], np.float16),
    np.array([1, 2], np.longdouble),
]


@either_way
@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype} {a.shape}")
def test_arrays_of_every_dtype_come_back(travel: Any, array: np.ndarray) -> None:
    back = travel(array)
    assert type(back) is type(array)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tolist() == array.tolist()


OTHERS: list[Any] = [
    None, True, 3, -(1 << 70), 2.5, float("inf"), 1j, "text", "", b"bytes", b"", bytearray(b"mutable"), [], (), {},
    {1, 2}, frozenset({3}), range(5), slice(1, 2), Ellipsis, np.float32(1.5), np.int64(7), np.bool_(True), np.str_("s"),
    Point(1, torch.ones(2)), Colour.RED, collections.OrderedDict(b=1, a=2), collections.Counter("abca"),
    collections.defaultdict(list, {"a": [1]}), collections.deque([1, 2], maxlen=3), datetime.datetime(2020, 1, 2),
    decimal.Decimal("1.5"), torch.float32, torch.Size([1, 2]), torch.device("cpu"), int, len,
]  # fmt: skip


@either_way
@pytest.mark.parametrize("value", OTHERS, ids=lambda v: f"{type(v).__name__} {v!r}"[:40])
def test_everything_that_pickles_comes_back(travel: Any, value: Any) -> None:
    assert_same(travel(value), value)


@either_way
def test_dataclasses_and_custom_classes_come_back_with_tensors_inside(travel: Any) -> None:
    record = Record(torch.arange(6).view(2, 3), 4, ["a"])
    assert travel(record) == record
    assert torch.equal(travel(Boxed(torch.ones(3))).inner["t"], torch.ones(3))
    assert torch.equal(travel(Slotted(torch.ones(3))).a, torch.ones(3))


@either_way
def test_tensors_that_are_not_plain_bytes_come_back_as_they_were(travel: Any) -> None:
    leaf = torch.ones(3, requires_grad=True)
    back = travel(leaf)
    assert back.requires_grad
    assert torch.equal(back, leaf)
    parameter = travel(torch.nn.Parameter(torch.ones(2)))
    assert type(parameter) is torch.nn.Parameter
    sparse = torch.eye(3).to_sparse()
    assert travel(sparse).is_sparse
    assert torch.equal(travel(sparse).to_dense(), torch.eye(3))
    csr = travel(torch.eye(3).to_sparse_csr())
    assert csr.layout is torch.sparse_csr
    conj = torch.tensor([1 + 2j]).conj()
    assert torch.equal(travel(conj).resolve_conj(), conj.resolve_conj())
    negative = torch.tensor([1 + 2j]).conj().imag
    assert torch.equal(travel(negative), negative)
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
    assert travel(quantized).is_quantized
    assert torch.equal(travel(quantized).dequantize(), quantized.dequantize())
    marked = travel(torch.ones(2).as_subclass(Marked))
    assert type(marked) is Marked
    noted = torch.ones(2)
    noted.note = "mine"  # type: ignore[attr-defined]
    assert travel(noted).note == "mine"
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert travel(nested).is_nested
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert [t.tolist() for t in travel(jagged).unbind()] == [[1, 1], [1, 1, 1]]


def _boxes(tensor: torch.Tensor) -> torch.Tensor:
    boxes = tensor.as_subclass(Boxes)
    boxes.canvas = (4, 5)
    return boxes


@either_way
@pytest.mark.parametrize("view", [lambda t: t, lambda t: t[3:5], lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[:0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint16, torch.int64], ids=str)
def test_subclasses_come_back_with_their_type_and_state_and_without_the_rest_of_their_storage(
    travel: Any, view: Any, dtype: torch.dtype
) -> None:
    plain = view(torch.arange(8000).view(100, 80).to(dtype))
    boxes = travel(_boxes(plain))
    assert type(boxes) is Boxes and boxes.canvas == (4, 5)
    assert_same(boxes.as_subclass(torch.Tensor), plain)
    stated = plain.as_subclass(WithState)
    stated.note = "mine"  # type: ignore[attr-defined]
    restored = travel(stated)
    assert type(restored) is WithState and restored.restored == {"note": "mine"}
    needing = plain.as_subclass(Marked)
    if dtype.is_floating_point:
        needing.requires_grad_()
    assert travel(needing).requires_grad == dtype.is_floating_point
    encoded = encode([_boxes(plain)])
    assert encoded.total_bytes == plain.nbytes and encoded.pickled is not None and len(encoded.pickled) < 1000


def test_a_reducer_of_a_subclass_itself_is_used() -> None:
    kept = dict(copyreg.dispatch_table)
    try:
        copyreg.pickle(Marked, lambda value: (int, (7,)))  # type: ignore[arg-type]
        assert through_segment(torch.ones(2).as_subclass(Marked)) == 7
    finally:
        copyreg.dispatch_table.clear()
        copyreg.dispatch_table.update(kept)


@either_way
def test_decoded_values_may_be_changed_in_place(travel: Any) -> None:
    tensor, array, text = travel((torch.zeros(4), np.zeros(4), bytearray(b"ab")))
    tensor += 1
    array += 1
    text[0] = 0
    assert tensor.sum() == array.sum() == 4
    assert tensor.is_contiguous()
    grown = tensor.resize_(2)
    assert grown.shape == (2,)


@either_way
def test_an_object_that_occurs_twice_comes_back_as_one(travel: Any) -> None:
    tensor = torch.ones(3)
    first, second = travel([tensor, tensor])
    assert first is second


def test_a_tensor_comes_back_as_a_view_of_the_segment_and_aligned() -> None:
    encoded = encode([torch.ones(3, dtype=torch.uint8), torch.ones(5, dtype=torch.float64), np.ones(7)])
    target = np.zeros(encoded.total_bytes, np.uint8)
    encoded.write(target)
    back = decode(encoded.pickled, encoded.offsets, target)
    target[:] = 0
    assert not back[0].any() and not back[1].any() and not back[2].any()
    assert all(start % ALIGN_BYTES == 0 for start, _ in encoded.offsets)
    assert encoded.total_bytes == 128 + 56


def test_large_things_lie_in_the_segment_and_not_in_the_pickle() -> None:
    million = 1 << 20
    for value in (torch.zeros(million), np.zeros(million), torch.zeros(1024, 1024).t(), [torch.zeros(million)] * 2):
        pickled = encode(value).pickled
        assert pickled is not None and len(pickled) < 1000, value


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: np.zeros((2048, 1024))[:, ::2], id="strided array"),
        pytest.param(lambda: bytes(8 << 20), id="bytes"),
        pytest.param(lambda: bytearray(8 << 20), id="bytearray"),
        pytest.param(lambda: [bytes(1 << 20) for _ in range(8)], id="encoded images"),
        pytest.param(lambda: torch.zeros(2 << 20, requires_grad=True), id="requires grad"),
        pytest.param(lambda: torch.zeros(2 << 20).as_subclass(Marked), id="tensor subclass"),
        pytest.param(lambda: "x" * (8 << 20), id="text"),
    ],
)
def test_large_things_of_other_kinds_are_seen_by_the_budget(make: Callable[[], Any]) -> None:
    """Bytes inside the pickle pass through the socket and lie in both processes, accounted nowhere."""
    encoded = encode(make())
    assert encoded.pickled is None or len(encoded.pickled) < 1 << 20, "bytes travel outside the arena"
    assert encoded.total_bytes >= 8 << 20


class Locked:
    """What pickle refuses until a reducer is registered."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.Lock()


@either_way
@pytest.mark.parametrize("register", [copyreg.pickle, ForkingPickler.register], ids=["copyreg", "multiprocessing"])
def test_a_reducer_that_is_registered_later_is_used(register: Any, travel: Any) -> None:
    tables = copyreg.dispatch_table, ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    kept = [dict(table) for table in tables]
    try:
        with pytest.raises(TypeError):
            travel(Locked(5))
        register(Locked, lambda value: (Locked, (value.number,)))
        assert travel(Locked(5)).number == 5
        copyreg.pickle(Locked, lambda value: (Locked, (-value.number,)))  # type: ignore[arg-type]
        assert travel(Locked(5)).number == (-5 if register is copyreg.pickle else 5), "copyreg's may be replaced"
    finally:
        for table, before in zip(tables, kept, strict=True):
            table.clear()
            table.update(before)


def test_objects_that_cannot_be_pickled_raise_the_error_of_pickle() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        encode(lambda: None)
    with pytest.raises(TypeError):
        encode([torch.ones(100), (i for i in range(3))])


@settings(max_examples=150, deadline=None)
@given(nested_values())
def test_nested_structures_come_back_exactly(value: Any) -> None:
    assert_same(through_segment(value), value)
    assert_same(through_message(value), value)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5000), max_size=20))
def test_buffers_never_overlap(sizes: list[int]) -> None:
    values = [torch.full((size,), index, dtype=torch.uint8) for index, size in enumerate(sizes)]
    for index, back in enumerate(through_segment(values)):
        assert torch.equal(back, torch.full((sizes[index],), index, dtype=torch.uint8))


def test_long_bytes_are_copied_only_into_their_place() -> None:
    value = {number: bytes([number]) * 100_000 for number in range(32)}
    tracemalloc.start()
    try:
        encoded = encode(value)
        taken_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert encoded.pickled is None and encoded.total_bytes > 32 * 100_000
    assert taken_bytes < 300_000
    target = np.zeros(encoded.total_bytes, np.uint8)
    encoded.write(target)
    assert decode(encoded.pickled, encoded.offsets, target) == value


def test_long_texts_and_tensors_of_one_object_come_back() -> None:
    value = {"x": torch.arange(5000), "text": "\ud800 é" * 50_000, "y": np.arange(7), "small": b"1"}
    encoded = encode(value)
    target = np.zeros(encoded.total_bytes, np.uint8)
    encoded.write(target)
    assert_same(decode(encoded.pickled, encoded.offsets, target), value)
