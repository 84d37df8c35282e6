"""The model of torch's caching allocator: its rounding, splitting, joining, and what it gives back."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.gpu.allocator.alloc_conf import AllocatorSettings
from penstock.gpu.allocator.caching_allocator import CachingAllocator, DeviceFull
from penstock.units import GIB, KIB, MIB


@pytest.mark.parametrize(
    ("request_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (19 * MIB + 1, 20 * MIB, 20 * MIB),
        (100 * MIB - 600 * KIB, 100 * MIB, 100 * MIB),
    ],
)
def test_a_first_request_takes_what_torch_takes(request_bytes: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(request_bytes)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_a_request_below_ten_mebibytes_shares_a_segment_of_twenty() -> None:
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.allocate(5 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.allocate(2 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_what_is_left_of_a_large_block_is_split_off_only_above_one_mebibyte() -> None:
    for asked, allocated in [(18 * MIB, 18 * MIB), (19 * MIB - 512, 19 * MIB - 512), (19 * MIB, 20 * MIB)]:
        allocator = CachingAllocator()
        allocator.free(allocator.allocate(20 * MIB))
        allocator.allocate(asked)
        assert allocator.allocated_bytes == allocated
        assert allocator.reserved_bytes == 20 * MIB


def test_the_smallest_block_that_fits_is_used() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (64, 32, 48)]
    for block in blocks:
        allocator.free(block)
    again = allocator.allocate(30 * MIB)
    assert again.address == blocks[1].address
    assert allocator.reserved_bytes == 144 * MIB


def test_freed_neighbours_join_and_serve_a_larger_request() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(60 * MIB))
    parts = [allocator.allocate(20 * MIB) for _ in range(3)]
    for part in (parts[0], parts[2], parts[1]):
        allocator.free(part)
    allocator.allocate(60 * MIB)
    assert allocator.reserved_bytes == 60 * MIB


def test_small_and_large_requests_never_share_a_segment() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(64 * MIB))
    allocator.allocate(512)
    assert allocator.reserved_bytes == 66 * MIB


def test_at_the_limit_cached_segments_are_given_back_and_the_request_is_tried_again() -> None:
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    for block in [allocator.allocate(30 * MIB) for _ in range(3)]:
        allocator.free(block)
    allocator.allocate(80 * MIB)
    assert (allocator.reserved_bytes, allocator.retries) == (80 * MIB, 1)
    assert allocator.peak_reserved_bytes == 90 * MIB


def test_a_segment_in_use_is_not_given_back_and_the_device_is_out_of_memory() -> None:
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(20 * MIB)  # splits the one segment
    with pytest.raises(DeviceFull) as full:
        allocator.allocate(50 * MIB)
    assert (full.value.request_bytes, full.value.reserved_bytes) == (50 * MIB, 60 * MIB)
    assert (full.value.allocated_bytes, full.value.limit_bytes) == (20 * MIB, 100 * MIB)


def test_blocks_above_max_split_size_stay_whole() -> None:
    allocator = CachingAllocator(AllocatorSettings.parse("max_split_size_mb:32"))
    allocator.free(allocator.allocate(64 * MIB))
    allocator.allocate(20 * MIB)  # may not be cut from the large one
    assert allocator.reserved_bytes == 84 * MIB
    allocator.allocate(50 * MIB)  # may take it as it is: no more than 20 MiB too large
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (84 * MIB, 84 * MIB)


def test_rounding_to_divisions_of_a_power_of_two() -> None:
    allocator = CachingAllocator(AllocatorSettings.parse("roundup_power2_divisions:4"))
    assert allocator.allocate(1200 * KIB).size == 1280 * KIB
    assert allocator.allocate(64 * MIB + 1).size == 80 * MIB


def test_an_expandable_segment_grows_in_place_of_taking_another() -> None:
    usual, expandable = CachingAllocator(), CachingAllocator(AllocatorSettings.parse("expandable_segments:True"))
    for allocator in (usual, expandable):
        allocator.free(allocator.allocate(100 * MIB))
        allocator.allocate(120 * MIB)
    assert usual.reserved_bytes == 220 * MIB
    assert expandable.reserved_bytes == 120 * MIB


def test_unused_segments_are_collected_above_the_threshold() -> None:
    settings = AllocatorSettings.parse("garbage_collection_threshold:0.5")
    allocator = CachingAllocator(settings, limit_bytes=GIB)
    allocator.free(allocator.allocate(600 * MIB))
    for _ in range(3):
        allocator.allocate(200 * KIB)
    allocator.allocate(640 * MIB)
    assert allocator.reserved_bytes == 642 * MIB
    assert allocator.retries == 0


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:64", "roundup_power2_divisions:8"])
@pytest.mark.parametrize("limit", [None, GIB])
def test_allocated_and_freed_bytes_balance_for_any_requests(conf: str, limit: int | None) -> None:
    chance = random.Random(conf)
    allocator = CachingAllocator(AllocatorSettings.parse(conf), limit_bytes=limit)
    held = []
    for _ in range(4000):
        if held and chance.random() < 0.5:
            allocator.free(held.pop(chance.randrange(len(held))))
        else:
            try:
                held.append(allocator.allocate(int(2 ** chance.uniform(5, 26))))
            except DeviceFull:
                allocator.free(held.pop())
        assert allocator.allocated_bytes == sum(block.size for block in held)
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= (limit or allocator.reserved_bytes)
    spans = sorted((block.address, block.address + block.size) for block in held)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    for block in held:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


def test_settings_are_read_as_torch_reads_them() -> None:
    read = AllocatorSettings.parse(
        "backend:native, large_segment_size_mb:40,max_split_size_mb:128,garbage_collection_threshold:0.8,"
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],pinned_use_background_threads:True"
    )
    assert (read.large_segment_bytes, read.max_split_bytes) == (40 * MIB, 128 * MIB)
    assert read.max_non_split_rounding_bytes == 40 * MIB
    assert read.garbage_collection_threshold == 0.8
    sizes = [MIB, 256 * MIB, 512 * MIB, 1024 * MIB, 4096 * MIB]
    assert [read.divisions(size) for size in sizes] == [1, 1, 2, 4, 8]


def test_the_older_variable_is_asked_first() -> None:
    both = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    read = AllocatorSettings.from_environment(both)
    assert (read.max_split_bytes, read.expandable_segments) == (64 * MIB, False)
    assert AllocatorSettings.from_environment({}) == AllocatorSettings()


@pytest.mark.parametrize(
    ("conf", "named"),
    [
        ("max_split_size_mb:5", "max_split_size_mb:5"),
        ("max_split_size_mb:many", "max_split_size_mb:many"),
        ("garbage_collection_threshold:2", "garbage_collection_threshold:2"),
        ("roundup_power2_divisions:3", "3 is not a power of two"),
        ("expandable_segments", "expandable_segments has no value"),
    ],
)
def test_a_setting_that_cannot_be_read_is_named(conf: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        AllocatorSettings.parse(conf)


@pytest.mark.parametrize("name", ["lstm", "llama", "encoder"])
def test_recorded_trainings_reserve_what_they_reserved_on_the_gpu_at_every_request(name: str) -> None:
    """Recorded on an H200 with torch 2.11: n > 0 asks for n bytes, n < 0 frees event -1 - n, [n] is a new segment."""
    recorded = Path(__file__).parent / "recorded" / f"h200-{name}.json.gz"
    allocator, held, reserved_bytes = CachingAllocator(), {}, 0
    for at, event in enumerate(json.loads(gzip.decompress(recorded.read_bytes()))):
        if isinstance(event, list):
            reserved_bytes += event[0]
        elif event >= 0:
            held[at] = allocator.allocate(event)
            assert allocator.reserved_bytes == reserved_bytes, f"event {at}: {event} bytes"
        else:
            allocator.free(held.pop(-1 - event))
