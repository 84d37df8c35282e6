"""The nameless file of decoded row groups: its table, the ranges of the groups, and the locks on these ranges.

In:  bytes of row groups.
Out: the same bytes, in the range of their group, for all processes of this machine.
Runs in: trainer and worker, any number of threads and processes.

The kernel deletes the file when the last process that uses it ends, even if that process is killed. The file is sparse.
It begins with a table that all processes write to, and then contains a range for each group.

- Byte n of the file is locked for group n: shared by each thread that reads the group, exclusively by the thread that
  writes or evicts the group. The kernel releases the locks of a process that ends.
- A thread keeps its lock until it reads another group, so that rows of one group are read without a system call.
- An evicted range reads as zeros, and its space is returned to the disk.

A link below the temporary folder says where other ranks find the file: ``/proc/<pid>/fd/<number>``. The link leads
nowhere once this process has ended.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import struct
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from penstock.data.shared.file_mapping import is_in_memory, punch_hole
from penstock.environment import temporary_folder, user_id
from penstock.units import GIB, format_bytes
from penstock.workers.fork_hygiene import keep_from_children

if sys.platform == "linux":
    import fcntl

_SPAN_BYTES = 8 << 40
"""Size of the sparse file, which is divided among the groups. ext4 allows twice this size."""
_HEADER_BYTES = 64
CLOCK, REFUSED, WARNED = 2, 3, 4
"""Three numbers follow the name, which has 16 bytes: how many times groups were opened; how many groups in a row were
refused last, because another group would have been evicted; whether a process has warned."""
LENGTH, VERSION, WRITTEN, OPENED, BEFORE = range(5)
"""The table has five numbers for each group: its bytes, or 0 if the group is not in the file; how often the group was
written; the bytes written so far; when the group was opened last; when it was opened the time before."""
_NAP_S, _PATIENCE_S = 0.01, 30.0
"""While another process decodes a group, a process checks this often whether the group is there. If the other process
writes nothing for the second time, it reads the Parquet file instead."""
_JOIN_PATIENCE_S = 1.0
_LEAST_FREE = 0.5
"""The file takes at most this share of the free space of the disk."""
_MOST_IN_MEMORY_BYTES = GIB // 4
"""The file takes at most this many bytes if its file system lies in memory."""


class Handle:
    """A thread's own descriptor of the file, to which locks belong. The descriptor is closed with this object."""

    def __init__(self, fd: int) -> None:
        """Takes over ``fd``."""
        self.fd = fd
        self.held = -1
        """The group that is locked through this descriptor."""

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self, close: Any = os.close) -> None:
        # ``close`` is an argument because modules may be gone when the interpreter exits.
        if self.fd >= 0:
            close(self.fd)


