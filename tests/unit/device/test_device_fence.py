"""What a device may still be reading is held back until the device is past it."""

from __future__ import annotations

import pytest

from penstock.device.fence import Fence


class PaperDevice:
    """A device that is past a mark when told so."""

    def __init__(self) -> None:
        self.made: list[PaperPoint] = []
        self.is_capturing = False

    def mark(self) -> PaperPoint | None:
        if self.is_capturing:
            return None
        self.made.append(PaperPoint())
        return self.made[-1]


class PaperPoint:
    def __init__(self) -> None:
        self.is_passed = False
        self.waited = 0

    def passed(self) -> bool:
        return self.is_passed

    def wait(self) -> None:
        self.waited += 1
        self.is_passed = True


@pytest.fixture
def device() -> PaperDevice:
    return PaperDevice()


def test_an_item_is_released_when_the_device_is_past_the_mark_made_after_it(device: PaperDevice) -> None:
    fence: Fence[str] = Fence(device.mark)
    fence.put("slot")
    assert fence.advance() == [] and len(device.made) == 1
    assert fence.advance() == []
    device.made[0].is_passed = True
    assert fence.advance() == ["slot"]
    assert len(fence) == 0


def test_items_added_together_share_a_mark_and_no_mark_is_made_without_new_items(device: PaperDevice) -> None:
    fence: Fence[str] = Fence(device.mark)
    for name in ("a", "b"):
        fence.put(name)
    fence.advance()
    fence.advance()
    assert len(device.made) == 1
    fence.put("c")
    fence.advance()
    assert len(device.made) == 2
    device.made[0].is_passed = True
    assert fence.advance() == ["a", "b"]
    assert len(fence) == 1


def test_a_later_mark_does_not_release_an_earlier_item(device: PaperDevice) -> None:
    fence: Fence[str] = Fence(device.mark)
    fence.put("first")
    fence.advance()
    fence.put("second")
    fence.advance()
    device.made[1].is_passed = True
    assert fence.advance() == []
    device.made[0].is_passed = True
    assert fence.advance() == ["first", "second"]


def test_nothing_is_marked_while_a_graph_is_being_captured(device: PaperDevice) -> None:
    fence: Fence[str] = Fence(device.mark)
    device.is_capturing = True
    fence.put("slot")
    assert fence.advance() == [] and not device.made
    device.is_capturing = False
    fence.advance()
    device.made[0].is_passed = True
    assert fence.advance() == ["slot"]


def test_draining_waits_for_everything_marked_or_not(device: PaperDevice) -> None:
    fence: Fence[str] = Fence(device.mark)
    fence.put("marked")
    fence.advance()
    fence.put("fresh")
    assert fence.drain() == ["marked", "fresh"]
    assert [mark.waited for mark in device.made] == [1, 1]
    assert fence.drain() == []
