"""A wrapped dataset: its samples are loaded once, and told from those of other datasets."""

from __future__ import annotations

import datetime
import functools
import operator
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import penstock
from penstock.cache.cache import Cache
from penstock.cache.fingerprint import fingerprint_of
from support.caches import MIB
from support.ready_python import ReadyPython


class Numbers(Dataset):
    extra = "an attribute of its own"

    def __init__(self, count: int = 20, factor: int = 1, transform: Any = None) -> None:
        self.count, self.factor, self.transform = count, factor, transform
        self.loaded = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded += 1
        sample = torch.full((1000,), index * self.factor)
        return sample if self.transform is None else self.transform(sample)


class Augmented(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) * random.random()


def make(policy: str = "auto") -> Cache:
    return Cache(8 * MIB, policy)


def test_a_wrapped_dataset_loads_each_sample_once_and_otherwise_behaves_like_the_dataset() -> None:
    inner = Numbers()
    with make() as cache:
        wrapped = cache.wrap(inner)
        assert len(wrapped) == 20 and wrapped.extra == Numbers.extra
        for _ in range(3):
            for index in (0, 5, 19):
                assert torch.equal(wrapped[index], torch.full((1000,), index))
        assert inner.loaded == 3
        with pytest.raises(AttributeError, match="nothing"):
            _ = wrapped.nothing


@pytest.mark.parametrize("loader", [DataLoader, penstock.DataLoader], ids=["torch", "penstock"])
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_the_workers_of_any_loader_share_the_cache(loader: Any, start: str) -> None:
    with make() as cache:
        wrapped = cache.wrap(Numbers())
        # Each epoch has workers of its own; a spawned one takes a second to import torch.
        workers = 2 if start == "fork" else 1
        for _ in range(2):
            batches = list(loader(wrapped, batch_size=5, num_workers=workers, multiprocessing_context=start))
            assert torch.equal(torch.cat(batches)[:, 0], torch.arange(20))
        stats = cache.stats()
        assert (stats.items, stats.hits, stats.misses) == (20, 20, 20)


def test_the_stats_are_printed_under_the_name_of_the_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    with make() as cache:
        wrapped = cache.wrap(Numbers())
        for index in (0, 1, 0):
            _ = wrapped[index]
        wrapped.print_cache_stats()
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "[Numbers] Cache Stats:"
        assert lines[1] == "  - Size: 2 items"
        assert lines[2].startswith("  - Memory: 0.") and lines[2].endswith(" / 8.0 MB")
        assert lines[3] == "  - Hit Rate: 33.33% (1 hits / 2 misses)"


def test_a_random_dataset_gives_one_warning_and_a_deterministic_one_none() -> None:
    with make() as cache, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        plain, random_one = cache.wrap(Numbers()), cache.wrap(Augmented())
        for index in range(20):
            _ = plain[index]
        assert not seen
        for index in range(20):
            _ = random_one[index]
        assert [str(each.message)[:29] for each in seen] == ["Augmented draws random numbers"[:29]]
        assert torch.equal(random_one[3], random_one[3])


def test_two_datasets_in_one_cache_do_not_get_each_others_samples() -> None:
    with make() as cache:
        one, two = cache.wrap(Numbers(factor=1)), cache.wrap(Numbers(factor=2))
        assert one[3][0] == 3 and two[3][0] == 6 and one[3][0] == 3
        given = cache.wrap(Numbers(factor=7), fingerprint=one.fingerprint)
        assert given[3][0] == 3, "whoever gives a fingerprint says what is the same"


def test_auto_is_static_for_whole_samples() -> None:
    inner = Numbers(count=4000)
    with make() as cache:
        wrapped = cache.wrap(inner)
        for index in range(4000):
            _ = wrapped[index]
        stats = cache.stats()
        assert stats.evictions == 0 and 500 < stats.items < 1100
        for index in range(500):
            _ = wrapped[index]
        assert inner.loaded == 4000


def test_a_dataset_without_indices_is_refused() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with make() as cache, pytest.raises(penstock.ConfigError, match="no indices"):
        cache.wrap(Stream())


