"""SharedList beside the list it was made of: the same values and types, and no copies in workers."""

from __future__ import annotations

import contextlib
import copy
import math
import multiprocessing
import os
import pickle
import struct
import threading
import tracemalloc
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock import ConfigError
from penstock.data.shared import shared_list
from penstock.data.shared.shared_list import SharedList

MIB = 1 << 20
ODD_TEXTS = ["", "\0", "a\0b", "é", "日本語", "🙂", "\ud800", "\udc00", "x\udcff", "a" * 1000, "\ufeff", "e\u0301"]
INTS = [0, 1, -1, 2**63 - 1, -(2**63), 255, 256]
NAN_WITH_BITS = struct.unpack("d", struct.pack("Q", 0x7FF8DEAD << 32))[0]
FLOATS = [0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, NAN_WITH_BITS, 5e-324]
NESTED = [
    ("a", 1),
    ["a", ("b", [None, True, {"z": 1, "a": (1.5, b"\xff")}])],
    {"path": "x", 7: None, (1, 2): [], None: 2**70, True: -0.0},
    {},
    (),
    [],
    ((((),),),),
    {"t": "\ud800", "n": math.nan},
]
CASES: dict[str, list[Any]] = {
    "nothing": [],
    "texts": ODD_TEXTS,
    "ascii texts": [str(number) for number in range(300)],
    "empty texts": [""] * 5,
    "bytes": [b"", b"\0", b"\xff\xfe", b"x" * 1000],
    "ints": INTS,
    "big ints": [2**63, -(2**63) - 1, 10**400, -(10**400)],
    "ints, one of them big": [*range(200), 2**63, 7],
    "floats": FLOATS,
    "booleans": [True, False, True],
    "None": [None] * 4,
    "nested": NESTED,
    "everything": [*ODD_TEXTS, b"", b"\0", *INTS, 2**64, *FLOATS, True, False, None, *NESTED],
    "numbers and booleans": [1, True, 1.0, 0, False, 0.0],
    "texts, later something else": [*(str(number) for number in range(500)), None, 1, "last"],
}


def exact(value: Any) -> Any:
    """Something equal for values of the same types, order and bits alone."""
    if isinstance(value, float):
        return "float", struct.pack("d", value)
    if isinstance(value, (list, tuple)):
        return type(value), [exact(item) for item in value]
    if isinstance(value, dict):
        return dict, [(exact(key), exact(item)) for key, item in value.items()]
    return type(value), value


@pytest.mark.parametrize("name", CASES)
def test_items_come_back_with_their_values_types_order_and_bits(name: str) -> None:
    items = CASES[name]
    shared = SharedList(items)
    assert len(shared) == len(items)
    assert exact(list(shared)) == exact(items)
    assert exact([shared[index] for index in range(len(items))]) == exact(items)
    assert exact([shared[index] for index in range(-len(items), 0)]) == exact(items)
    assert exact(list(reversed(shared))) == exact(items[::-1])
    assert exact(list(pickle.loads(pickle.dumps(shared)))) == exact(items)


@pytest.mark.parametrize("name", ["nothing", "texts", "ints", "everything"])
def test_slices_are_those_of_a_list_and_views_of_the_same_memory(name: str) -> None:
    items = CASES[name]
    shared = SharedList(items)
    places = [None, 0, 1, 3, -1, -2, len(items), len(items) + 5, -len(items) - 5]
    for start in places:
        for stop in places:
            for step in (None, 1, 2, -1, -3):
                cut = shared[start:stop:step]
                assert isinstance(cut, SharedList)
                assert cut._bytes is shared._bytes
                assert exact(list(cut)) == exact(items[start:stop:step])
    assert exact(list(shared[2:][::-1][1:3])) == exact(items[2:][::-1][1:3])
    assert exact(list(pickle.loads(pickle.dumps(shared[1:3])))) == exact(items[1:3])


def test_it_behaves_like_a_list_that_cannot_be_changed() -> None:
    items = ["b", "a", "b", "c"]
    shared = SharedList(items)
    assert shared == items
    assert items == shared
    assert shared == SharedList(iter(items))
    assert shared != ["b", "a"]
    assert shared != ["b", "a", "b", "d"]
    assert shared != tuple(items)
    assert "a" in shared
    assert "z" not in shared
    assert shared.index("b") == 0
    assert shared.index("b", 1) == 2
    assert shared.count("b") == 2
    assert sorted(shared) == sorted(items)
    assert [*shared, "d"] == [*items, "d"]
    assert bool(shared)
    assert not SharedList([])
    assert copy.copy(shared) is shared
    assert copy.deepcopy(shared) is shared
    with pytest.raises(ValueError):
        shared.index("z")
    with pytest.raises(TypeError):
        hash(shared)


