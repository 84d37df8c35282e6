"""The arena's bookkeeping: what is admitted, reused, closed, lent and handed over."""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from penstock.arena import forks
from penstock.arena.arena import Arena
from penstock.arena.segment import HAS_MEMFD, Segment
from penstock.arena.segment_sizes import PAGE_BYTES, capacity_for

KIB, MIB = 1 << 10, 1 << 20

needs_memfd = pytest.mark.skipif(not HAS_MEMFD, reason="segments go by name here")


class World:
    """An arena and everything it told the outside."""

    def __init__(
        self, limit_bytes: int, *, headroom_bytes: int = 1 << 50, keep_free: int = 64, use_memfd: bool = HAS_MEMFD
    ) -> None:
        self.starter = object()
        self.headroom_bytes = headroom_bytes
        self.closed: list[int] = []
        self.woken = 0
        self.arena = Arena(
            limit_bytes=limit_bytes,
            headroom_bytes=lambda: self.headroom_bytes,
            closed=lambda segment: self.closed.append(segment.number),
            woken=self._wake,
            keep_free=keep_free,
            use_memfd=use_memfd,
            starter=self.starter,
        )

    def _wake(self) -> None:
        self.woken += 1

    def take(self, need_bytes: int) -> Segment:
        segment = self.arena.take(need_bytes)
        assert segment is not None
        return segment