# -- fingerprints -----------------------------------------------------------------------------------


def double(sample: torch.Tensor) -> torch.Tensor:
    return sample * 2


def triple(sample: torch.Tensor) -> torch.Tensor:
    return sample * 3


class Scale:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        return sample * self.by


class Slotted:
    __slots__ = ("by",)

    def __init__(self, by: float) -> None:
        self.by = by


def nested(innermost: Any) -> Any:
    dataset: Any = Numbers(transform={"compose": [[{"one of": [innermost]}]]})
    for _ in range(4):
        dataset = Subset(dataset, [0, 1])
    return dataset


def holding_itself() -> Numbers:
    held: list[Any] = [1]
    held.append(held)
    return Numbers(transform=held)


DIFFERENT: list[Any] = [
    Numbers(), Numbers(count=21), Numbers(factor=2), Augmented(), Numbers(transform=double), Numbers(transform=triple),
    Numbers(transform=Scale(1)), Numbers(transform=Scale(2)), Numbers(transform=[Scale(1), Scale(2)]),
    Numbers(transform=functools.partial(torch.mul, other=2)), Numbers(transform=functools.partial(torch.mul, other=3)),
    Numbers(transform=lambda x: x + 1), Numbers(transform=lambda x: x + 2), Numbers(transform={"a": 1}),
    Numbers(transform={"a": 2}), Numbers(transform={"a", "b"}), Numbers(transform=Path("a")), Numbers(transform="a"),
    Numbers(transform=np.zeros(5)), Numbers(transform=np.ones(5)), Numbers(transform=torch.zeros(5)),
    Numbers(transform=[str(number) for number in range(5000)]), Numbers(transform=Slotted(1)),
    Numbers(transform=Slotted(2)), Numbers(transform=torch.nn.Linear(1, 1)), TensorDataset(torch.zeros(3)),
    TensorDataset(torch.ones(3)), Numbers(transform=torch.mul), Numbers(transform=torch.add),
    Numbers(transform=functools.partial(torch.mul, 2)), Numbers(transform=functools.partial(torch.add, 2)),
    Numbers(transform=re.compile("a")), Numbers(transform=re.compile("b")), Numbers(transform=operator.itemgetter(1)),
    Numbers(transform=operator.itemgetter(2)), Numbers(transform=datetime.date(2026, 1, 1)), Numbers(transform=np.sin),
    Numbers(transform=datetime.date(2026, 1, 2)), Numbers(transform=np.cos), nested(Scale(1)), nested(Scale(2)),
    holding_itself(), Numbers(transform=Scale(1).__call__), Numbers(transform=torch.int8),
]  # fmt: skip


def test_datasets_that_differ_have_different_fingerprints() -> None:
    prints = [fingerprint_of(dataset) for dataset in DIFFERENT]
    assert len(set(prints)) == len(prints)


SAME = [
    "Numbers()", "Numbers(transform=double)", "Numbers(transform=[Scale(1), {'k': Slotted(3)}])",
    "Numbers(transform={'b', 'a', 'c', 'd'})", "Numbers(transform=holding_itself().transform)",
    "Numbers(transform=[str(n) for n in range(5000)])", "Numbers(transform=open('/dev/null'))",
    "Numbers(transform=__import__('threading').Lock())", "Numbers(transform=__import__('logging').getLogger('x'))",
    "Numbers(transform=functools.partial(double))", "Numbers(transform=np)", "Numbers(transform=re.compile('a'))",
    "Numbers(transform=torch.Generator())", "Numbers(transform=np.random.default_rng())", "nested(Scale(1))",
    "Numbers(transform=random.Random())", "Numbers(transform=torch.mul)", "Numbers(transform=datetime.timezone.utc)",
]  # fmt: skip


def test_the_same_dataset_has_the_same_fingerprint_in_every_process(python: ReadyPython) -> None:
    code = "from unit.cache.test_cache_dataset import *\nfor text in SAME: print(fingerprint_of(eval(text)))"
    # The two differ in the seed of Python's hashes.
    runs = [
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True),
        python.run(code),
    ]
    assert runs[0].returncode == 0, runs[0].stderr
    assert runs[0].stdout == runs[1].stdout and len(runs[0].stdout.split()) == len(SAME)


