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
from typing import Any

from penstock.arena.last_view import when_gone

_MADV_POPULATE_WRITE = 23
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True) if hasattr(os, "memfd_create") else None
if _libc is not None:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_shared(fd: int, size_bytes: int) -> Any:
    """A writable buffer over the descriptor's bytes. Raises OSError."""
    assert _libc is not None
    address = _libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: mapping {size_bytes} bytes")
    buffer = (ctypes.c_char * size_bytes).from_address(address)
    when_gone(buffer, _libc.munmap, address, size_bytes)
    return buffer


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
