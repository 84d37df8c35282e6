"""Page-locked segments in the arena: locked once, never refilled or unmapped too early."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.arena.arena import Arena, _handed_over_locked
from penstock.arena.segment import Segment
from penstock.arena.segment_sizes import PAGE_BYTES
from penstock.device.fence import Fence
from penstock.device.page_locks import PageLocks

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="segments without a name")

SIZE = 64 * PAGE_BYTES


class PaperPoint:
    def __init__(self, world: World) -> None:
        self._world = world

    def passed(self) -> bool:
        return self._world.device_is_done

    def wait(self) -> None:
        self._world.waited += 1


class World:
    """An arena whose slots a paper device reads."""

    def __init__(self, limit_bytes: int = 100 * SIZE, problem: str | None = None) -> None:
        self.device_is_done = False
        self.waited = 0
        self.ranges: dict[int, int] = {}
        self.problem = problem
        self.locks = PageLocks(lock=self._lock, unlock=self._unlock)
        self.arena = Arena(
            limit_bytes=limit_bytes,
            headroom_bytes=lambda: 1 << 50,
            closed=lambda segment: None,
            woken=lambda: None,
            keep_free=8,
            locks=self.locks,
            fence=Fence(lambda: PaperPoint(self)),
        )
        _worlds.append(self)

    def _lock(self, address: int, size_bytes: int) -> str | None:
        if self.problem is None:
            assert address not in self.ranges, "locked twice"
            self.ranges[address] = size_bytes
        return self.problem

    def _unlock(self, address: int) -> None:
        del self.ranges[address]

    def lend(self) -> tuple[Segment, np.ndarray]:
        segment = self.arena.take(SIZE)
        assert segment is not None
        self.locks.lock(segment)
        token = self.arena.lend(segment, SIZE)
        self.arena.fence(segment)
        return segment, token

    def look(self) -> None:
        """What the training thread does when it asks for a batch."""
        self.arena.collect_returned()
        self.arena.pass_fence()


_worlds: list[World] = []


@pytest.fixture(autouse=True)
def arenas_are_closed() -> Iterator[None]:
    yield
    while _worlds:
        _worlds.pop().arena.close()


def test_a_dropped_slot_is_not_free_before_the_device_is_past_it() -> None:
    world = World()
    _, token = world.lend()
    del token
    world.look()
    world.look()
    assert world.arena.free_bytes == 0 and world.arena.is_returning
    assert world.arena.in_use_bytes == SIZE and world.arena.lent_count == 0
    world.device_is_done = True
    world.look()
    assert world.arena.free_bytes == SIZE and not world.arena.is_returning
    world.arena.close()


def test_a_slot_is_locked_once_however_often_it_is_used_and_unlocked_before_it_goes() -> None:
    world = World()
    world.device_is_done = True
    addresses = set()
    for _ in range(5):
        segment, token = world.lend()
        addresses.add(segment.address)
        del token
        world.look()
        world.look()
    assert set(world.ranges) == addresses and len(addresses) == 1 and world.locks.locked_bytes == SIZE
    world.arena.close_free()
    assert not world.ranges and world.locks.locked_bytes == 0
    world.arena.close()


def test_a_batch_that_became_the_users_own_stays_locked_until_it_was_dropped_and_passed() -> None:
    world = World()
    segment, token = world.lend()
    assert world.arena.hand_over_oldest()
    assert world.arena.in_use_bytes == 0
    token[:] = 7
    gc.collect()
    assert segment.address in world.ranges
    del token
    world.look()
    world.look()
    assert world.ranges, "the device may still be reading"
    world.device_is_done = True
    world.look()
    assert not world.ranges and not _handed_over_locked


def test_a_batch_that_outlives_its_arena_is_unlocked_when_it_goes() -> None:
    world = World()
    ranges = world.ranges
    segment, token = world.lend()
    world.arena.close()
    del world, segment
    gc.collect()
    assert ranges and int(token[-1]) == 0
    del token
    assert not ranges and not _handed_over_locked


def test_closing_waits_for_what_the_device_reads() -> None:
    world = World()
    _, token = world.lend()
    del token
    world.look()
    world.arena.close()
    assert world.waited == 1 and not world.ranges


def test_a_refused_lock_gives_one_warning_with_a_remedy_and_is_not_tried_again() -> None:
    world = World(problem="out of memory")
    with pytest.warns(RuntimeWarning, match=r"out of memory.*ulimit -l") as told:
        world.lend()
        world.lend()
    assert len(told) == 1 and world.locks.refused
    world.arena.close()


def test_a_slot_on_its_way_to_a_device_is_waited_for_and_not_handed_over() -> None:
    world = World()
    segment = world.arena.take(SIZE)
    assert segment is not None
    token = world.arena.lend(segment, SIZE)
    world.arena.pass_through(segment)
    assert world.arena.lent_count == 0 and world.arena.is_returning
    assert not world.arena.hand_over_oldest()
    del token
    world.arena.collect_returned()
    assert not world.arena.is_returning and world.arena.in_use_bytes == 0


def test_a_slot_the_user_holds_although_the_device_has_its_copy_is_the_users_and_comes_back_fenced() -> None:
    world = World()
    segment = world.arena.take(SIZE)
    assert segment is not None
    token = world.arena.lend(segment, SIZE)
    lease = world.arena.pass_through(segment)
    assert lease is not None
    lease.stop_passing()
    assert world.arena.lent_count == 1 and not world.arena.is_returning
    del token
    world.arena.collect_returned()
    assert world.arena.is_returning and world.arena.in_use_bytes == SIZE
    world.device_is_done = True
    world.arena.pass_fence()
    world.arena.pass_fence()
    assert world.arena.in_use_bytes == 0


def test_a_slot_that_is_dropped_before_its_copy_is_done_needs_no_fence() -> None:
    world = World()
    segment = world.arena.take(SIZE)
    assert segment is not None
    token = world.arena.lend(segment, SIZE)
    lease = world.arena.pass_through(segment)
    assert lease is not None
    del token
    lease.stop_passing()
    world.arena.collect_returned()
    assert world.arena.in_use_bytes == 0 and not world.arena.is_returning
