"""Containers inside objects: found by their way, measured as the kernel would, without running the objects' code."""

from __future__ import annotations

import collections
import ctypes
import functools
import gc
import itertools
import os
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from penstock.data.shared.shared_list import SharedList
from penstock.lab.dataset.containers import Container, Containers, find_containers

MIB = 1 << 20


class Holder(Dataset[Any]):
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


class Slotted:
    __slots__ = ("later", "names")

    def __init__(self, names: list[str]) -> None:
        self.names = names


def texts(count: int = 50_000) -> list[str]:
    return [f"images/train/{number:08d}.jpg" for number in range(count)]


def found(root: object, least_bytes: int = MIB) -> dict[str, Container]:
    # Time enough for a busy machine: that the walk ends in time has a test of its own.
    looked = find_containers(root, least_bytes=least_bytes, seconds=60.0)
    return {container.path: container for container in looked.found}


def test_each_container_is_found_with_its_path() -> None:
    table = texts()

    def transform(sample: Any, extra: Any = tuple(texts())) -> Any:  # noqa: B008
        return table, extra

    class Callable_:
        def method(self) -> None: ...

    bound = Callable_()
    bound.words = set(texts())  # type: ignore[attr-defined]
    root = Holder(
        samples=texts(),
        by_name={"train": dict.fromkeys(texts(), 1.5), 7: collections.deque(texts())},
        slotted=Slotted(texts()),
        transform=transform,
        partial=functools.partial(transform, texts(), extra=texts()),
        hook=bound.method,
        objects=np.array(texts(), object),
    )
    assert set(found(root)) == {
        "dataset.samples",
        "dataset.by_name['train']",
        "dataset.by_name[7]",
        "dataset.slotted.names",
        "dataset.transform.<closure>.table",
        "dataset.transform.<defaults>[0]",
        "dataset.partial.args[0]",
        "dataset.partial.keywords['extra']",
        "dataset.hook.words",
        "dataset.objects",
    }


def test_datasets_in_datasets_are_walked() -> None:
    inner = Holder(samples=texts())
    root = ConcatDataset([Subset(inner, list(range(1000, 90_000))), Subset(inner, [0])])
    assert set(found(root)) == {"dataset.datasets[0].dataset.samples", "dataset.datasets[0].indices"}


def test_attributes_of_the_class_and_variables_of_its_functions_are_walked() -> None:
    table, lookup = texts(), texts()

    class Base:
        names: ClassVar[list[str]] = texts()

        @property
        def first(self) -> str:
            raise AssertionError("ran")

    class Table(Base):
        words: ClassVar[dict[str, float]] = dict.fromkeys(texts(), 1.5)

        def __getitem__(self, index: int) -> str:
            return table[index]

        @staticmethod
        def find(index: int) -> str:
            return lookup[index]

    assert set(found(Holder(inner=Table(), again=Table()))) == {
        "dataset.inner.names",
        "dataset.inner.words",
        "dataset.inner.__getitem__.<closure>.table",
        "dataset.inner.find.<closure>.lookup",
    }


def extra_bytes(container: Any) -> int:
    """What the keys of a dict take."""
    return sum(map(sys.getsizeof, container)) if isinstance(container, dict) else 0