def test_indices_are_those_of_a_list() -> None:
    shared = SharedList([10, 20, 30])
    assert shared[np.int64(1)] == shared[np.uint8(1)] == shared[torch.tensor(1)] == shared[True] == 20
    for index in (3, -4, 2**70, -(2**70)):
        with pytest.raises(IndexError, match="3 items"):
            shared[index]
    for index in ("1", 1.0, None, (0, 1)):
        with pytest.raises(TypeError, match="integers or slices"):
            shared[index]  # type: ignore[call-overload]


def test_it_cannot_be_changed_and_the_error_says_what_to_do() -> None:
    shared = SharedList([1, 2])
    with pytest.raises(TypeError, match="create a new SharedList"):
        shared[0] = 5
    with pytest.raises(TypeError, match="create a new SharedList"):
        del shared[0]
    read = SharedList([{"a": [1]}])
    read[0]["a"].append(2)
    assert read[0] == {"a": [1]}


def test_its_repr_is_short() -> None:
    assert repr(SharedList([])) == "SharedList([], 0 items in 4 B)"
    shown = repr(SharedList(["x" * 100] * 100_000))
    assert len(shown) < 200
    assert "100,000 items" in shown


class Text(str):
    pass


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([1, 2, object()], "item 2 is a object"),
        (["a"] * 70_000 + [datetime(2024, 1, 1)], "item 70000 is a datetime.datetime"),
        ([{"a": [1, {2}]}], "item 0 holds a set"),
        ([("a", np.float32(1))], "item 0 holds a numpy.float32.*tolist"),
        ([np.int64(1)], "item 0 is a numpy.int64"),
        ([{"k": 1}, {Text("k"): 1}], "item 1 holds a .*Text"),
        ([Text("a")], "item 0 is a .*Text"),
        ([Pair(1, 2)], "item 0 is a .*Pair"),
        ([OrderedDict(a=1)], "item 0 is a collections.OrderedDict"),
        ([torch.zeros(2)], "item 0 is a torch.Tensor"),
        ([bytearray(b"a")], "item 0 is a bytearray"),
        ([1, 2j], "item 1 is a complex"),
        ([int], "item 0 is a type"),
    ],
)
def test_items_it_cannot_hold_are_named_with_their_place(items: list[Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SharedList(items)


def test_items_that_contain_themselves_or_are_nested_too_deep_are_refused() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ConfigError, match="item 1 contains itself"):
        SharedList(["a", ring])
    with pytest.raises(ConfigError, match="item 1 is nested too deep: 100001 containers"):
        SharedList(["a", deep])
    while len(deep) and len(deep[0]):
        deep = deep.pop()
    # As deep as can be looked at here. From Python 3.12 on, what can be looked at can be pickled too.
    for _ in range(900):
        deep = [deep]
    try:
        pickle.dumps(deep)
    except RecursionError:
        with pytest.raises(ConfigError, match=r"item 0 is nested too deep: 90[0-9] containers"):
            SharedList([deep])
    else:
        assert SharedList([deep])[0] == deep
    twice = [1, 2]
    assert SharedList([[twice, twice]])[0] == [[1, 2], [1, 2]], "what is there twice does not hold itself"


def test_an_error_of_the_iterable_is_raised_and_leaves_no_descriptor() -> None:
    def failing() -> Iterator[str]:
        yield from map(str, range(1000))
        raise KeyError("the user's own")

    before = _shared_files()
    with pytest.raises(KeyError, match="the user's own"):
        SharedList(failing())
    with pytest.raises(ConfigError):
        SharedList([object()])
    with pytest.raises(TypeError):
        SharedList(5)  # type: ignore[arg-type]
    shared = [SharedList("abc") for _ in range(10)]
    assert len(_shared_files() - before) == 10, "one for each"
    del shared
    assert not _shared_files() - before


def _shared_files() -> set[tuple[str, int]]:
    """Open descriptors of shared memory: number and inode."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:penstock-shared" in str(link.readlink()):
                found.add((link.name, link.stat().st_ino))
    return found


@pytest.mark.parametrize("dtype", ["datetime64[ns]", "datetime64[D]", "timedelta64[s]"])
def test_arrays_of_dates_are_refused_with_a_remedy(dtype: str) -> None:
    dates = np.arange(3).astype(dtype)
    with pytest.raises(TypeError, match=r"cannot hold an array of .*; give items\.view"):
        SharedList(dates)
    with pytest.raises(TypeError, match="int64"):
        SharedList([dates[0]])
    assert [np.int64(number).view(dtype) for number in SharedList(dates.view("int64"))] == list(dates)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(100_000),
        np.arange(5, dtype=np.uint8),
        np.array([2**64 - 1, 0], np.uint64),
        np.array([0.1, np.nan, -0.0], np.float32),
        np.array([True, False]),
        np.array(["a", "日本", ""]),
        np.array([b"a", b"bc"]),
        np.array(["a", 1, None], object),
        np.arange(6).reshape(3, 2),
        np.array([(1, "a"), (2, "b")], [("n", "i4"), ("t", "U3")]),
        np.empty(0, np.int32),
    ],
)
def test_arrays_are_stored_as_their_tolist(array: np.ndarray) -> None:
    assert exact(list(SharedList(array))) == exact(array.tolist())


@pytest.mark.parametrize("name", ["texts", "everything", "nested"])
def test_contents_beyond_4_gib_are_found_by_wider_places(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_list, "_NARROW_BYTES", 16)
    shared = SharedList(CASES[name])
    assert shared._layout.wide
    assert exact(list(shared)) == exact(CASES[name])


@pytest.mark.parametrize(
    ("count", "make", "peak_bytes"),
    [(300_000, lambda number: f"images/train/{number:08d}.jpg", 12 * MIB), (64, lambda number: "x" * MIB, 12 * MIB)],
    ids=["small", "large"],
)
def test_packing_from_a_generator_never_holds_all_items(
    count: int, make: Callable[[int], str], peak_bytes: int
) -> None:
    tracemalloc.start()
    try:
        shared = SharedList(make(number) for number in range(count))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < peak_bytes
    assert shared[count - 1] == make(count - 1)


def memory_of(shared: SharedList[Any]) -> tuple[int, int]:
    """What is the same for two mappings of the same memory alone."""
    about = os.fstat(shared._bytes._fd)
    return about.st_dev, about.st_ino


def report(shared: SharedList[Any], cut: SharedList[Any], answers: Connection) -> None:
    answers.send((list(shared), list(cut), memory_of(shared), memory_of(cut)))
    answers.close()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_new_worker_uses_the_same_memory(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    shared = SharedList(CASES["everything"])
    ours, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=report, args=(shared, shared[::-2], theirs))
    worker.start()
    theirs.close()
    whole, cut, *memories = ours.recv()
    worker.join(30)
    assert worker.exitcode == 0
    assert exact(whole) == exact(CASES["everything"])
    assert exact(cut) == exact(CASES["everything"][::-2])
    assert memories == [memory_of(shared)] * 2


def private_growth_bytes(items: Any) -> int:
    """What a forked worker has to itself after a pass over all items, beyond what it had before."""

    def private_bytes() -> int:
        rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def read_all() -> None:
        before = private_bytes()
        total = sum(len(item) for item in items)
        theirs.send((private_bytes() - before, total))

    worker = context.Process(target=read_all)
    worker.start()
    theirs.close()
    growth, total = ours.recv()
    worker.join(30)
    assert total == sum(len(item) for item in items)
    return growth


def test_a_pass_in_a_forked_worker_copies_a_list_and_not_a_shared_list() -> None:
    items = [f"images/train/{number:08d}.jpg" for number in range(300_000)]
    shared = SharedList(items)
    # Pages that nobody else has looked at yet count as the worker's own.
    assert shared == items
    assert private_growth_bytes(items) > 15 * MIB
    assert private_growth_bytes(shared) < 2 * MIB


def test_threads_read_the_same_values() -> None:
    items = [(str(number), number) for number in range(5000)]
    shared = SharedList(items)
    wrong: list[int] = []

    def read(start: int) -> None:
        wrong.extend(number for number in range(start, 5000, 4) if shared[number] != items[number])

    threads = [threading.Thread(target=read, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class Lengths(torch.utils.data.Dataset[int]):
    def __init__(self, texts: SharedList[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> int:
        return len(self.texts[index])


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("loader", [torch.utils.data.DataLoader, penstock.DataLoader], ids=["torch", "penstock"])
def test_workers_of_loaders_can_read_it(loader: Any, method: str) -> None:
    texts = ["x" * (number % 50) for number in range(200)]
    batches = loader(Lengths(SharedList(texts)), batch_size=50, num_workers=1, multiprocessing_context=method)
    assert torch.cat(list(batches)).tolist() == [len(text) for text in texts]
