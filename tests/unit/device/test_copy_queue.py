"""Copies of batches to a device: few at a time; a slot is free as soon as its copy is done, and never sooner."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from penstock.device.copy_queue import CopyQueue


class PaperMark:
    def __init__(self, log: list[str], name: str) -> None:
        self.is_passed = False
        self.log, self.name = log, name

    def passed(self) -> bool:
        return self.is_passed

    def wait(self) -> None:
        self.log.append(f"waited for {self.name}")
        self.is_passed = True


class PaperCopyStream:
    """A device whose copies and steps end when the test says so."""

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
def copy_stream() -> PaperCopyStream:
    return PaperCopyStream()


def test_a_slot_is_kept_until_its_copy_is_done_and_not_until_the_batch_is_used(copy_stream: PaperCopyStream) -> None:
    copy_queue = CopyQueue(copy_stream)
    host = Host(0)
    slot = weakref.ref(host)
    copy_queue.send(host, nothing)
    del host
    gc.collect()
    assert copy_queue.release_copied() and slot() is not None
    copy_stream.copies[0].is_passed = True
    assert not copy_queue.release_copied() and slot() is None


def test_the_sender_is_notified_after_the_slot_is_released(copy_stream: PaperCopyStream) -> None:
    copy_queue = CopyQueue(copy_stream)
    host = Host(0)
    slot = weakref.ref(host)
    heard: list[bool] = []
    copy_queue.send(host, lambda: heard.append(slot() is None))
    del host
    copy_queue.release_copied()
    assert heard == []
    copy_stream.copies[0].is_passed = True
    copy_queue.release_copied()
    assert heard == [True]


def test_a_slot_is_kept_until_its_copy_is_done_even_if_the_batch_was_handed_out(copy_stream: PaperCopyStream) -> None:
    copy_queue = CopyQueue(copy_stream)
    host = Host(0)
    slot = weakref.ref(host)
    data, copied = copy_queue.hand_out(copy_queue.send(host, nothing))
    assert data == "device 0" and copied is copy_stream.copies[0]
    del host
    gc.collect()
    assert slot() is not None


def test_a_later_copy_that_is_done_does_not_free_an_earlier_slot(copy_stream: PaperCopyStream) -> None:
    copy_queue = CopyQueue(copy_stream)
    copies = [copy_queue.send(Host(number), nothing) for number in range(2)]
    copy_stream.copies[1].is_passed = True
    assert copy_queue.release_copied() == copies and copies[1].host is not None


def test_copies_queue_up_to_a_few_and_then_the_oldest_is_waited_for(copy_stream: PaperCopyStream) -> None:
    copy_queue = CopyQueue(copy_stream)
    for number in range(3):
        copy_queue.send(Host(number), nothing)
    assert copy_stream.log == []
    copy_queue.send(Host(3), nothing)
    assert copy_stream.log == ["waited for copy 0"]


def test_a_loop_that_never_waits_for_the_device_is_held_a_few_batches_ahead(copy_stream: PaperCopyStream) -> None:
    copy_queue = CopyQueue(copy_stream)
    for number in range(4):
        copy_queue.hand_out(copy_queue.send(Host(number), nothing))
        copy_stream.copies[number].is_passed = True
    assert copy_stream.log == []
    copy_queue.hand_out(copy_queue.send(Host(4), nothing))
    assert copy_stream.log == ["waited for step 0"]


def test_close_releases_every_slot_after_its_copy(copy_stream: PaperCopyStream) -> None:
    copy_queue = CopyQueue(copy_stream)
    copies = [copy_queue.send(Host(number), nothing) for number in range(3)]
    copy_queue.close()
    copy_queue.close()
    assert all(copy.host is None for copy in copies)
