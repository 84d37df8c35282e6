"""The files of a store on disk, which survives the run.

In:  a folder; values, from any process of the node that has the store open.
Out: private copies of values, exactly as they were written; a value with other bytes is a miss.
Runs in: trainer, worker, command line. Does not import torch.

Table, locks and rows are the same as those of the store in memory, but in two sparse files. A record of its key, length
and checksum precedes every value, so even after a crash an entry leads either to its value or to a miss. The table is
mapped, and its disk space is allocated before. Values are read and written whole, by system calls: a full disk, a
failing disk or a shortened file causes an error and not a signal, and no page of the file counts as memory of the
process.

All processes that have the store open share one lock. A process that gets this lock exclusively is the only one, so it
may prepare the files before it shares the lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import struct
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
    Extent,
    Payload,
    Region,
    write_header,
    write_pieces,
)
from penstock.errors import CacheError

_L_OPEN = 1 << 41
"""The byte of the lock file that all processes with the store open share."""
_OPEN_WITHIN_S = 10.0
_LEAST_VIRTUAL_BYTES = 1 << 38
_MOST_VIRTUAL_BYTES = 1 << 43
"""Half of the largest file that common file systems can hold."""
_MOST_SLOTS_LOG2 = 27
_MOST_TAGS = 1 << 60
_ANY_VERSION = (1 << 56) - 1
"""The part of the magic number that is the same in all versions."""
_FILES = ("index", "values", "locks")

_BLOCK_WORDS = 512
_WEIGHTS = np.frombuffer(hashlib.shake_128(b"penstock").digest(8 * _BLOCK_WORDS), np.uint64) | np.uint64(1)
_RECORD = struct.Struct("<8s16sQ16s")
_RECORD_MAGIC = b"penstock"


class Disk(Region):
    record_bytes = 64

    def join(self) -> None:
        _share(self.lock_fd)

    def read(self, digest: bytes, offset: int, used_bytes: int) -> np.ndarray | None:
        record = os.pread(self.data_fd, _RECORD.size, offset)
        if len(record) < _RECORD.size:
            return None
        magic, key, length, check = _RECORD.unpack(record)
        # Check this before allocating memory: a damaged index may contain any length.
        if magic != _RECORD_MAGIC or key != digest or length != used_bytes - self.record_bytes:
            return None
        value = np.empty(length, np.uint8)
        rest, offset = value.data, offset + self.record_bytes
        while rest:
            count = os.preadv(self.data_fd, [rest], offset)
            if not count:
                return None
            rest, offset = rest[count:], offset + count
        return value if check == checksum(value) else None

    def write(self, digest: bytes, place: Extent, packed: Payload) -> None:
        record = np.zeros(self.record_bytes + packed.total_bytes, np.uint8)
        value = record[self.record_bytes :]
        packed.write(value)
        _RECORD.pack_into(record.data, 0, _RECORD_MAGIC, digest, len(value), checksum(value))
        write_pieces(self.data_fd, [record.data], place.offset)

    def reserve_table(self, where: int) -> None:
        os.posix_fallocate(self.meta_fd, where & ~63, ENTRY_BYTES << (where & 63))


def checksum(source: np.ndarray) -> bytes:
    """16 bytes that change whenever any byte of ``source``, a contiguous array, changes.

    Every block of 4 KiB is reduced to one word, the sum of its words times odd weights, and these words are hashed.
    This is five times as fast as a CRC and detects changed, zeroed, missing and misplaced words and blocks. It does not
    prevent forgery: a program that can write the file can write the checksum too.
    """
    whole = len(source) // (8 * _BLOCK_WORDS) * 8 * _BLOCK_WORDS
    taken = hashlib.blake2b(len(source).to_bytes(8, "little"), digest_size=16)
    if whole:
        blocks = source[:whole].view(np.uint64).reshape(-1, _BLOCK_WORDS)
        taken.update(np.einsum("ij,j->i", blocks, _WEIGHTS).data)
    taken.update(source[whole:].data)
    return taken.digest()


# -- opening ----------------------------------------------------------------------------------


def folder_key(folder: Path) -> str:
    """A key for a folder, the same for every path to it; creates the folder. Raises CacheError, OSError."""
    if not hasattr(os, "posix_fallocate"):
        raise CacheError("A cache on disk needs Linux.")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    return f"disk {found.st_dev}:{found.st_ino}"


@contextlib.contextmanager
def open_files(folder: Path, *, limit_bytes: int, policy: int) -> Iterator[tuple[list[int], bool]]:
    """Descriptors of index, values and locks, and whether this process alone has these files open. If it does, no other
    process can open them until ``Disk.join``. The descriptors belong to the caller, but an exception inside the block
    closes them. Raises CacheError, OSError.
    """
    with _opened(folder, os.O_CREAT) as fds:
        yield fds, _prepare_or_join(folder, fds, limit_bytes=limit_bytes, policy=policy)


def _prepare_or_join(folder: Path, fds: list[int], *, limit_bytes: int, policy: int) -> bool:
    """Prepare the files, or join the processes that have them open; returns whether this process prepared the files."""
    until_s = time.monotonic() + _OPEN_WITHIN_S
    while True:
        if try_lock(fds[2], _L_OPEN):
            _prepare(folder, fds[0], fds[1], limit_bytes=limit_bytes, policy=policy)
            return True
        _share(fds[2])
        header = _header(fds[0])
        if _is_sound(header, os.fstat(fds[0]).st_size) and header[H_READY]:
            return False
        # The process that was preparing the files has not finished.
        release(fds[2], _L_OPEN)
        if time.monotonic() > until_s:
            raise CacheError(f"Other processes are opening the cache in {folder} and do not finish.")


@contextlib.contextmanager
def visit(folder: Path) -> Iterator[tuple[Region, bool]]:
    """A view of the store in a folder, and whether no process uses it. A process that has the store open must not call
    this."""
    with _opened(folder, 0) as fds:
        is_alone = try_lock(fds[2], _L_OPEN)
        if not is_alone:
            _share(fds[2])
        if not _is_sound(_header(fds[0]), os.fstat(fds[0]).st_size):
            raise CacheError(f"The files in {folder} are not a cache of this version of penstock. Remove them.")
        region = Region(*fds)
    try:
        yield region, is_alone
    finally:
        region.close()


@contextlib.contextmanager
def _opened(folder: Path, flags: int) -> Iterator[list[int]]:
    """The files' descriptors. The caller closes them; after an exception they are closed here."""
    fds: list[int] = []
    try:
        for name in _FILES:
            path = folder / f"cache.{name}"
            fds.append(os.open(path, flags | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            if not stat.S_ISREG(os.fstat(fds[-1]).st_mode):
                raise CacheError(f"{path} is not a plain file. Use another folder.")
        yield fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def free_bytes(folder: Path) -> int:
    """The free space of the disk, less a twentieth of its size, which is left to other programs."""
    while not folder.exists():
        folder = folder.parent
    disk = os.statvfs(folder)
    return (disk.f_bavail - disk.f_blocks // 20) * disk.f_frsize


def taken_bytes(folder: Path) -> int:
    """The disk space that the store in a folder uses."""
    files = (folder / f"cache.{name}" for name in ("index", "values"))
    return sum(file.stat().st_blocks * 512 for file in files if file.exists())


def _share(lock_fd: int) -> None:
    """Join the processes that have the store open."""
    try:
        wait_for(lock_fd, _L_OPEN, _OPEN_WITHIN_S, shared=True)
    except TooLong:
        raise CacheError("Another process is opening this cache on disk and does not finish.") from None


def _prepare(folder: Path, meta_fd: int, data_fd: int, *, limit_bytes: int, policy: int) -> None:
    """Prepare the files for a region, and keep their content if it is sound. No other process has them open."""
    virtual_bytes = min(max(4 * limit_bytes, _LEAST_VIRTUAL_BYTES), _MOST_VIRTUAL_BYTES) // PAGE_BYTES * PAGE_BYTES
    header = _header(meta_fd)
    if _is_sound(header, os.fstat(meta_fd).st_size):
        # If the file was copied, its space may no longer be allocated.
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
            f"The cache in {folder} was made by another version of penstock. Use another folder, or remove this folder."
        )
    if os.fstat(meta_fd).st_size:
        warnings.warn(f"The cache in {folder} is damaged; it starts again empty.", RuntimeWarning, stacklevel=2)
    for fd in (meta_fd, data_fd):
        os.ftruncate(fd, 0)
    os.posix_fallocate(meta_fd, 0, TABLES_AT + (ENTRY_BYTES << FIRST_SLOTS_LOG2))
    write_header(meta_fd, limit_bytes=limit_bytes, virtual_bytes=virtual_bytes, policy=policy)


def _header(meta_fd: int) -> np.ndarray:
    return np.frombuffer(os.pread(meta_fd, HEADER_BYTES, 0).ljust(HEADER_BYTES, b"\0"), np.uint64).copy()


def _is_sound(header: np.ndarray, file_bytes: int) -> bool:
    """Whether the header's values are possible and its table lies inside the file."""
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