class RowsFile:
    """The nameless file: its table, its ranges and its locks."""

    def __init__(self, main: Handle, group_bytes: np.ndarray) -> None:
        self._main = main
        count = len(group_bytes)
        header_bytes = _header_bytes(count)
        self._map = mmap.mmap(main.fd, header_bytes)
        self.numbers = memoryview(self._map)[:_HEADER_BYTES].cast("q")
        table = np.frombuffer(self._map, np.int64, (BEFORE + 1) * count, _HEADER_BYTES).reshape(BEFORE + 1, count)
        self.table = table
        self.lengths, self.versions, _, self.opened, self.before = (row.data for row in table)
        ends = np.cumsum(np.maximum(group_bytes, 1), dtype=np.float64)
        shares = ends / (ends[-1] if count else 1) * (_SPAN_BYTES - header_bytes)
        bounds = (shares // mmap.PAGESIZE).astype(np.int64) * mmap.PAGESIZE + header_bytes
        self._bounds = np.concatenate(([header_bytes], bounds))
        self._threads = threading.local()
        self._is_in_memory = is_in_memory(main.fd)

    @classmethod
    def made(cls, name: bytes, group_bytes: np.ndarray) -> RowsFile:
        with tempfile.TemporaryFile(dir=temporary_folder(), prefix="penstock-rows-") as temporary:
            fd = temporary.fileno()
            header_bytes = _header_bytes(len(group_bytes))
            # The space is reserved, because a page of the table that does not fit on the disk later would kill the
            # process.
            os.posix_fallocate(fd, 0, header_bytes)
            os.ftruncate(fd, _SPAN_BYTES)
            os.pwrite(fd, name, 0)
            return cls(Handle(os.dup(fd)), group_bytes)

    @classmethod
    def found(cls, place: str, name: bytes, group_bytes: np.ndarray) -> RowsFile:
        """The file that another process has open. Raises OSError or ValueError if there is none."""
        if not _is_ours(Path(place).stat()):
            raise ValueError(f"{place} is another file")
        main = _opened(place)
        if not _is_ours(os.fstat(main.fd)) or os.pread(main.fd, len(name), 0) != name:
            raise ValueError(f"{place} is another file")
        return cls(main, group_bytes)

    @property
    def place(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._main.fd}"

    def handle(self) -> Handle:
        """The handle of this thread. A forked child opens its own handle."""
        handle = getattr(self._threads, "handle", None)
        if handle is None or handle.fd < 0:
            handle = self._threads.handle = _opened(f"/proc/self/fd/{self._main.fd}")
            keep_from_children(handle)
        return handle

    def range_of(self, group: int) -> tuple[int, int]:
        first, end = self._bounds[group : group + 2].tolist()
        return first, end

    def hold(self, handle: Handle, group: int) -> bool:
        """Lock a group for reading, and unlock the group that the thread had locked. False if the group is not in the
        file."""
        self.release(handle)
        clock = self.numbers[CLOCK] = self.numbers[CLOCK] + 1
        self.before[group] = self.opened[group]
        self.opened[group] = clock
        if not self.lengths[group] or not _lock(handle, group, fcntl.F_RDLCK):
            return False
        if not self.lengths[group]:
            _lock(handle, group, fcntl.F_UNLCK)
            return False
        handle.held = group
        return True

    def release(self, handle: Handle) -> None:
        if handle.held >= 0:
            _lock(handle, handle.held, fcntl.F_UNLCK)
            handle.held = -1

    def take_turn(self, handle: Handle, group: int) -> bool:
        """Lock a group for writing. False if another thread has written it meanwhile."""
        written, since_s = -1, time.monotonic()
        self.release(handle)
        while not _lock(handle, group, fcntl.F_WRLCK):
            time.sleep(_NAP_S)
            now = int(self.table[WRITTEN, group])
            if now != written:
                written, since_s = now, time.monotonic()
            if self.lengths[group]:
                return False
            if time.monotonic() - since_s > _PATIENCE_S:
                raise TimeoutError(
                    f"the process that decodes the row group has written nothing for {_PATIENCE_S:.0f} s"
                )
        handle.held = group
        if self.lengths[group]:
            self.release(handle)
            return False
        return True

    def taken_bytes(self) -> int:
        return os.fstat(self._main.fd).st_blocks * 512

    def limit_bytes(self) -> int:
        about = os.fstatvfs(self._main.fd)
        room = int((about.f_bavail * about.f_frsize + self.taken_bytes()) * _LEAST_FREE)
        return min(room, _MOST_IN_MEMORY_BYTES) if self._is_in_memory else room

    def write(self, handle: Handle, data: memoryview, at: int) -> int:
        """Write ``data`` at ``at``; returns where they end."""
        while data:
            written = os.pwrite(handle.fd, data, at)
            data, at = data[written:], at + written
        return at

    def make_room(self, handle: Handle, need_bytes: int) -> None:
        """Evict the groups opened least recently until ``need_bytes`` more bytes fit. Raises OSError if they cannot
        fit."""
        limit_bytes = self.limit_bytes()
        if self.taken_bytes() + need_bytes <= limit_bytes:
            return
        order = np.argsort(self.table[OPENED])
        for group in order[self.table[LENGTH, order] > 0].tolist():
            # Other threads may be reading the group.
            if not _lock(handle, group, fcntl.F_WRLCK):
                continue
            try:
                first, end = self.range_of(group)
                length, self.lengths[group] = self.lengths[group], 0
                if not punch_hole(handle.fd, first, end - first):
                    self.lengths[group] = length
                    break
            finally:
                _lock(handle, group, fcntl.F_UNLCK)
            if self.taken_bytes() + need_bytes <= limit_bytes:
                return
        raise OSError(f"{format_bytes(need_bytes)} more do not fit into a file of at most {format_bytes(limit_bytes)}")


def _opened(place: str) -> Handle:
    return Handle(os.open(place, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))


def _header_bytes(count: int) -> int:
    return -(-(_HEADER_BYTES + 8 * (BEFORE + 1) * count) // mmap.PAGESIZE) * mmap.PAGESIZE


def _is_ours(about: os.stat_result) -> bool:
    return (
        stat.S_ISREG(about.st_mode)
        and about.st_uid == user_id()
        and about.st_nlink == 0
        and about.st_size == _SPAN_BYTES
    )


def found_or_made(name: bytes, group_bytes: np.ndarray, owner: object, known_place: str | None) -> RowsFile:
    """The file of this name. If this process creates the file, other processes can find it until ``owner`` is
    deleted."""
    if known_place is not None:
        with contextlib.suppress(OSError, ValueError):
            return RowsFile.found(known_place, name, group_bytes)
    with contextlib.ExitStack() as opened:
        try:
            folder = opened.enter_context(_links())
        except OSError:
            # Other ranks cannot find the file then, so each rank creates its own.
            return RowsFile.made(name, group_bytes)
        link = folder / name.hex()
        with contextlib.suppress(OSError, ValueError):
            return RowsFile.found(str(link), name, group_bytes)
        file = RowsFile.made(name, group_bytes)
        with contextlib.suppress(OSError):
            link.unlink(missing_ok=True)
            link.symlink_to(file.place)
            weakref.finalize(owner, _unlink, link, file.place, os.getpid())
        return file


@contextlib.contextmanager
def _links() -> Iterator[Path]:
    """The folder of links, which is locked; the links of processes that have ended are deleted."""
    folder = temporary_folder() / f"penstock-rows-{user_id()}"
    deadline_s = time.monotonic() + _JOIN_PATIENCE_S
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            about = os.fstat(fd)
            if about.st_uid != user_id() or about.st_mode & 0o077:
                raise PermissionError(f"{folder} belongs to another user, or others can read it")
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for link in folder.iterdir():
                    if not _leads_somewhere(link):
                        link.unlink(missing_ok=True)
                yield folder
                return
        finally:
            os.close(fd)
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{folder} is locked")
        time.sleep(_NAP_S)


def _leads_somewhere(link: Path) -> bool:
    try:
        return _is_ours(link.stat())
    except OSError:
        return False


def _unlink(link: Path, place: str, pid: int) -> None:
    if pid != os.getpid():
        return
    with contextlib.suppress(OSError):
        if str(link.readlink()) == place:
            link.unlink()
        link.parent.rmdir()


def _lock(handle: Handle, group: int, kind: int) -> bool:
    """Lock the byte of a group for reading or writing, or unlock it; False if another thread has locked it."""
    try:
        fcntl.fcntl(handle.fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, group, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True
