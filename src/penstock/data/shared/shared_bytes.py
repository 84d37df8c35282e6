"""Bytes kept once for a process and all its workers.

In:  pieces of bytes, written one after another, once.
Out: read-only views that no worker has a copy of, however it was started.
Runs in: trainer and worker.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Iterable
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np

from penstock.data.shared.file_mapping import map_shared

_MAPPED_AT_A_TOUCH_BYTES = 64 << 10
"""How much of a file that is in memory already Linux maps around a page that is touched."""

Piece = bytes | bytearray | memoryview | np.ndarray


class SharedBytes:
    """A nameless file in memory, mapped. Pickled into a worker that is being started, it is the same memory there;
    pickled anywhere else, a copy."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Takes over ``fd``, whose first ``size_bytes`` are final."""
        self._size_bytes = size_bytes
        # A mapping cannot be empty. Python's own would keep a descriptor beside this one.
        shared = map_shared(fd, size_bytes) if size_bytes else b""
        self._map = mmap.mmap(fd, size_bytes, access=mmap.ACCESS_READ) if shared is None else shared
        # Last: until here the descriptor is closed by who opened it.
        self._fd = fd

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> SharedBytes:
        fd = nameless_file()
        try:
            size_bytes = sum(_append(fd, piece) for piece in pieces)
            made = cls(fd, size_bytes)
            # Pages that only one worker has touched so far would count as its own wherever its memory is watched.
            made.array()[::_MAPPED_AT_A_TOUCH_BYTES].sum()
            return made
        except BaseException:
            os.close(fd)
            raise

    def __len__(self) -> int:
        return self._size_bytes

    def view(self) -> memoryview:
        return memoryview(self._map)

    def array(self, dtype: Any = np.uint8, offset: int = 0, count: int = -1) -> np.ndarray:
        if not self._size_bytes:
            return np.empty(0, dtype)
        return np.frombuffer(self._map, dtype, count, offset)

    def made_of(self) -> tuple[Any, ...]:
        """What there is to them: told to caches that outlive a run."""
        return (self.array(),)

    def __del__(self, close: Any = os.close) -> None:
        # The mapping goes with its last view. At the interpreter's end, modules may be gone already.
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            close(fd)

    def __reduce__(self) -> Any:
        if get_spawning_popen() is None or sys.platform == "win32":
            return SharedBytes.of, ([bytes(self.view())],)
        return _received, (reduction.DupFd(self._fd), self._size_bytes)


def _received(sent: Any, size_bytes: int) -> SharedBytes:
    return SharedBytes(sent.detach(), size_bytes)


def nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("penstock-shared", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _append(fd: int, piece: Piece) -> int:
    rest = np.ascontiguousarray(piece).data if isinstance(piece, np.ndarray) else memoryview(piece)
    if not rest.nbytes:
        return 0
    rest = rest.cast("B")
    size_bytes = rest.nbytes
    while rest:
        rest = rest[os.write(fd, rest) :]
    return size_bytes
