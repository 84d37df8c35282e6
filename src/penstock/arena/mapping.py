"""Shared mappings of a file descriptor that do not duplicate the descriptor.

In:  a memfd and a size.
Out: a buffer; the mapping ends with its last view.
Runs in: trainer and worker.

Python's mmap duplicates the descriptor for as long as the mapping exists, so a user who holds a thousand batches would
run out of open files.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Any

from penstock.arena.last_view import when_gone

_MADV_POPULATE_WRITE = 23
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True) if hasattr(os, "memfd_create") else None
if _libc is not None:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    if hasattr(_libc, "mremap"):
        _libc.mremap.restype = ctypes.c_void_p
        _libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_shared(fd: int, size_bytes: int) -> Any:
    """A writable buffer over the descriptor's bytes. Raises OSError."""
    assert _libc is not None
    read_write = mmap.PROT_READ | mmap.PROT_WRITE
    return _buffer_at(_libc.mmap(None, size_bytes, read_write, mmap.MAP_SHARED, fd, 0), size_bytes)


def map_again(buffer: Any) -> Any:
    """A second buffer over the same shared bytes, at another address. Raises OSError."""
    assert _libc is not None
    size_bytes = ctypes.sizeof(buffer)
    # Linux duplicates a shared mapping whose old size is given as zero.
    return _buffer_at(_libc.mremap(ctypes.addressof(buffer), 0, size_bytes, _MREMAP_MAYMOVE, None), size_bytes)


def make_private(buffer: Any, keep: Sequence[tuple[int, int]]) -> None:
    """Cut a buffer off from the shared bytes: the pages of the parts to ``keep`` become private copies, the others must
    not be touched any more. Raises OSError."""
    assert _libc is not None
    read_write, private = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address, end_of_last = ctypes.addressof(buffer), 0
    size_bytes = -(-ctypes.sizeof(buffer) // mmap.PAGESIZE) * mmap.PAGESIZE
    for start, end in [*sorted(keep), (size_bytes, size_bytes)]:
        first = max(start // mmap.PAGESIZE * mmap.PAGESIZE, end_of_last)
        if first > end_of_last:
            flags = private | _MAP_FIXED | _MAP_NORESERVE
            _checked(_libc.mmap(address + end_of_last, first - end_of_last, _PROT_NONE, flags, -1, 0), first)
        end_of_last = max(-(-end // mmap.PAGESIZE) * mmap.PAGESIZE, first)
        if count := end_of_last - first:
            copy = _checked(_libc.mmap(None, count, read_write, private, -1, 0), count)
            ctypes.memmove(copy, address + first, count)
            # In one step: another thread of the dataset may be reading.
            _checked(_libc.mremap(copy, count, count, _MREMAP_MAYMOVE | _MREMAP_FIXED, address + first), count)


def _buffer_at(address: int | None, size_bytes: int) -> Any:
    assert _libc is not None
    buffer = (ctypes.c_char * size_bytes).from_address(_checked(address, size_bytes))
    when_gone(buffer, _libc.munmap, address, size_bytes)
    return buffer


def _checked(address: int | None, size_bytes: int) -> int:
    if address is None or address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: mapping {size_bytes} bytes")
    return address


def address_of(buffer: Any) -> int:
    return ctypes.addressof(buffer)


def populate(buffer: Any, start: int, end: int) -> None:
    """Map the pages of a part of a buffer now, in one call, to avoid a page fault at the first touch of each page.

    Kernels before 5.14 refuse this; pages are then mapped one by one, on first touch.
    """
    assert _libc is not None
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(ctypes.addressof(buffer) + first, end - first, _MADV_POPULATE_WRITE)


def remove(buffer: Any, start: int, end: int) -> None:
    """Release the pages of a part of a buffer to the system, even if other processes have them mapped. The pages read
    as zeros afterwards."""
    assert _libc is not None
    if _libc.madvise(ctypes.addressof(buffer) + start, end - start, mmap.MADV_REMOVE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: releasing {end - start} bytes")
