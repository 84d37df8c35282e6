"""A segment: one piece of shared memory, created and owned by the trainer, mapped by the workers that write into it.

In:  a size in bytes (trainer), or the descriptor or name of the trainer's segment (worker).
Out: a buffer that both sides see.
Runs in: trainer and worker.

On Linux a segment is a memfd: it has no name that could be left behind, is not limited by the size of /dev/shm, and
disappears with its last descriptor and mapping. On other systems it is a named shared-memory block that its creator
unlinks.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from multiprocessing import resource_tracker, shared_memory
from typing import Any

import numpy as np

from penstock.arena import mapping
from penstock.arena.segment_sizes import PAGE_BYTES, round_up

HAS_MEMFD = hasattr(os, "memfd_create")


_mapped: weakref.WeakSet[Segment] = weakref.WeakSet()


class Segment:
    """A mapped shared buffer. Use ``create_segment`` or ``attach_segment``."""

    def __init__(self, number: int, capacity_bytes: int, buffer: Any, fd: int | None, block: Any = None) -> None:
        self.number = number
        self.capacity_bytes = capacity_bytes
        self._buffer: Any = buffer
        self._fd = fd
        self._block = block
        self.filled = False
        """Whether the segment was written to. Before that, its pages may not exist, and no meter counts them."""
        _mapped.add(self)

    @property
    def fd(self) -> int | None:
        """The descriptor to pass to another process, or None where segments are attached by name."""
        return self._fd

    @property
    def name(self) -> str | None:
        """The name by which another process attaches the segment, or None where segments are attached by descriptor."""
        return None if self._block is None else self._block.name

    @property
    def address(self) -> int | None:
        """The address at which this process maps the segment, or None where segments are attached by name."""
        return None if self._block is not None or self._buffer is None else mapping.address_of(self._buffer)

    def array(self) -> np.ndarray:
        """A new array over all bytes. Every view of the array keeps the array, and so the mapping, alive."""
        return np.frombuffer(self._buffer, dtype=np.uint8, count=self.capacity_bytes)

    def populate(self, start: int, end: int) -> None:
        """Map the pages of these bytes now, in one call, to avoid a page fault at the first touch of each page."""
        if self._block is None and end - start >= 16 * PAGE_BYTES:
            mapping.populate(self._buffer, start, end)

    def move(self, keep: Sequence[tuple[int, int]]) -> None:
        """Memfds only: map the segment at another address. At the old one, views of the parts to ``keep`` see private
        copies from now on, and no other view may be used."""
        old, self._buffer = self._buffer, mapping.map_again(self._buffer)
        mapping.make_private(old, keep)

    def trim(self, keep_bytes: int) -> None:
        """Release the pages beyond ``keep_bytes``; no process may touch them afterwards."""
        keep = round_up(keep_bytes, PAGE_BYTES)
        if self._fd is not None and keep < self.capacity_bytes:
            os.ftruncate(self._fd, keep)
            self.capacity_bytes = keep

    def empty(self) -> None:
        """Release every page at once, even if other processes map the segment; no process may touch it afterwards."""
        if self._fd is not None:
            os.ftruncate(self._fd, 0)

    def close_descriptor(self) -> None:
        """Close the descriptor but keep the mapping: no other process can map the segment any more."""
        # Clear the attribute first: after a fork between the two steps, the child would close a descriptor number that
        # belongs to another file by then.
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Close this process's descriptor and mapping; views that still exist keep the mapping until they are gone."""
        self.close_descriptor()
        self._buffer = None
        if self._block is not None:
            block, self._block = self._block, None
            _forget_views(block)

    def __del__(self) -> None:
        # An exception may have stopped the owner between two steps, so the segment may be incomplete.
        with contextlib.suppress(OSError, AttributeError):
            self.close_descriptor()

    def unlink(self) -> None:
        """Remove the segment's name, if it has one; only the owner calls this. The memory is freed with the last
        mapping."""
        if self._block is not None:
            self._block.unlink()


def create_segment(number: int, capacity_bytes: int, *, use_memfd: bool = HAS_MEMFD) -> Segment:
    if use_memfd:
        fd = os.memfd_create(f"penstock-{number}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, capacity_bytes)
            return Segment(number, capacity_bytes, mapping.map_shared(fd, capacity_bytes), fd)
        except BaseException:
            os.close(fd)
            raise
    block = shared_memory.SharedMemory(create=True, size=capacity_bytes)
    return Segment(number, capacity_bytes, block.buf, None, block)


def attach_segment(number: int, capacity_bytes: int, *, fd: int | None, name: str | None) -> Segment:
    """Map a segment that another process created. The segment owns ``fd`` from then on."""
    if fd is not None:
        try:
            buffer = mapping.map_shared(fd, capacity_bytes)
        finally:
            os.close(fd)
        return Segment(number, capacity_bytes, buffer, None)
    assert name is not None
    block = shared_memory.SharedMemory(name=name)
    # Python registers attached blocks as if this process owned them, and would unlink the owner's block when this
    # process exits.
    with contextlib.suppress(KeyError, AttributeError):
        resource_tracker.unregister(block._name, "shared_memory")  # type: ignore[attr-defined]
    return Segment(number, capacity_bytes, block.buf, None, block)


def _forget_views(block: Any) -> None:
    """Close a named block without the BufferError that live views would cause; the views keep the mapping."""
    try:
        block.close()
    except BufferError:
        block._buf = None
        block._mmap = None


def _release_in_child() -> None:
    """Drop the inherited segments in a forked child; otherwise their memory would stay allocated after the trainer
    released it.

    A segment with a view stays mapped, because the child may use the batch that it inherited.
    """
    for segment in list(_mapped):
        fd, segment._fd = segment._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)
        if segment._block is None:
            segment._buffer = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