def test_a_class_has_one_fingerprint_in_its_script_and_where_the_script_is_imported(tmp_path: Path) -> None:
    script = tmp_path / "training.py"
    script.write_text(
        "class Squares:\n"
        "    def __init__(self, power): self.power = power\n"
        "    def __len__(self): return 9\n"
        "    def __getitem__(self, index): return index ** self.power\n"
        "if __name__ == '__main__':\n"
        "    from penstock.cache.fingerprint import fingerprint_of\n"
        "    import training\n"
        "    print(fingerprint_of(Squares(2)), fingerprint_of(training.Squares(2)), fingerprint_of(Squares(3)))\n"
    )
    ran = subprocess.run([sys.executable, "-W", "ignore", script], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    here, imported, other = ran.stdout.split()
    assert here == imported != other


def test_a_cache_inside_the_dataset_does_not_change_its_fingerprint() -> None:
    prints = set()
    for _ in range(2):
        with make() as cache:
            prints.add(fingerprint_of(Numbers(transform=cache)))
    assert len(prints) == 1


FACTOR = 2


def helper(value: float) -> float:
    return value * FACTOR


def by_helper(value: float) -> float:
    return helper(value)


class WithClassValue(Numbers):
    size = 2


def test_a_fingerprint_covers_what_code_refers_to_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    prints = [fingerprint_of(Numbers(transform=by_helper)), fingerprint_of(WithClassValue())]
    monkeypatch.setitem(globals(), "FACTOR", 5)
    prints.append(fingerprint_of(Numbers(transform=by_helper)))
    monkeypatch.setitem(globals(), "helper", lambda value: value * 7)
    prints.append(fingerprint_of(Numbers(transform=by_helper)))
    monkeypatch.setattr(WithClassValue, "size", 3)
    prints.append(fingerprint_of(WithClassValue()))
    assert len(set(prints)) == len(prints)


def test_a_fingerprint_covers_every_item_of_a_long_list() -> None:
    paths = [(f"{number}.png", number % 10) for number in range(20_000)]
    array = torch.zeros(3_000_000)
    tensors = {number: torch.zeros(3) for number in range(3000)}
    before = [fingerprint_of(Numbers(transform=each)) for each in (paths, array, tensors)]
    again = [fingerprint_of(Numbers(transform=each)) for each in (list(paths), array.clone(), dict(tensors))]
    assert before == again
    paths[12_345] = ("12345.png", 9)
    array[1_234_567] = 1
    tensors[1234][1] = 1
    after = [fingerprint_of(Numbers(transform=each)) for each in (paths, array, tensors)]
    assert not set(before) & set(after)


def test_a_fingerprint_covers_the_file_of_a_mapped_array(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.zeros(1000))
    mapped = np.load(tmp_path / "array.npy", mmap_mode="r")
    before = fingerprint_of(Numbers(transform=mapped))
    assert before == fingerprint_of(Numbers(transform=np.load(tmp_path / "array.npy", mmap_mode="r")))
    np.save(tmp_path / "array.npy", np.zeros(1001))
    assert before != fingerprint_of(Numbers(transform=np.load(tmp_path / "array.npy", mmap_mode="r")))


def test_a_dataset_that_has_changed_since_it_was_wrapped_gives_a_warning() -> None:
    dataset = Numbers()
    with make() as cache:
        cache.wrap(dataset)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache.wrap(dataset)
            vars(dataset)["handle"] = {"opened": 1}
            cache.wrap(dataset, fingerprint="the same")
        with pytest.warns(RuntimeWarning, match="has changed since its samples were cached"):
            cache.wrap(dataset)


def test_caching_whole_samples_as_well_as_their_parts_gives_a_warning() -> None:
    with make() as cache:
        inner = Numbers()
        outer = Numbers(transform=lambda value: cache.get_or_load("part", lambda: value))
        assert cache.wrap(inner)[1] is not None
        with pytest.warns(RuntimeWarning, match="keeps the whole samples"):
            _ = cache.wrap(outer)[1]
