"""A part of a file as memory of the caller's own.

In:  an open file and a place in it.
Out: bytes that are read from the page cache as they are touched; what is written to them is seen by nobody else.
Runs in: trainer and worker.

Every value gets a mapping of its own, which goes with the value: a transform that works in place must not find its own
result when it reads the same row in the next epoch. It keeps no descriptor, as Python's mmap would.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref

import numpy as np

_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _libc is not None:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_private(fd: int, offset: int, length: int) -> np.ndarray | None:
    """Bytes of a file, to be written to at will. None where the system has no mapping left."""
    if _libc is None:
        return None
    first = offset // mmap.PAGESIZE * mmap.PAGESIZE
    size = offset + length - first
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE
    address = _libc.mmap(None, size, protection, flags, fd, first)
    if address == _FAILED:
        return None
    buffer = (ctypes.c_ubyte * size).from_address(address)
    # At exit the kernel does it; a finaliser then would pull the memory from under objects that die later.
    weakref.finalize(buffer, _libc.munmap, address, size).atexit = False
    return np.frombuffer(memoryview(buffer), np.uint8)[offset - first :]


def identity_of(fd: int) -> tuple[int, int, int, int]:
    """Another one when the file is another one, or was written to."""
    about = os.fstat(fd)
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
