"""Bytes kept once for a process and all its workers.

In:  pieces of bytes, each written once, one after another.
Out: read-only views that every worker shares, whether it was forked or spawned.
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

_FAULT_AROUND_BYTES = 64 << 10
"""On the first access to a page of a file that is in memory, Linux maps this many bytes around the page."""

Piece = bytes | bytearray | memoryview | np.ndarray


class NamelessFile:
    """A file in memory, without a name. Pickled for a worker that is being started, the object refers to the same file
    there; pickled for any other purpose, it becomes a copy."""

    def __init__(self, fd: int | None = None) -> None:
        """Takes over ``fd``, which is closed with this object."""
        self._fd = _create() if fd is None else fd

    def __del__(self, close: Any = os.close) -> None:
        # ``close`` is an argument because modules may be gone when the interpreter exits.
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            close(fd)

    def __reduce__(self) -> Any:
        if get_spawning_popen() is None or sys.platform == "win32":
            return _copied, (type(self), self._content())
        return _received, (type(self), reduction.DupFd(self._fd))

    def _content(self) -> bytes:
        return os.pread(self._fd, os.fstat(self._fd).st_size, 0)


class SharedBytes(NamelessFile):
    """The bytes of a nameless file, mapped into memory."""

    def __init__(self, fd: int) -> None:
        """Takes over ``fd``, which holds all the bytes."""
        self._size_bytes = size_bytes = os.fstat(fd).st_size
        # A mapping cannot be empty. mmap.mmap is not used, because it would keep a second descriptor.
        shared = map_shared(fd, size_bytes) if size_bytes else b""
        self._map = mmap.mmap(fd, size_bytes, access=mmap.ACCESS_READ) if shared is None else shared
        # This call comes last, because after an error before it, the caller closes the descriptor.
        super().__init__(fd)

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> SharedBytes:
        fd = _create()
        try:
            for piece in pieces:
                _append(fd, piece)
            made = cls(fd)
            # This process touches all pages, because a meter counts a page that only one worker has touched as memory
            # of that worker alone.
            made.array()[::_FAULT_AROUND_BYTES].sum()
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

    def _content(self) -> bytes:
        return bytes(self.view())

    def made_of(self) -> tuple[Any, ...]:
        """The bytes, for the fingerprint by which a cache finds samples of earlier runs."""
        return (self.array(),)


def _received(kind: Any, sent: Any) -> Any:
    return kind(sent.detach())


def _copied(kind: Any, content: bytes) -> Any:
    fd = _create()
    _append(fd, content)
    return kind(fd)


def _create() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("penstock-shared", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _append(fd: int, piece: Piece) -> None:
    rest = np.ascontiguousarray(piece).data if isinstance(piece, np.ndarray) else memoryview(piece)
    if rest.nbytes:
        rest = rest.cast("B")
        while rest:
            rest = rest[os.write(fd, rest) :]
