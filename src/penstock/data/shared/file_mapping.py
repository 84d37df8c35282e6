"""A part of a file mapped into memory: private and writable, or shared and read-only.

In:  an open file and a place in it.
Out: bytes that are read from the page cache when they are accessed. Writes to a private mapping stay in it.
Runs in: trainer and worker.

Each large value of a dataset gets its own mapping, which ends with the value. Otherwise a transform that works in place
would read its own result in the next epoch. Unlike Python's mmap, these mappings keep no descriptor.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import numpy as np

from penstock.arena.last_view import when_gone

_MAP_NORESERVE = 0x4000
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_STATFS_BYTES = 256
_MEMORY_FILE_SYSTEMS = (0x01021994, 0x858458F6)
"""The first number of ``struct statfs``: tmpfs, ramfs."""
_LIMIT_BYTES = 64
_PIECE_BYTES = 16 << 10
"""Small, because a process without mappings to spare cannot allocate a large block either."""
_NEARLY = 64
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _libc is not None:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    _libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    _libc.fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]


def map_private(fd: int, offset: int, length: int) -> np.ndarray | None:
    """Writable bytes of a file; the file does not change. None if the process cannot have another mapping."""
    first = offset // mmap.PAGESIZE * mmap.PAGESIZE
    flags = 0 if _libc is None else mmap.MAP_PRIVATE | _MAP_NORESERVE
    view = _mapped(fd, first, offset + length - first, flags, writable=True)
    return None if view is None else np.frombuffer(view, np.uint8)[offset - first :]


def map_shared(fd: int, length: int, first: int = 0) -> memoryview | None:
    """``length`` bytes of a file, read-only; ``first`` is a multiple of the page size. None if it cannot be mapped."""
    flags = 0 if _libc is None else mmap.MAP_SHARED
    view = _mapped(fd, first, length, flags, writable=False)
    return None if view is None else view.toreadonly()


def punch_hole(fd: int, first: int, length: int) -> bool:
    """Return a part of a file to the file system; its bytes read as zeros. False where that is not possible."""
    return _libc is not None and _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, first, length) == 0


def is_in_memory(fd: int) -> bool:
    """Whether the file system of a file holds its files in memory."""
    about = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc is None or _libc.fstatfs(fd, about) != 0:
        return False
    return ctypes.c_uint32.from_buffer(about).value in _MEMORY_FILE_SYSTEMS


def forget_pages(view: memoryview) -> None:
    """Take the pages of a shared mapping out of this process; they stay in the page cache, and the next access maps
    them again."""
    if _libc is not None:
        _libc.madvise(np.frombuffer(view, np.uint8).ctypes.data, view.nbytes, mmap.MADV_DONTNEED)


def file_pages_bytes() -> int:
    """How much of the files that this process maps is in its memory; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[2]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return 0


def _mapped(fd: int, first: int, size: int, flags: int, *, writable: bool) -> memoryview | None:
    if _libc is None:
        return None
    address = _libc.mmap(None, size, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0), flags, fd, first)
    if address == _FAILED:
        return None
    buffer = (ctypes.c_ubyte * size).from_address(address)
    when_gone(buffer, _libc.munmap, address, size)
    return memoryview(buffer).cast("B")


def shortage() -> str | None:
    """A message if this process has as many mappings as the kernel allows; else None."""
    try:
        # Without buffers: hardly any memory can be had where mappings have run out.
        with Path("/proc/sys/vm/max_map_count").open("rb", buffering=0) as file:
            limit = int(file.read(_LIMIT_BYTES))
        with Path("/proc/self/maps").open("rb", buffering=0) as maps:
            count = sum(piece.count(b"\n") for piece in iter(lambda: maps.read(_PIECE_BYTES), b""))
    except (OSError, ValueError, MemoryError):
        return None
    if count < limit - _NEARLY:
        return None
    return f"this process has {count:,} memory mappings, and vm.max_map_count allows {limit:,}"


def identity_of(fd: int) -> tuple[int, int, int, int]:
    """Changes when the file is replaced or written to."""
    about = os.fstat(fd)
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