@pytest.mark.parametrize("make", [list, tuple, set, lambda items: dict(enumerate(items, 1000))])
def test_an_item_of_two_containers_counts_with_the_first_of_them(make: Callable[[list[str]], Any]) -> None:
    samples = texts()
    alone = sum(container.bytes for container in find_containers(Holder(a=samples), seconds=60.0).found)
    half = make(samples[: len(samples) // 2])
    both = find_containers(Holder(a=samples, b=half, c=texts()), least_bytes=0, seconds=60.0).found
    by_path = {container.path: container for container in both}
    assert by_path["dataset.a"].bytes == pytest.approx(alone, rel=0.05)
    assert by_path["dataset.b"].bytes == pytest.approx(sys.getsizeof(half) + extra_bytes(half), rel=0.1)
    assert by_path["dataset.c"].bytes == pytest.approx(alone, rel=0.05), "these are its own"


def test_an_object_reached_twice_counts_once_and_cycles_end() -> None:
    samples = texts()
    root = Holder(samples=samples, imgs=samples)
    root.me = root  # type: ignore[attr-defined]
    samples.append(root)  # type: ignore[arg-type]
    (container,) = find_containers(root).found
    assert container.path in ("dataset.samples", "dataset.imgs")
    assert container.items == 50_001
    assert container.holds == "str"
    assert container.per_worker_bytes == pytest.approx(50_000 * 80, rel=0.05)


def test_two_lists_of_the_same_objects_count_them_once_together() -> None:
    samples = texts()
    containers = found(Holder(a=samples, b=samples[::-1]), least_bytes=0)
    assert sum(container.per_worker_bytes for container in containers.values()) > 50_000 * 80 * 0.9


def test_arrays_tensors_and_shared_lists_cost_workers_nothing() -> None:
    root = Holder(
        numbers=np.zeros(MIB),
        weights=torch.zeros(MIB),
        model=torch.nn.Linear(1000, 1000),
        names=SharedList(texts(100_000)),
        tail=SharedList(texts(100_000))[10:],
        file=gc,
        kind=Slotted,
    )
    containers = found(root)
    assert set(containers) == {"dataset.numbers", "dataset.names", "dataset.tail"}
    assert all(container.per_worker_bytes == 0 for container in containers.values())
    assert containers["dataset.names"].kind == "SharedList"
    assert containers["dataset.tail"].items == 99_990
    assert containers["dataset.numbers"].bytes == 8 * MIB


def test_a_frame_of_pandas_shows_its_columns_of_objects() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"name": pandas.Series(texts(), dtype=object), "number": np.arange(50_000.0)})
    containers = found(Holder(frame=frame))
    assert containers["dataset.frame"].kind == "array of object"
    assert containers["dataset.frame"].items == 50_000
    assert containers["dataset.frame"].per_worker_bytes == pytest.approx(50_000 * 80, rel=0.2)


class Hostile(list[Any]):
    """Everything that can run when it is looked at, fails."""

    def fail(self, *_: object) -> NoReturn:
        raise AssertionError("the object's own code ran")

    __len__ = __iter__ = __getitem__ = __bool__ = __hash__ = __eq__ = __sizeof__ = __repr__ = __contains__ = fail  # type: ignore[assignment]
    __getattr__ = __getattribute__ = __reduce__ = __reduce_ex__ = __dir__ = fail  # type: ignore[assignment]

    @property
    def __class__(self) -> NoReturn:  # type: ignore[override]
        self.fail()


class HostileObject:
    def fail(self, *_: object) -> NoReturn:
        raise AssertionError("the object's own code ran")

    __getattr__ = __getattribute__ = __len__ = __iter__ = __bool__ = __hash__ = __eq__ = __repr__ = fail  # type: ignore[assignment]
    names = property(fail)


def test_no_code_of_the_objects_runs() -> None:
    hostile = HostileObject()
    object.__getattribute__(hostile, "__dict__")["hidden"] = texts()
    items = Hostile(texts())
    lists = [Hostile(["a"]) for _ in range(20_000)]
    objects = [HostileObject() for _ in range(20_000)]
    containers = found(Holder(hostile=hostile, items=items, lists=lists, objects=objects))
    assert set(containers) == {"dataset.hostile.hidden", "dataset.items", "dataset.lists", "dataset.objects"}
    assert containers["dataset.items"].items == 50_000


def test_attribute_names_that_are_no_strings_do_not_end_the_walk() -> None:
    odd: Any = type("Odd", (), {"__module__": None})()
    odd.__dict__[7] = texts()
    assert len(found(Holder(odd=odd, generator=(item for item in texts()), none=None, ellipsis=...))) == 2


