"""What ``stats()`` says while several iterations of one loader run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

import penstock
import penstock.loader.iterator as iterator_module
from penstock.loader.gauges import waited_s, workers_now
from penstock.units import parse_size

MIB = 1 << 20

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memfd")


def test_stats_are_those_of_the_iteration_that_began_last() -> None:
    """Whatever order a set of iterators would have: with several pairs a wrong choice shows at least once."""
    dataset = TensorDataset(torch.zeros(8, 1))
    iterations: list[Any] = []
    for _ in range(6):
        loader: penstock.DataLoader[Any] = penstock.DataLoader(
            dataset, backend="thread", num_workers=1, memory=64 * MIB
        )
        older = iter(loader)
        for step in range(1, 4):
            loader._memory = parse_size((64 + step) * MIB)
            newer = iter(loader)
            iterations += [older, newer]
            assert loader.stats().memory_bytes == (64 + step) * MIB
        loader.close()


def test_stats_can_be_read_while_another_iteration_begins() -> None:
    """The iterators are read as one value: one that begins during the reading changes no collection under it."""
    loader: penstock.DataLoader[Any] = penstock.DataLoader(
        TensorDataset(torch.zeros(8, 1)), backend="thread", num_workers=1, memory=64 * MIB
    )
    first = iter(loader)
    before = loader._iterators
    second = iter(loader)
    assert [ref() for ref in before] == [first]
    assert [ref() for ref in loader._iterators] == [first, second]
    loader.close()


def test_figures_of_an_iteration_outlive_it() -> None:
    loader: penstock.DataLoader[Any] = penstock.DataLoader(
        TensorDataset(torch.zeros(64, 1000)), batch_size=8, num_workers=1, memory=64 * MIB
    )
    assert sum(1 for _ in loader) == 8
    stats = loader.stats()
    assert stats.peak_in_flight_bytes > 0 and stats.in_flight_bytes == 0 and stats.shared_batches
    loader.close()


def test_stats_are_readable_text() -> None:
    with penstock.Cache("8MiB") as cache:
        loader: penstock.DataLoader[Any] = penstock.DataLoader(
            cache.wrap(TensorDataset(torch.zeros(64, 1000))), batch_size=8, memory=64 * MIB
        )
        list(loader)
        stats = loader.stats()
        lines = dict(line.split(maxsplit=1) for line in str(stats).splitlines())
    assert list(lines) == ["delivered", "waiting", "memory", "workers", "cache"]
    assert lines["delivered"].startswith("8 batches, 64 samples, ")
    assert lines["memory"].endswith("of a budget of 64.0 MiB")
    assert lines["cache"].endswith("of 8.00 MiB, 64 items, 0.0% hits")

    printed: list[str] = []
    stats._repr_pretty_(SimpleNamespace(text=printed.append), False)
    assert printed == [str(stats)], "what a notebook shows"


class Ten(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "more"),
    [
        (Ten(), {"batch_size": 4}),
        (Ten(), {"batch_size": 4, "collate_fn": tuple}),
        (Ten(), {"batch_size": None}),
        (list(range(10)), {"batch_size": 4, "seeding": "worker"}),
        (list(range(10)), {"batch_size": 4}),
        (list(range(10)), {"batch_size": None, "seeding": "worker"}),
    ],
    ids=["stream", "stream, own collate", "stream, no batches", "torch's seeds", "list", "torch's seeds, no batches"],
)
def test_samples_are_counted_whatever_fetches_them(dataset: Any, more: dict[str, Any], workers: int) -> None:
    backend = "thread" if workers else None
    loader: penstock.DataLoader[Any] = penstock.DataLoader(dataset, num_workers=workers, backend=backend, **more)
    batches = list(loader)
    assert (loader.stats().batches, loader.stats().samples) == (len(batches), 10)


class Ticking:
    """Samples that take a second by the clock of their loader's counters."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        self.now_s += 1.0
        return index


@pytest.mark.parametrize("seeding", ["batch", "worker"])
def test_fetching_in_the_training_thread_is_waiting_for_data(seeding: str) -> None:
    dataset: Any = Ticking()
    loader: penstock.DataLoader[Any] = penstock.DataLoader(dataset, batch_size=2, seeding=seeding)
    loader._counters.clock = lambda: dataset.now_s
    for _ in loader:
        dataset.now_s += 6.0
    stats = loader.stats()
    assert (stats.wait_s, stats.stall_fraction) == (8.0, 0.25)
    assert waited_s(loader) == 8.0
    iterator = iter(loader)
    next(iterator)
    assert loader.stats().stall_fraction == 1.0


def test_without_workers_there_is_no_engine_no_thread_and_no_memory_until_workers_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[Any] = []
    build_engine = iterator_module.build_engine
    monkeypatch.setattr(iterator_module, "build_engine", lambda *a, **k: built.append(1) or build_engine(*a, **k))
    dataset: Any = list(range(20))
    loader: penstock.DataLoader[Any] = penstock.DataLoader(dataset)
    threads = threading.active_count()
    iterator = iter(loader)
    assert [int(next(iterator)) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert threading.active_count() == threads
    assert (built, loader.stats().in_flight_bytes, workers_now(loader)) == ([], 0, [])
    loader.resize(depth=3)
    loader.set_memory("64MB")
    assert int(next(iterator)) == 5 and built == []
    loader.resize(workers=1)
    assert [int(batch) for batch in iterator] == list(range(6, 20)) and built == [1]
    loader.close()