def open_segments() -> int:
    """Memory files of ours that this process has open."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found += "penstock-" in str(entry.readlink())
        except OSError:
            continue
    return found


def test_fits_counts_whole_pages_and_promised_bytes() -> None:
    world = World(10 * PAGE_BYTES)
    assert world.arena.fits(10 * PAGE_BYTES)
    assert not world.arena.fits(10 * PAGE_BYTES + 1)
    world.take(1)
    assert world.arena.in_use_bytes == PAGE_BYTES
    assert world.arena.fits(9 * PAGE_BYTES)
    assert not world.arena.fits(9 * PAGE_BYTES, promised_bytes=1)
    world.arena.close()


def test_a_released_segment_is_reused_with_its_pages() -> None:
    world = World(10 * MIB)
    first = world.take(3 * MIB)
    world.arena.release(first)
    assert world.arena.in_use_bytes == 0
    assert world.arena.free_bytes == first.capacity_bytes
    again = world.take(3 * MIB - 100_000)
    assert again is first
    assert world.arena.free_bytes == 0
    assert world.arena.in_use_bytes == first.capacity_bytes
    assert world.closed == []
    world.arena.close()


def test_the_tightest_free_segment_is_reused() -> None:
    world = World(200 * MIB)
    sizes = [40 * MIB, 30 * MIB, 33 * MIB]
    segments = [world.take(size) for size in sizes]
    for segment in segments:
        world.arena.release(segment)
    assert world.take(30 * MIB) is segments[1]
    assert world.take(30 * MIB) is segments[2]
    world.arena.close()


def test_a_giant_segment_is_not_kept_for_small_batches() -> None:
    world = World(40 * MIB)
    giant = world.take(40 * MIB)
    world.arena.release(giant)
    small = world.take(2 * MIB)
    assert small is not giant
    assert small.capacity_bytes == capacity_for(2 * MIB)
    assert world.closed == [giant.number]
    assert world.arena.in_use_bytes + world.arena.free_bytes <= 40 * MIB
    world.arena.close()


def test_a_loose_fit_is_refused_where_it_would_push_the_budget_over() -> None:
    world = World(8 * MIB)
    loose, other = world.take(4 * MIB), world.take(4 * MIB)
    world.arena.release(loose)
    world.arena.release(other)
    world.take(4 * MIB)
    world.arena.limit_bytes = 6 * MIB
    assert world.arena.fits(2 * MIB)
    assert world.take(2 * MIB).capacity_bytes == 2 * MIB
    assert world.arena.in_use_bytes + world.arena.free_bytes <= 6 * MIB
    world.arena.close()


def test_free_segments_are_closed_as_soon_as_their_bytes_are_wanted() -> None:
    world = World(10 * MIB)
    first, second = world.take(4 * MIB), world.take(4 * MIB)
    world.arena.release(first)
    world.arena.release(second)
    assert world.arena.free_bytes == 8 * MIB
    world.take(9 * MIB)
    assert sorted(world.closed) == [first.number, second.number]
    assert world.arena.free_bytes == 0
    assert world.arena.peak_bytes <= 10 * MIB
    world.arena.close()


def test_the_bytes_in_use_and_free_never_pass_the_limit_while_every_need_fits() -> None:
    world = World(20 * MIB)
    held: list[Segment] = []
    need = 1
    for step in range(400):
        need = (need * 7919 + step) % (12 * MIB) + 1
        if world.arena.fits(need):
            held.append(world.take(need))
        elif held:
            world.arena.release(held.pop(step % len(held)))
        assert world.arena.in_use_bytes + world.arena.free_bytes <= 20 * MIB
    assert world.arena.peak_bytes <= 20 * MIB
    world.arena.close()


def test_a_lowered_limit_closes_free_segments_at_once() -> None:
    world = World(20 * MIB)
    first, second = world.take(8 * MIB), world.take(8 * MIB)
    world.arena.release(first)
    world.arena.set_limit(10 * MIB)
    assert world.closed == [first.number]
    assert world.arena.in_use_bytes + world.arena.free_bytes == 8 * MIB
    world.arena.set_limit(5 * MIB)
    world.arena.release(second)
    assert world.arena.in_use_bytes + world.arena.free_bytes <= 5 * MIB
    world.arena.close()


def test_only_so_many_segments_are_kept_free() -> None:
    world = World(100 * MIB, keep_free=2)
    segments = [world.take(size * MIB) for size in (1, 2, 3)]
    for segment in segments:
        world.arena.release(segment)
    assert world.closed == [segments[0].number]
    assert world.arena.free_bytes == 5 * MIB
    world.arena.close()


def test_nothing_is_created_where_the_machine_has_no_memory_left() -> None:
    world = World(100 * MIB, headroom_bytes=5 * MIB)
    before = open_segments()
    assert world.arena.take(6 * MIB) is None
    assert open_segments() == before
    assert world.arena.in_use_bytes == world.arena.free_bytes == world.arena.peak_bytes == 0
    world.arena.close()


def test_free_segments_are_closed_before_a_need_is_refused() -> None:
    world = World(100 * MIB, headroom_bytes=50 * MIB)
    free = world.take(20 * MIB)
    world.arena.release(free)
    world.headroom_bytes = 5 * MIB

    def closing_frees(segment: Segment) -> None:
        world.closed.append(segment.number)
        world.headroom_bytes += segment.capacity_bytes

    world.arena._closed = closing_frees
    assert world.take(22 * MIB).capacity_bytes == 22 * MIB
    assert world.closed == [free.number]
    world.arena.close()


def test_segments_taken_but_not_yet_touched_count_against_the_headroom() -> None:
    """A memory file takes pages as workers touch them: two looks in a row at the meter see the same headroom."""
    world = World(1000 * MIB, headroom_bytes=300 * MIB)
    assert world.arena.take(200 * MIB) is not None
    assert world.arena.take(200 * MIB) is None, "400 MiB set aside where 300 MiB are left: the kernel would kill us"
    world.arena.close()


def test_a_lease_ends_with_the_last_view_of_the_batch() -> None:
    world = World(10 * MIB)
    segment = world.take(MIB)
    token = world.arena.lend(segment, MIB)
    view = token[100:200]
    assert world.arena.lent_count == 1
    assert world.arena.lent_bytes == MIB
    del token
    gc.collect()
    assert not world.arena.has_returned
    assert world.woken == 0
    del view
    assert world.arena.has_returned
    assert world.woken == 1
    assert world.arena.collect_returned()
    assert world.arena.lent_count == 0
    assert world.arena.free_bytes == MIB
    assert not world.arena.collect_returned()
    world.arena.close()


def test_a_handed_over_batch_leaves_the_budget_and_stays_intact() -> None:
    world = World(10 * MIB)
    segment = world.take(8 * MIB)
    token = world.arena.lend(segment, 5 * MIB)
    token[: 5 * MIB] = 7
    assert world.arena.hand_over_oldest()
    assert world.closed == [segment.number]
    assert world.arena.in_use_bytes == 0
    assert world.arena.handed_over_bytes == 5 * MIB
    assert world.arena.lent_count == 0
    replacement = world.take(10 * MIB)
    replacement.array()[:] = 9
    assert (token[: 5 * MIB] == 7).all()
    del token
    assert not world.arena.collect_returned(), "its memory was never the arena's again"
    assert world.arena.in_use_bytes == 10 * MIB
    world.arena.close()


def test_the_longest_held_batch_is_handed_over_first() -> None:
    world = World(100 * MIB)
    segments = [world.take(MIB) for _ in range(3)]
    tokens = [world.arena.lend(segment, MIB) for segment in segments]
    world.arena.hand_over_oldest()
    world.arena.hand_over_oldest()
    assert world.closed == [segments[0].number, segments[1].number]
    assert world.arena.lent_count == 1
    assert len(tokens) == 3
    world.arena.close()


def test_a_batch_dropped_meanwhile_is_not_handed_over() -> None:
    world = World(10 * MIB)
    token = world.arena.lend(world.take(MIB), MIB)
    del token
    assert not world.arena.hand_over_oldest()
    assert world.arena.handed_over_bytes == 0
    assert world.arena.free_bytes == MIB
    world.arena.close()


def test_nothing_lent_means_nothing_to_hand_over() -> None:
    world = World(10 * MIB)
    world.take(MIB)
    assert not world.arena.hand_over_oldest()
    world.arena.close()


@needs_memfd
def test_handing_over_releases_the_pages_that_the_batch_does_not_use() -> None:
    world = World(100 * MIB)
    segment = world.take(64 * MIB)
    array = segment.array()
    array[:] = 1
    token = world.arena.lend(segment, 10 * MIB + 5)
    del array
    size_before = os.fstat(segment.fd or -1).st_blocks * 512
    kept = os.dup(segment.fd or -1)
    world.arena.hand_over_oldest()
    assert size_before >= 64 * MIB
    assert os.fstat(kept).st_size == 10 * MIB + PAGE_BYTES
    assert int(token[: 10 * MIB + 5].sum()) == 10 * MIB + 5
    os.close(kept)
    del token
    world.arena.close()


def test_the_peak_is_the_most_that_was_held_at_once() -> None:
    world = World(100 * MIB)
    first = world.take(30 * MIB)
    world.take(20 * MIB)
    world.arena.release(first)
    world.arena.close_free()
    world.take(10 * MIB)
    assert world.arena.peak_bytes == 50 * MIB
    world.arena.close()


@pytest.mark.parametrize("use_memfd", [pytest.param(True, marks=needs_memfd), False])
def test_closing_releases_everything_but_the_batches_the_user_holds(use_memfd: bool) -> None:
    gc.collect()
    before = open_segments()
    world = World(100 * MIB, use_memfd=use_memfd)
    free, filling, lent = world.take(MIB), world.take(2 * MIB), world.take(3 * MIB)
    names = [free.name, filling.name, lent.name]
    world.arena.release(free)
    token = world.arena.lend(lent, 3 * MIB)
    token[:] = 5
    world.arena.close()
    world.arena.close()
    assert sorted(world.closed) == sorted([free.number, filling.number, lent.number])
    assert world.arena.in_use_bytes == world.arena.free_bytes == 0
    assert not any(Path("/dev/shm", name).exists() for name in names if name)
    assert (token == 5).all()
    del token, free, filling, lent
    assert open_segments() == before
    assert not world.arena.collect_returned()


def test_a_forked_child_dropping_its_copy_ends_no_lease() -> None:
    world = World(10 * MIB)
    token = world.arena.lend(world.take(MIB), MIB)
    lease = next(iter(world.arena._leases.values()))
    lease.pid = os.getpid() + 1
    del token
    assert not world.arena.has_returned
    assert world.woken == 0
    lease.segment.close()
    lease.segment.unlink()


def test_free_segments_are_kept_up_to_the_most_bytes_that_were_in_use_at_once() -> None:
    world = World(limit_bytes=1 << 40)
    for number in range(100):
        for segment in [world.take((size + number) << 20) for size in (1, 2)]:
            world.arena.release(segment)
        assert world.arena.in_use_bytes + world.arena.free_bytes <= (2 * number + 3) << 20
    world.arena.close()


def test_small_free_segments_are_closed_before_large_ones() -> None:
    world = World(limit_bytes=64 * MIB)
    large, *small = (world.take(size * MIB) for size in (32, 4, 4))
    for segment in (large, *small):
        world.arena.release(segment)
    world.take(5 * MIB)
    assert sorted(world.closed) == [segment.number for segment in small]
    assert world.take(30 * MIB) is large
    world.arena.close()


def test_a_segment_too_large_for_recent_needs_goes_before_small_ones() -> None:
    world = World(limit_bytes=100 * MIB)
    giant, other = world.take(60 * MIB), world.take(20 * MIB)
    world.arena.release(other)
    world.arena.release(giant)
    small = []
    for _ in range(100):
        small = [world.take(4 * MIB) for _ in range(2)]
        for segment in small:
            world.arena.release(segment)
    assert giant.number not in world.closed
    world.take(16 * MIB)
    assert giant.number in world.closed
    assert {world.take(4 * MIB).number for _ in small} == {segment.number for segment in small}
    world.arena.close()


@needs_memfd
@pytest.mark.parametrize("child", ["worker of another loader", "any other"])
def test_a_segment_that_was_lent_during_a_fork_is_neither_reused_nor_kept(child: str) -> None:
    world = World(10 * MIB)
    lent = world.take(2 * MIB)
    token = world.arena.lend(lent, 2 * MIB)
    with forks.forking_worker(world.starter):
        reap(os.fork())
    del token
    world.arena.collect_returned()
    assert world.take(2 * MIB) is lent, "its own workers use no batch of the trainer's"
    token = world.arena.lend(lent, 2 * MIB)
    with forks.forking_worker(object()) if child == "worker of another loader" else nullcontext():
        reap(os.fork())
    del token
    world.arena.collect_returned()
    assert (world.arena.in_use_bytes, world.arena.free_bytes, open_segments()) == (0, 0, 0)
    assert world.closed == [lent.number]
    assert world.take(2 * MIB) is not lent
    world.arena.close()


def reap(pid: int) -> None:
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