def private_growth_bytes(read: Callable[[], None]) -> int:
    """What a forked child has to itself after ``read``, beyond what it had before."""

    def private_bytes() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))

    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            gc.freeze()
            before = private_bytes()
            read()
            os.write(theirs, str(private_bytes() - before).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as answers:
        growth = int(answers.read())
    os.waitpid(child, 0)
    return growth


LABELS = [f"label {number}" for number in range(1000)]
outside = functools.cache(lambda: texts(200_000))
MADE: dict[str, Callable[[], Any]] = {
    "a million texts": lambda: texts(1_000_000),
    "tuples": lambda: [(f"images/{number:08d}.jpg", number) for number in range(200_000)],
    "tuples with few labels": lambda: [
        (f"images/{number:08d}.jpg", LABELS[number % 1000]) for number in range(200_000)
    ],
    "few texts, often": lambda: [outside()[number % 50_000] for number in range(500_000)],
    "texts that others hold too": lambda: list(outside()),
    "dicts": lambda: [{"path": f"images/{number}.jpg", "label": number} for number in range(100_000)],
    "a dict": lambda: {f"images/{number:08d}.jpg": number * 0.5 for number in range(200_000)},
    "a set": lambda: set(texts(200_000)),
    "lists of floats": lambda: [[float(number) for number in range(1000)] for _ in range(300)],
    "large texts": lambda: ["x" * 20_000 + str(number) for number in range(2000)],
    "objects with slots": lambda: [Slotted([str(number) * 3]) for number in range(100_000)],
}


def touch(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            touch(key)
            touch(item)
    elif isinstance(value, Slotted):
        touch(value.names)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            touch(item)


@pytest.mark.parametrize("name", MADE)
def test_the_estimate_is_what_a_forked_child_copies(name: str) -> None:
    held = MADE[name]()
    (container,) = find_containers(Holder(held=held), least_bytes=0, seconds=60.0).found
    growth = private_growth_bytes(lambda: touch(held))
    assert container.per_worker_bytes == pytest.approx(growth, rel=0.35)


def test_the_walk_ends_at_its_deadline_with_the_containers_found_so_far() -> None:
    ticks = 0.0

    def clock() -> float:
        nonlocal ticks
        ticks += 0.1
        return ticks

    root = Holder(**{f"list_{number}": texts(1000) for number in range(50)})
    stopped = find_containers(root, least_bytes=0, clock=clock)
    assert not stopped.complete
    assert 0 < len(stopped.found) < 50
    assert len(find_containers(root, least_bytes=0, seconds=60).found) == 50


def test_many_small_containers_are_reported_as_one_large_container() -> None:
    # So many that the holes other tests left among their pages do not matter.
    tree = [[[str(number) * 5 for number in range(20)] for _ in range(30)] for _ in range(600)]
    (container,) = find_containers(Holder(tree=tree), least_bytes=MIB // 2, seconds=60).found
    assert (container.path, container.items, container.holds) == ("dataset.tree", 600, "list")
    assert container.per_worker_bytes == pytest.approx(private_growth_bytes(lambda: touch(tree)), rel=0.35)


def test_a_chain_too_long_to_follow_does_not_hide_other_containers() -> None:
    chain: Any = None
    for number in range(100_000):
        chain = (chain, number)
    looked = find_containers(Holder(a=chain, samples=texts(), z=chain))
    assert "dataset.samples" in {container.path for container in looked.found}
    assert not looked.complete
    while chain:
        chain = chain[0]


def test_objects_of_any_type_are_walked_without_an_error() -> None:
    odd = [
        BytesIO(b"x"), threading.Lock(), threading.Thread(), weakref.ref(Holder), ctypes.c_int(3), re.compile("a"),
        (number for number in range(3)), itertools.count(), memoryview(b"a"), super(Holder, Holder()), property(),
        types.MappingProxyType({}), np.ma.array([1]), torch.Size([1]), torch.zeros(1).to_sparse(), ..., NotImplemented,
        slice(1, 2), iter({1: 2}), {}.keys(), Exception("x"), lambda: LABELS, sys._getframe(), 2j, True, object(),
    ]  # fmt: skip
    assert find_containers(Holder(odd=odd)) == Containers(found=(), complete=True)
    (container,) = find_containers(Holder(odd=odd * 1000), least_bytes=0, seconds=60.0).found
    assert container.bytes < MIB
