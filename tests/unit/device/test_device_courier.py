"""Batches under way to a device: few at a time, their slots free as soon as they are copied, and never sooner."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from penstock.device.copy_queue import Courier


class PaperMark:
    def __init__(self, log: list[str], name: str) -> None:
        self.is_passed = False
        self.log, self.name = log, name

    def passed(self) -> bool:
        return self.is_passed

    def wait(self) -> None:
        self.log.append(f"waited for {self.name}")
        self.is_passed = True


class PaperLane:
    """A device that has copied, and computed, when told so."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.copies: list[PaperMark] = []
        self.steps: list[PaperMark] = []

    def copy(self, host: Any) -> tuple[Any, PaperMark]:
        self.copies.append(PaperMark(self.log, f"copy {len(self.copies)}"))
        return f"device {host.number}", self.copies[-1]

    def user_mark(self) -> PaperMark:
        self.steps.append(PaperMark(self.log, f"step {len(self.steps)}"))
        return self.steps[-1]

    def hand_over(self, data: Any, copied: PaperMark) -> Any:
        return data, copied

    def wait(self) -> None:
        for copy in self.copies:
            copy.is_passed = True


def nothing() -> None:
    pass


class Host:
    def __init__(self, number: int) -> None:
        self.number = number


@pytest.fixture
def lane() -> PaperLane:
    return PaperLane()


def test_a_slot_is_kept_until_its_copy_is_done_and_not_until_the_batch_is_used(lane: PaperLane) -> None:
    courier = Courier(lane)
    host = Host(0)
    slot = weakref.ref(host)
    courier.send(host, nothing)
    del host
    gc.collect()
    assert courier.let_go() and slot() is not None
    lane.copies[0].is_passed = True
    assert not courier.let_go() and slot() is None


def test_who_sent_a_batch_hears_of_its_arrival_after_its_slot_was_let_go(lane: PaperLane) -> None:
    courier = Courier(lane)
    host = Host(0)
    slot = weakref.ref(host)
    heard: list[bool] = []
    courier.send(host, lambda: heard.append(slot() is None))
    del host
    courier.let_go()
    assert heard == []
    lane.copies[0].is_passed = True
    courier.let_go()
    assert heard == [True]


def test_a_slot_handed_out_before_it_is_copied_is_kept_all_the_same(lane: PaperLane) -> None:
    courier = Courier(lane)
    host = Host(0)
    slot = weakref.ref(host)
    data, copied = courier.hand_out(courier.send(host, nothing))
    assert data == "device 0" and copied is lane.copies[0]
    del host
    gc.collect()
    assert slot() is not None


def test_a_later_copy_that_is_done_does_not_free_an_earlier_slot(lane: PaperLane) -> None:
    courier = Courier(lane)
    parcels = [courier.send(Host(number), nothing) for number in range(2)]
    lane.copies[1].is_passed = True
    assert courier.let_go() == parcels and parcels[1].host is not None


def test_copies_queue_up_to_a_few_and_then_the_oldest_is_waited_for(lane: PaperLane) -> None:
    courier = Courier(lane)
    for number in range(3):
        courier.send(Host(number), nothing)
    assert lane.log == []
    courier.send(Host(3), nothing)
    assert lane.log == ["waited for copy 0"]


def test_a_loop_that_never_waits_for_the_device_is_held_back_a_few_batches_ahead_of_it(lane: PaperLane) -> None:
    courier = Courier(lane)
    for number in range(4):
        courier.hand_out(courier.send(Host(number), nothing))
        lane.copies[number].is_passed = True
    assert lane.log == []
    courier.hand_out(courier.send(Host(4), nothing))
    assert lane.log == ["waited for step 0"]


def test_close_lets_go_of_every_slot_after_its_copy(lane: PaperLane) -> None:
    courier = Courier(lane)
    parcels = [courier.send(Host(number), nothing) for number in range(3)]
    courier.close()
    courier.close()
    assert all(parcel.host is None for parcel in parcels)
