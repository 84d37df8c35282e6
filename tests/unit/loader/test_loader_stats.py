"""What ``stats()`` says while several iterations of one loader run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

import penstock
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
    ids=str,
)
def test_samples_are_counted_whatever_fetches_them(dataset: Any, more: dict[str, Any], workers: int) -> None:
    backend = "thread" if workers else None
    loader: penstock.DataLoader[Any] = penstock.DataLoader(dataset, num_workers=workers, backend=backend, **more)
    batches = list(loader)
    assert (loader.stats().batches, loader.stats().samples) == (len(batches), 10)
