"""The files of a tier on disk: opened, checked and, where they cannot be what they should, begun anew.

In:  a folder.
Out: descriptors of files a region can be laid over; how much room the disk has.
Runs in: trainer, worker, command line. Does not import torch.

Everybody who has the tier open shares one lock. Who finds nobody else holding it is alone: the files are his to
prepare until he shares it too.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from penstock.cache.store.locks import TooLong, release, try_lock, wait_for
from penstock.cache.store.region import (
    ENTRY_BYTES,
    FIRST_SLOTS_LOG2,
    H_LIMIT,
    H_MAGIC,
    H_POLICY,
    H_READY,
    H_TABLE,
    H_TAGS,
    H_VIRTUAL,
    HEADER_BYTES,
    MAGIC,
    META_BYTES,
    PAGE_BYTES,
    TABLES_AT,
    Region,
    write_header,
)
from penstock.errors import CacheError

_L_OPEN = 1 << 41
"""Byte of the lock file that everybody who has the tier open shares."""
_OPEN_WITHIN_S = 10.0
_LEAST_VIRTUAL_BYTES = 1 << 38
_MOST_VIRTUAL_BYTES = 1 << 43
"""Half of the largest file that common file systems can hold."""
_MOST_SLOTS_LOG2 = 27
_MOST_TAGS = 1 << 60
_ANY_VERSION = (1 << 56) - 1
"""Of the magic number, what all versions have in common."""
_FILES = ("index", "values", "locks")


def folder_key(folder: Path) -> str:
    """What a folder is known by, however it is spelt; it is made if it is not there. Raises CacheError, OSError."""
    if not hasattr(os, "posix_fallocate"):
        raise CacheError("a cache on disk needs Linux")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    return f"disk {found.st_dev}:{found.st_ino}"


@contextlib.contextmanager
def open_files(folder: Path, *, limit_bytes: int, policy: int) -> Iterator[tuple[list[int], bool]]:
    """Descriptors of index, values and locks, and whether nobody else has them open: then nobody can until ``join``.

    They are the caller's; after an exception inside they are closed. Raises CacheError, OSError.
    """
    with _opened(folder, os.O_CREAT) as fds:
        yield fds, _prepare_or_join(folder, fds, limit_bytes=limit_bytes, policy=policy)


def _prepare_or_join(folder: Path, fds: list[int], *, limit_bytes: int, policy: int) -> bool:
    """Whether it was this process that prepared the files."""
    until_s = time.monotonic() + _OPEN_WITHIN_S
    while True:
        if try_lock(fds[2], _L_OPEN):
            _prepare(folder, fds[0], fds[1], limit_bytes=limit_bytes, policy=policy)
            return True
        join(fds[2])
        header = _header(fds[0])
        if _is_sound(header, os.fstat(fds[0]).st_size) and header[H_READY]:
            return False
        # Whoever was preparing them did not get to the end of it.
        release(fds[2], _L_OPEN)
        if time.monotonic() > until_s:
            raise CacheError(f"the cache in {folder} is being opened by processes that do not finish")


@contextlib.contextmanager
def visit(folder: Path) -> Iterator[tuple[Region, bool]]:
    """A view of the tier in a folder, and whether nobody uses it: for one who does not use it, nor in a process that
    does."""
    with _opened(folder, 0) as fds:
        is_alone = try_lock(fds[2], _L_OPEN)
        if not is_alone:
            join(fds[2])
        if not _is_sound(_header(fds[0]), os.fstat(fds[0]).st_size):
            raise CacheError(f"what is in {folder} is no cache of this version of penstock; remove it")
        region = Region(*fds)
    try:
        yield region, is_alone
    finally:
        region.close()


@contextlib.contextmanager
def _opened(folder: Path, flags: int) -> Iterator[list[int]]:
    """The files, to be closed by whoever they are handed to; closed here if something fails."""
    fds: list[int] = []
    try:
        for name in _FILES:
            path = folder / f"cache.{name}"
            fds.append(os.open(path, flags | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            if not stat.S_ISREG(os.fstat(fds[-1]).st_mode):
                raise CacheError(f"{path} is not a plain file; use another folder")
        yield fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def free_bytes(folder: Path) -> int:
    """What the disk can still give, with a twentieth of it left to others."""
    while not folder.exists():
        folder = folder.parent
    disk = os.statvfs(folder)
    return (disk.f_bavail - disk.f_blocks // 20) * disk.f_frsize


def taken_bytes(folder: Path) -> int:
    """What the tier in a folder takes there."""
    files = (folder / f"cache.{name}" for name in ("index", "values"))
    return sum(file.stat().st_blocks * 512 for file in files if file.exists())


def join(lock_fd: int) -> None:
    """Be one of those who have it open."""
    try:
        wait_for(lock_fd, _L_OPEN, _OPEN_WITHIN_S, shared=True)
    except TooLong:
        raise CacheError("another process is opening this cache on disk and does not finish") from None


def _prepare(folder: Path, meta_fd: int, data_fd: int, *, limit_bytes: int, policy: int) -> None:
    """Make the files what a region needs, keeping what is in them if it can be kept. Nobody else has them open."""
    virtual_bytes = min(max(4 * limit_bytes, _LEAST_VIRTUAL_BYTES), _MOST_VIRTUAL_BYTES) // PAGE_BYTES * PAGE_BYTES
    header = _header(meta_fd)
    if _is_sound(header, os.fstat(meta_fd).st_size):
        # A copied file may have lost what was reserved.
        os.posix_fallocate(meta_fd, 0, TABLES_AT)
        where = int(header[H_TABLE])
        os.posix_fallocate(meta_fd, where & ~63, ENTRY_BYTES << (where & 63))
        header[H_LIMIT] = limit_bytes
        header[H_VIRTUAL] = max(virtual_bytes, int(header[H_VIRTUAL]))
        header[H_POLICY], header[H_READY] = policy, 0
        os.pwrite(meta_fd, header.tobytes(), 0)
        return
    magic = int(header[H_MAGIC])
    if magic != MAGIC and magic & _ANY_VERSION == MAGIC & _ANY_VERSION:
        raise CacheError(
            f"the cache in {folder} was made by another version of penstock; use another folder, or remove this one"
        )
    if os.fstat(meta_fd).st_size:
        warnings.warn(
            f"the cache in {folder} is damaged, and begins anew",
            RuntimeWarning,
            stacklevel=2,
        )
    for fd in (meta_fd, data_fd):
        os.ftruncate(fd, 0)
    os.posix_fallocate(meta_fd, 0, TABLES_AT + (ENTRY_BYTES << FIRST_SLOTS_LOG2))
    write_header(meta_fd, limit_bytes=limit_bytes, virtual_bytes=virtual_bytes, policy=policy)


def _header(meta_fd: int) -> np.ndarray:
    return np.frombuffer(os.pread(meta_fd, HEADER_BYTES, 0).ljust(HEADER_BYTES, b"\0"), np.uint64).copy()


def _is_sound(header: np.ndarray, file_bytes: int) -> bool:
    """Whether a header can be one, and its table lies in the file."""
    slots_log2, table_at = int(header[H_TABLE]) & 63, int(header[H_TABLE]) & ~63
    virtual_bytes = int(header[H_VIRTUAL])
    return (
        int(header[H_MAGIC]) == MAGIC
        and int(header[H_TAGS]) < _MOST_TAGS
        and 0 < virtual_bytes <= _MOST_VIRTUAL_BYTES
        and virtual_bytes % PAGE_BYTES == 0
        and FIRST_SLOTS_LOG2 <= slots_log2 <= _MOST_SLOTS_LOG2
        and table_at >= TABLES_AT
        and table_at + (ENTRY_BYTES << slots_log2) <= min(file_bytes, META_BYTES)
    )
