"""Batches on a device that copies late: every byte right, no slot lost, nothing left, whatever the loop does."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import penstock
from penstock.loader.gauges import workers_now
from support.faults.leaks import no_leaks  # noqa: F401  (a fixture for every test here)
from support.faults.simulated_device import PaperDevice

KIB, MIB = 1 << 10, 1 << 20
BATCH = 4
ROW_VALUES = 16 << 10
"""128 KiB a row, half a MiB a batch."""

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="segments without a name"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:a batch needs:RuntimeWarning"),
]


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, count: int, *, varies: bool = False, sample_s: float = 0.0, bad: int = -1) -> None:
        self.count, self.varies, self.sample_s, self.bad = count, varies, sample_s, bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sample_s)
        if index == self.bad:
            raise KeyError(index)
        values = ROW_VALUES if not self.varies else ROW_VALUES // (1 + index // BATCH % 5)
        return torch.full((values,), index)


@pytest.fixture
def device() -> Iterator[PaperDevice]:
    paper = PaperDevice()
    with contextlib.ExitStack() as patched:
        for patch in paper.patches():
            patched.enter_context(patch)
        yield paper
    gc.collect()
    paper.close()
    assert not paper.locked, "memory is still page-locked"


def make(dataset: Any, **more: Any) -> penstock.DataLoader[Any]:
    return penstock.DataLoader(dataset, **{"batch_size": BATCH, "num_workers": 2, "device": "cuda", **more})


def numbers(device: PaperDevice, loader: Any) -> list[int]:
    """First index of every batch, each of which is checked to the last byte."""
    found = []
    for batch in loader:
        device.settle()
        first = int(batch[0, 0])
        assert (batch == torch.arange(first, first + len(batch))[:, None]).all()
        found.append(first)
        del batch
    return found


def every(count: int) -> list[int]:
    return list(range(0, count, BATCH))


@pytest.mark.parametrize("memory", ["600KiB", "1500KiB", "4MiB", "auto"])
@pytest.mark.parametrize("varies", [False, True], ids=["", "varying sizes"])
def test_every_batch_is_right_at_any_budget(device: PaperDevice, memory: str, varies: bool) -> None:
    with make(Rows(120, varies=varies), memory=memory) as loader:
        assert numbers(device, loader) == every(120)
        assert loader.stats().copied_bytes == 0


def test_the_rest_of_an_epoch_left_early_does_not_appear_in_the_next(device: PaperDevice) -> None:
    with make(Rows(64), persistent_workers=True) as loader:
        for _ in range(2):
            iterator = iter(loader)
            assert numbers(device, itertools.islice(iterator, 3)) == [0, 4, 8]
            time.sleep(0.05)
        assert numbers(device, loader) == every(64)
        assert loader.state_dict() is not None


class Named(dict):  # type: ignore[type-arg]
    """A dictionary that can hold more than its items."""


def named(samples: list[torch.Tensor]) -> Named:
    batch = Named(x=torch.stack(samples))
    batch.whole = torch.stack(samples)  # type: ignore[attr-defined]
    return batch


def wanting_gradients(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples).float().requires_grad_()


@pytest.mark.parametrize("memory", ["2MiB", "60MiB"])
@pytest.mark.parametrize("collate", [named, wanting_gradients], ids=lambda function: function.__name__)
def test_batches_the_user_keeps_do_not_block_later_ones(device: PaperDevice, collate: Any, memory: str) -> None:
    with make(Rows(160), collate_fn=collate, memory=memory) as loader:
        kept = list(loader)
    assert len(kept) == 40
    for number, batch in enumerate(kept):
        whole = batch.whole if collate is named else batch
        assert whole[:, 5].tolist() == list(range(4 * number, 4 * number + 4))


@pytest.mark.parametrize("memory", ["1MiB", "6MiB", "auto"])
def test_a_copy_that_fails_ahead_is_tried_again_in_its_turn(device: PaperDevice, memory: str) -> None:
    device.fails_at = {3, 9}
    with make(Rows(80), memory=memory) as loader:
        assert numbers(device, loader) == every(80)


@pytest.mark.parametrize("memory", ["1MiB", "6MiB", "auto"])
def test_a_copy_that_fails_twice_raises_and_iteration_continues(device: PaperDevice, memory: str) -> None:
    device.fails_at = {4, 5, 6, 7}
    came, failed = [], 0
    with make(Rows(80), memory=memory) as loader:
        iterator = iter(loader)
        while True:
            try:
                batch = next(iterator)
                device.settle()
                came.append(int(batch[0, 7]))
            except torch.cuda.OutOfMemoryError:
                failed += 1
            except StopIteration:
                break
    assert 1 <= failed <= 3 and len(came) == 20 - failed


def test_an_error_is_raised_in_its_turn_and_iteration_continues(device: PaperDevice) -> None:
    came: list[Any] = []
    with make(Rows(40, bad=17), memory="2MiB") as loader:
        iterator = iter(loader)
        while True:
            try:
                batch = next(iterator)
                device.settle()
                came.append(int(batch[0, 0]))
            except KeyError:
                came.append("bad")
            except StopIteration:
                break
    assert came == [0, 4, 8, 12, "bad", 20, 24, 28, 32, 36]


def test_workers_continue_while_the_user_computes_although_slots_are_few(device: PaperDevice) -> None:
    """A slot is free as soon as it was copied, and not only when the user comes back."""
    waits = []
    # The budget is for two or three batches besides what workers take.
    sample_s = 0.05
    with make(Rows(60, sample_s=sample_s), memory="26MiB") as loader:
        iterator = iter(loader)
        for number in range(11):
            began_s = time.monotonic()
            next(iterator)
            if number > 3:
                waits.append(time.monotonic() - began_s)
            time.sleep(6 * sample_s)
    # A batch that is not loaded ahead takes its two workers two samples each.
    assert sorted(waits)[len(waits) // 2] < sample_s, waits


def test_workers_added_between_two_epochs_work_in_the_next(device: PaperDevice) -> None:
    with make(Rows(40), num_workers=1, persistent_workers=True) as loader:
        assert numbers(device, loader) == every(40)
        loader.resize(workers=3)
        assert numbers(device, loader) == every(40)
        assert len(workers_now(loader)) == 3


def test_a_dropped_iterator_leaves_no_device_bytes_in_the_stats(device: PaperDevice) -> None:
    loader = make(Rows(80))
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    del iterator
    gc.collect()
    assert loader.stats().device_ahead_bytes == 0


@pytest.mark.parametrize("seed", range(6))
def test_random_use_delivers_every_batch_intact(device: PaperDevice, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(3):
        device.copy_s, device.step_s = chance.choice([0.0, 0.002, 0.01]), chance.choice([0.0, 0.0, 0.01])
        persistent = chance.random() < 0.5
        count = chance.choice([40, 78, 161])
        loader = make(
            Rows(count, varies=chance.random() < 0.5, bad=chance.choice([-1, 18])),
            num_workers=chance.choice([1, 2, 3]),
            memory=chance.choice(["600KiB", "1500KiB", "3MiB", "auto"]),
            persistent_workers=persistent,
            backend=chance.choice([None, None, "thread"]),
        )
        held: list[Any] = []
        with loader:
            for _ in range(2):
                place, stops_at = 0, chance.choice([None, None, 3])
                iterator = iter(loader)
                while place != stops_at:
                    try:
                        batch = next(iterator)
                    except KeyError:
                        place += 1
                        continue
                    except StopIteration:
                        assert place == -(-count // BATCH)
                        break
                    held = [*held, (place, batch)][-chance.choice([1, 3]) :]
                    place += 1
                    if chance.random() < 0.15:
                        loader.resize(workers=chance.choice([1, 2, 3]))
                    if chance.random() < 0.15:
                        loader.set_memory(chance.choice(["600KiB", "3MiB", "8MiB"]))
                    if chance.random() < 0.1:
                        time.sleep(0.005)
                device.settle()
                for number, batch in held:
                    first = number * BATCH
                    assert (batch == torch.arange(first, first + len(batch))[:, None]).all()
                held.clear()
                del iterator
        assert loader.stats().in_flight_bytes == 0
