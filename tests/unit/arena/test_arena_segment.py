"""One shared piece of memory, as a memory file and by name."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.arena.segment import HAS_MEMFD, attach_segment, create_segment
from penstock.arena.segment_sizes import PAGE_BYTES, capacity_for

KIB, MIB = 1 << 10, 1 << 20

either_kind = pytest.mark.parametrize(
    "use_memfd",
    [
        pytest.param(True, marks=pytest.mark.skipif(not HAS_MEMFD, reason="no memory files here"), id="memfd"),
        pytest.param(False, id="named"),
    ],
)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def is_there(name: str | None) -> bool:
    """Whether a named block still lies in /dev/shm; other processes' blocks are none of our business."""
    return name is not None and Path("/dev/shm", name).exists()


@pytest.mark.parametrize(
    ("need", "capacity"),
    [
        (0, PAGE_BYTES),
        (1, PAGE_BYTES),
        (PAGE_BYTES, PAGE_BYTES),
        (PAGE_BYTES + 1, 2 * PAGE_BYTES),
        (MIB - 1, MIB),
        (MIB, MIB),
        (MIB + 1, MIB + 64 * KIB),
        (200 * MIB + 1, 200 * MIB + 64 * KIB),
    ],
)
def test_segments_are_whole_pages_and_coarser_once_large(need: int, capacity: int) -> None:
    assert capacity_for(need) == capacity


@either_kind
def test_both_sides_see_the_same_bytes(use_memfd: bool) -> None:
    ours = create_segment(3, MIB, use_memfd=use_memfd)
    theirs = attach_segment(3, MIB, fd=None if ours.fd is None else os.dup(ours.fd), name=ours.name)
    theirs.populate(0, theirs.capacity_bytes)
    theirs.array()[:] = np.arange(MIB, dtype=np.uint8)
    assert np.array_equal(ours.array(), np.arange(MIB, dtype=np.uint8))
    assert ours.array().size == theirs.array().size == MIB
    assert ours.array().flags.writeable
    theirs.close()
    ours.array()[0] = 9
    assert ours.array()[0] == 9
    ours.unlink()
    ours.close()


@either_kind
def test_nothing_is_left_after_unlink_and_close(use_memfd: bool) -> None:
    gc.collect()
    fds, names = descriptors(), []
    for number in range(5):
        segment = create_segment(number, 128 * KIB, use_memfd=use_memfd)
        names.append(segment.name)
        segment.array()[:] = 1
        segment.unlink()
        segment.close()
        segment.close()
        del segment
    gc.collect()
    # The resource tracker of named blocks is one process and one pipe, started once.
    assert descriptors() <= fds + (0 if use_memfd else 1)
    assert not any(is_there(name) for name in names)


@either_kind
def test_views_outlive_the_segment_they_were_taken_from(use_memfd: bool) -> None:
    segment = create_segment(0, 128 * KIB, use_memfd=use_memfd)
    name = segment.name
    assert is_there(name) != use_memfd
    array = segment.array()
    view = array[10:20]
    view[:] = 3
    del array
    segment.unlink()
    segment.close()
    gc.collect()
    assert (view == 3).all()
    assert not is_there(name)


@either_kind
def test_the_descriptor_or_the_name_is_what_travels(use_memfd: bool) -> None:
    segment = create_segment(0, PAGE_BYTES, use_memfd=use_memfd)
    assert (segment.fd is not None) == use_memfd
    assert (segment.name is None) == use_memfd
    segment.unlink()
    segment.close()
    assert segment.fd is None


def test_attaching_takes_over_the_descriptor() -> None:
    if not HAS_MEMFD:
        pytest.skip("no memory files here")
    ours = create_segment(0, PAGE_BYTES)
    assert ours.fd is not None
    gc.collect()
    before = descriptors()
    theirs = attach_segment(0, PAGE_BYTES, fd=os.dup(ours.fd), name=None)
    assert theirs.fd is None
    # mmap keeps a descriptor of its own until the mapping goes.
    theirs.close()
    gc.collect()
    assert descriptors() == before
    ours.close()


def test_a_descriptor_that_cannot_be_mapped_is_closed_all_the_same(tmp_path: Path) -> None:
    gc.collect()
    before = descriptors()
    fd = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises((OSError, ValueError)):
        attach_segment(0, PAGE_BYTES, fd=fd, name=None)
    assert descriptors() == before


def test_populating_maps_every_page_at_once() -> None:
    if not HAS_MEMFD:
        pytest.skip("no memory files here")
    segment = create_segment(0, 4 * MIB)
    assert segment.fd is not None
    segment.populate(0, segment.capacity_bytes)
    if os.fstat(segment.fd).st_blocks == 0:
        pytest.skip("this kernel does not know MADV_POPULATE_WRITE")
    assert os.fstat(segment.fd).st_blocks * 512 == 4 * MIB
    segment.close()


@either_kind
def test_trimming_keeps_the_bytes_in_front(use_memfd: bool) -> None:
    segment = create_segment(0, MIB, use_memfd=use_memfd)
    array = segment.array()
    array[:] = 4
    segment.trim(300 * KIB + 1)
    assert (array[: 300 * KIB + 1] == 4).all()
    if use_memfd:
        assert segment.capacity_bytes == 304 * KIB
    segment.trim(2 * MIB)
    assert segment.capacity_bytes <= MIB
    segment.unlink()
    segment.close()


def test_segments_can_be_imported_where_mmap_has_no_unix_flags() -> None:
    code = (
        "import mmap, os, sys, torch, multiprocessing.shared_memory\n"
        "del os.memfd_create\n"
        "for name in [n for n in vars(mmap) if n.startswith(('PROT_', 'MAP_', 'MADV_'))]: delattr(mmap, name)\n"
        "import penstock.arena.segment\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
