"""Samples that take unevenly long: workers go on with later batches instead of waiting for a slow sample.

Nothing here depends on how fast the machine is: the slow sample is done when the samples that it must not hold up are.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import penstock
from support.faults.leaks import no_leaks  # noqa: F401  (a fixture for every test here)

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

BATCH, SLOW = 4, 16
"""The slow sample is the first one of the fifth batch: by then the loader knows what samples cost."""


class OneSlow(torch.utils.data.Dataset[Any]):
    """One sample takes until ``others`` later ones are done, and then stays for a moment."""

    def __init__(self, count: int, others: int, kib: int = 1) -> None:
        self.is_done = torch.zeros(count, dtype=torch.bool).share_memory_()
        self.others, self.kib = others, kib

    def __len__(self) -> int:
        return len(self.is_done)

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.025)
        if index == SLOW:
            wait_until_done(self.is_done[SLOW + 1 :], self.others)
        self.is_done[index] = True
        return torch.full((self.kib << 7,), index)


class OneSlowStream(torch.utils.data.IterableDataset[Any]):
    """The same for a stream whose first worker has the slow sample."""

    def __init__(self, count: int, others: int) -> None:
        self.samples = OneSlow(count, others)

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        for index in range(info.id, len(self.samples), info.num_workers):
            yield self.samples[index]


def wait_until_done(is_done: torch.Tensor, count: int) -> None:
    deadline_s = time.monotonic() + 90
    while int(is_done.sum()) < count:
        if time.monotonic() > deadline_s:
            raise AssertionError(f"only {int(is_done.sum())} of {count} samples were fetched beside the slow one")
        time.sleep(0.005)


def test_free_workers_fetch_many_batches_beyond_a_slow_sample_in_order() -> None:
    loader = penstock.DataLoader(OneSlow(160, others=80), batch_size=BATCH, num_workers=4, memory="200MB")
    assert [batch[:, 0].tolist() for batch in loader] == [list(range(at, at + BATCH)) for at in range(0, 160, BATCH)]
    assert loader.stats().depth > 10
    loader.close()


def test_prefetch_factor_is_used_up_where_it_helps_and_never_passed() -> None:
    dataset = OneSlow(160, others=2 * 4 * BATCH - BATCH)
    loader = penstock.DataLoader(dataset, batch_size=BATCH, num_workers=4, memory="200MB", prefetch_factor=2)
    depths = set()
    for _ in loader:
        depths.add(loader.stats().depth)
    assert max(depths) == 2 * 4
    loader.close()


def test_batches_that_are_dear_are_not_fetched_far_ahead() -> None:
    dataset = OneSlow(80, others=4, kib=256)
    loader = penstock.DataLoader(dataset, batch_size=BATCH, num_workers=4, memory="12MB", backend="thread")
    assert max(loader.stats().depth for _ in loader) <= 3
    loader.close()


def test_workers_of_a_stream_run_ahead_of_a_slow_one_as_far_as_torchs_do_and_further() -> None:
    loader = penstock.DataLoader(OneSlowStream(240, others=40), batch_size=BATCH, num_workers=4, memory="200MB")
    came = sorted(int(value) for batch in loader for value in batch[:, 0])
    assert came == list(range(240))
    assert loader.stats().depth > 2 * 4
    loader.close()
