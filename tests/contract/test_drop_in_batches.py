"""What is in a batch: every type of sample that torch accepts, fetched and collated as torch does it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset
from torch.utils.data._utils.collate import default_collate_fn_map, default_convert

from support.datasets.contract import (
    ByTheBatch,
    Empty,
    HidesGetitems,
    Opaque,
    OwnDict,
    OwnList,
    Point,
    Ragged,
    Record,
    Samples,
    Stuck,
    TypeOfIndex,
    Uneven,
    as_list,
    collate_tells_where,
    plain,
    summed,
)
from support.loaders import MakeLoader
from support.torch_oracle import TORCH, assert_identical, assert_same_events, events

NUMPY_TYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip
TORCH_TYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16",
    "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip


def object_array(i: int) -> np.ndarray:
    array = np.empty(2, dtype=object)
    array[:] = [{"i": i}, "text"]
    return array


KINDS: dict[str, Callable[[int], Any]] = {
    "int": lambda i: i,
    "large int": lambda i: (1 << 62) + i,
    "int beyond 64 bits": lambda i: (1 << 70) + i,
    "float": lambda i: i / 3,
    "bool": lambda i: i % 2 == 0,
    "complex": lambda i: complex(i, -i),
    "str": lambda i: f"sample {i} – é",
    "bytes": lambda i: bytes([i]) * i,
    "bytearray": lambda i: bytearray([i, 1]),
    "None": lambda i: None,
    "not a number": lambda i: float("nan"),
    "dict": lambda i: {"a": torch.full((3,), i), "b": i, "c": f"{i}"},
    "dict with odd keys": lambda i: {1: i, (2, "x"): torch.ones(2) * i, None: "n"},
    "nested": lambda i: {"outer": [{"inner": (torch.ones(2) * i, i)}, [i, str(i)]]},
    "list": lambda i: [i, torch.ones(2) * i],
    "tuple": lambda i: (i, torch.ones(2) * i),
    "one-tuple": lambda i: (torch.ones(2) * i,),
    "empty tuple": lambda i: (),
    "empty dict": lambda i: {},
    "namedtuple": lambda i: Point(x=i, y=Point(torch.ones(2) * i, str(i))),
    "empty namedtuple": lambda i: Empty(),
    "own dict": lambda i: OwnDict(a=i, b=torch.ones(2) * i),
    "own list": lambda i: OwnList([i, i + 1]),
    "range": lambda i: range(i, i + 3),
    "set": lambda i: {i},
    "dataclass": lambda i: Record(name=str(i), values=torch.ones(3) * i),
    "own class": Opaque,
    "numpy array": lambda i: np.arange(6).reshape(2, 3) + i,
    "numpy, not contiguous": lambda i: (np.arange(24).reshape(4, 6) + i)[::2, ::3],
    "numpy, backwards": lambda i: (np.arange(4) + i)[::-1],
    "numpy, Fortran order": lambda i: np.asfortranarray(np.arange(6.0).reshape(2, 3) + i),
    "numpy, other byte order": lambda i: np.arange(3, dtype=">f4") + i,
    "numpy, empty": lambda i: np.empty((0, 3), dtype=np.float32),
    "numpy, no dimension": lambda i: np.array(i),
    "numpy, read-only": lambda i: np.broadcast_to(np.float32(i), (2, 2)),
    "numpy of objects": object_array,
    "numpy of strings": lambda i: np.array([f"{i}", "text"]),
    "numpy string": lambda i: np.str_(f"{i}"),
    "numpy of dates": lambda i: np.array(["2024-01-01"], dtype="datetime64[D]") + i,
    "numpy record": lambda i: np.array([(i, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "tensor, not contiguous": lambda i: (torch.arange(12).reshape(3, 4) + i).t()[::2],
    "tensor, expanded": lambda i: torch.tensor([float(i)]).expand(4),
    "tensor, channels last": lambda i: (torch.ones(1, 3, 4, 4) * i).to(memory_format=torch.channels_last),
    "tensor, empty": lambda i: torch.empty(0, 3),
    "tensor, empty and deep": lambda i: torch.empty(2, 0, 5, dtype=torch.int16),
    "tensor, no dimension": lambda i: torch.tensor(i),
    "tensor, not a number": lambda i: torch.tensor([float("nan"), -0.0, float("inf")]),
    "tensor, conjugated": lambda i: torch.complex(torch.ones(2) * i, torch.ones(2)).conj(),
    "tensor, view of a large one": lambda i: torch.arange(100_000)[i : i + 3],
    "tensor, 1 MB": lambda i: torch.full((512, 512), float(i)),
    "sparse": lambda i: torch.eye(3).mul(i).to_sparse(),
    "sparse rows": lambda i: torch.eye(3).mul(i + 1).to_sparse_csr(),
    "nested tensor": lambda i: torch.nested.nested_tensor([torch.ones(2) * i, torch.ones(3)]),
    "parameter": lambda i: torch.nn.Parameter(torch.ones(2) * i, requires_grad=False),
    "quantized": lambda i: torch.quantize_per_tensor(torch.ones(2) * i, 0.5, 0, torch.quint8),
    "dtype and size": lambda i: (torch.float32, torch.Size([i, 2]), torch.device("cpu")),
    "type": lambda i: int,
    "None inside": lambda i: {"a": None, "b": i},
    **{f"numpy {name}": lambda i, name=name: np.full((2, 2), i % 2, dtype=name) for name in NUMPY_TYPES},
    **{f"numpy scalar {name}": lambda i, name=name: np.dtype(name).type(i % 2) for name in NUMPY_TYPES},
    **{
        f"tensor {name}": lambda i, name=name: torch.full((2, 2), i % 2).to(getattr(torch, name))
        for name in TORCH_TYPES
    },
}
"""What a sample can be. Made in the worker, from a fork: nothing here has to be picklable to get there."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
class TestKindsOfSamples:
    """Batches of each kind, or torch's error where torch has one."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_default_collate_gives_what_torch_gives(self, kind: str) -> None:
        data = Samples(KINDS[kind], 11)
        for num_workers in (2, 0):  # torch collates a few kinds otherwise in workers
            given: dict[str, Any] = {"batch_size": 4, "num_workers": num_workers}
            assert_same_events(events(loader_of(data, **given)), events(TORCH(data, **given)))

    @pytest.mark.parametrize("num_workers", [0, 2])
    @pytest.mark.parametrize("mode", ["one by one", "own collate"])
    def test_samples_of_every_kind_arrive_as_they_were_made(self, mode: str, num_workers: int) -> None:
        kinds = list(KINDS.values())
        if mode == "one by one":
            kinds = [kind for kind in kinds if can_be_converted(kind(0))]
        data = Samples(lambda i: kinds[i % len(kinds)](i // len(kinds)), 2 * len(kinds))
        one_by_one = mode == "one by one"
        given: dict[str, Any] = {"batch_size": None} if one_by_one else {"batch_size": 7, "collate_fn": as_list}
        theirs = list(TORCH(data, **given))  # without workers: nothing can be lost on the way
        assert_identical(list(loader_of(data, num_workers=num_workers, **given)), theirs)


def can_be_converted(sample: Any) -> bool:
    try:
        default_convert(sample)
    except (TypeError, ValueError):
        return False
    return True


def loader_of(*args: Any, **kwargs: Any) -> Any:
    import penstock

    return penstock.DataLoader(*args, **kwargs)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_samples_that_change_along_the_way_are_collated_as_torch_does(
    num_workers: int, penstock_maker: MakeLoader
) -> None:
    for data in (Ragged(), Uneven()):
        for batch_size in (4, 3):
            given: dict[str, Any] = {"batch_size": batch_size, "num_workers": num_workers}
            assert_same_events(events(penstock_maker(data, **given)), events(TORCH(data, **given)))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"batch_size": 4},
        {"batch_size": 4, "drop_last": True},
        {"batch_size": 50},
        {"batch_size": None},
        {"sampler": [7, 1, 1, 3], "batch_size": 3},
        {"sampler": range(2, 9), "batch_size": 2, "drop_last": True},
        {"batch_sampler": [[0, 1], (2, 3, 4), [5]]},
        {"batch_sampler": [[3], [], [1]]},
        {"batch_size": 4, "prefetch_factor": 1},
    ],
    ids=str,
)
def test_the_epoch_equals_torchs(given: dict[str, Any], num_workers: int, penstock_maker: MakeLoader) -> None:
    if "prefetch_factor" in given and not num_workers:
        pytest.skip("prefetching needs workers")
    data = Samples(plain, 10)
    theirs = events(TORCH(data, num_workers=num_workers, **given))
    assert_same_events(events(penstock_maker(data, num_workers=num_workers, **given)), theirs)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchs_own_datasets_load_unchanged(num_workers: int) -> None:
    tensors = TensorDataset(torch.arange(20).reshape(10, 2), torch.arange(10.0))
    numbers: Any = list(range(10))
    pairs = StackDataset(a=tensors, b=numbers)
    for data in (
        tensors,
        Subset(tensors, [5, 1, 3]),
        ConcatDataset([tensors, tensors]),
        pairs,
        list(range(5)),
    ):
        ours = loader_of(data, batch_size=4, num_workers=num_workers)
        assert_identical(list(ours), list(TORCH(data, batch_size=4)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_that_fetches_whole_batches_is_asked_for_whole_batches(
    num_workers: int, any_maker: MakeLoader
) -> None:
    batches = list(any_maker(ByTheBatch(), batch_size=4, num_workers=num_workers))
    assert [index.tolist() for index, _ in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [asked.tolist() for _, asked in batches] == [[4] * 4, [4] * 4, [2] * 2]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_without_batches_samples_are_fetched_one_by_one(num_workers: int, any_maker: MakeLoader) -> None:
    single = list(any_maker(ByTheBatch(), batch_size=None, num_workers=num_workers))
    assert single == [[index, 0] for index in range(10)]
    hidden = list(any_maker(HidesGetitems(), batch_size=5, num_workers=num_workers))
    assert [asked.tolist() for _, asked in hidden] == [[0] * 5, [0] * 5]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "sampler",
    [
        [0, 1, 2],
        ["a", "b", "c"],
        [(0, 1), (2, 3), (4, 5)],
        [np.int64(3), np.int32(4), True],
        [None, 1.5, b"x"],
    ],
    ids=["int", "str", "tuple", "numpy", "other"],
)
def test_an_index_reaches_the_dataset_as_the_sampler_made_it(sampler: list[Any], num_workers: int) -> None:
    for given in ({"batch_size": 2}, {"batch_size": None}):
        ours = loader_of(TypeOfIndex(), sampler=sampler, num_workers=num_workers, **given)
        assert_identical(list(ours), list(TORCH(TypeOfIndex(), sampler=sampler, **given)))


def test_a_tensor_as_index_reaches_the_dataset_as_a_tensor() -> None:
    class ByTensor(Dataset):
        def __getitem__(self, index: torch.Tensor) -> torch.Tensor:
            return index * 2

    sampler = list(torch.arange(12).split(4))
    ours = loader_of(ByTensor(), sampler=sampler, batch_size=None, num_workers=2)
    assert_identical(list(ours), [indices * 2 for indices in sampler])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_that_yields_lists_loads_in_bulk(num_workers: int, any_maker: MakeLoader) -> None:
    data = TensorDataset(torch.arange(10.0))
    batches = list(any_maker(data, sampler=[[0, 1], [5, 6, 7]], batch_size=None, num_workers=num_workers))
    assert [batch[0].tolist() for batch in batches] == [[0, 1], [5, 6, 7]]


def test_a_custom_collate_runs_once_per_batch_in_a_worker(any_maker: MakeLoader) -> None:
    data = Samples(plain, 10)
    batches = list(any_maker(data, batch_size=4, num_workers=2, collate_fn=collate_tells_where))
    for pid, worker, _ in batches:
        assert pid != os.getpid()
        assert worker in (0, 1)
    parts = (range(4), range(4, 8), range(8, 10))
    assert_identical([batch for *_, batch in batches], [[plain(i) for i in part] for part in parts])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_custom_collate_may_return_anything(num_workers: int, penstock_maker: MakeLoader) -> None:
    data = Samples(lambda i: torch.ones(3) * i, 10)
    for collate in (summed, as_list, lambda samples: Record("r", torch.stack(samples)), len):
        theirs = list(TORCH(data, batch_size=4, collate_fn=collate))
        ours = list(penstock_maker(data, batch_size=4, collate_fn=collate, num_workers=num_workers))
        assert_identical(ours, theirs)


def test_a_type_registered_with_torchs_collate_is_collated_by_its_function(any_maker: MakeLoader) -> None:
    default_collate_fn_map[Opaque] = lambda batch, *, collate_fn_map=None: ["ours", len(batch)]
    try:
        batches = list(any_maker(Samples(Opaque, 6), batch_size=4, num_workers=2))
    finally:
        del default_collate_fn_map[Opaque]
    assert batches == [["ours", 4], ["ours", 2]]


def test_out_of_order_a_slow_sample_delays_its_own_batch_only(any_maker: MakeLoader) -> None:
    if any_maker is TORCH and torch.__version__.startswith("2.6."):
        pytest.skip("the loader of torch 2.6 gives a slow worker more batches and waits for them")
    data = Stuck()
    iterator = iter(any_maker(data, batch_size=1, num_workers=2, in_order=False, timeout=60))
    first = [int(next(iterator)) for _ in range(8)]  # torch's slow worker holds one more batch in its queue
    assert 0 not in first
    data.release.set()
    assert sorted(first + [int(batch) for batch in iterator]) == list(range(12))


def test_out_of_order_delivers_every_batch_once(any_maker: MakeLoader) -> None:
    batches = list(any_maker(Samples(plain, 23), batch_size=2, num_workers=2, in_order=False))
    expected = [list(range(i, min(i + 2, 23))) for i in range(0, 23, 2)]
    assert sorted(index.tolist() for _, index in batches) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_empty_epoch_ends_at_once(num_workers: int, any_maker: MakeLoader) -> None:
    assert list(any_maker([], num_workers=num_workers)) == []
    assert list(any_maker([1, 2], batch_size=3, drop_last=True, num_workers=num_workers)) == []
    assert list(any_maker([1], batch_sampler=[], num_workers=num_workers)) == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iterator_is_its_own_iterator_and_stays_exhausted(num_workers: int, any_maker: MakeLoader) -> None:
    iterator = iter(any_maker([1, 2, 3], num_workers=num_workers))
    assert iter(iterator) is iterator
    assert len(iterator) == 3
    assert len(list(iterator)) == 3
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_iterator_cannot_be_pickled(num_workers: int, any_maker: MakeLoader) -> None:
    import pickle

    with pytest.raises(NotImplementedError):
        pickle.dumps(iter(any_maker([1, 2, 3], num_workers=num_workers)))
