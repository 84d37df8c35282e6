"""Large row groups, decoded once for all processes of this machine into files that they map.

In:  a row group, piece by piece.
Out: its rows, read in place from a file. The page cache holds what is read often; the kernel evicts it as it likes.
Runs in: trainer and worker; any number of processes share a folder.

The folder lies among the temporary files of this user, on a disk if there is one. ``<dataset>.users`` is locked for as
long as a process that made the dataset runs: the last one deletes the files; if it is killed, the next one does.
``<dataset>-<group>.rows`` is complete from the moment it has this name; ``….part`` is being written by the process that
holds a lock on it. The kernel releases every lock when its process ends.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import stat
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.data.arrow.rows import RowReader
from penstock.data.parquet.row_groups import arrow
from penstock.data.shared.file_mapping import forget_pages, map_shared
from penstock.environment import temporary_folder, user_id
from penstock.workers.fork_hygiene import keep_from_children

if TYPE_CHECKING:
    import pyarrow as pa

_MAGIC = 0x70656E73746F636B
_ALIGNED_BYTES = 64
_LEAST_PIECE_BYTES, _MOST_PIECE_BYTES = 1 << 20, 8 << 20
"""Size of the batches of a file. Larger ones are faster to read, but all of a batch is in memory while it is made."""
_MOST_OPENED = 256
"""A process keeps this many readers of pieces for each group, each a few kilobytes."""
_MOST_MAPPED = 64
_TOUCHED_BYTES = 64 << 10
"""Linux maps this much around a page that is read."""
_NAP_S, _PATIENCE_S = 0.01, 30.0
"""How long a process waits while another one decodes a group and writes nothing, before it reads the Parquet file."""
_JOIN_PATIENCE_S = 1.0
_LEAST_FREE = 0.5
"""Files take at most this part of the room on the disk."""


class DecodedGroups:
    """The decoded row groups of one dataset, at most ``limit_bytes`` of them."""

    def __init__(self, name: str, limit_bytes: int, view_bytes: int) -> None:
        self._name = name
        self._limit_bytes = limit_bytes
        self._view_bytes = view_bytes
        self._folder: Path | None = None
        self._is_own = True
        self._forget()

    def _forget(self) -> None:
        # No lock, because a fork could inherit it locked: two threads may map the same group.
        self._mapped: OrderedDict[int, MappedRows] = OrderedDict()
        self._touched_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        # The trainer deletes the files, so a worker that it starts need not keep them.
        is_own = get_spawning_popen() is None
        return self.__dict__ | {
            "_mapped": OrderedDict(),
            "_folder": None if is_own else self._folder,
            "_is_own": is_own,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def join(self) -> bool:
        """Find the folder. False where no file can be kept: then the Parquet file is read each time."""
        if self._folder is None and self._is_own:
            self._is_own = False
            with contextlib.suppress(OSError, ImportError):
                self._folder = _join(self, self._name)
        return self._folder is not None

    def read(self, group: int, places: np.ndarray, columns: list[list[Any]], *, keep: bool) -> bool:
        """Append the values at ``places`` to ``columns``; False if the group is not there."""
        rows = self._mapped.get(group) or self._map(group, keep=keep)
        if rows is None:
            return False
        rows.read(places, columns)
        # Pages that a process has touched count as its memory until it forgets them.
        self._touched_bytes += len(places) * (len(columns) * _TOUCHED_BYTES + rows.row_bytes)
        if self._touched_bytes > self._view_bytes:
            self._touched_bytes = 0
            for mapped in list(self._mapped.values()):
                mapped.forget_pages()
        return True

    def decode(self, group: int, pieces: Iterable[pa.RecordBatch]) -> None:
        """Write a group, unless another process has written it meanwhile. Raises OSError if there is no room."""
        assert self._folder is not None
        path = self._path(group)
        with self._turn(path) as part:
            if part is None:
                return
            ends, firsts = [0], [0]
            for piece in _joined(pieces, min(max(self._view_bytes // 4, _LEAST_PIECE_BYTES), _MOST_PIECE_BYTES)):
                stream = _stream_of(piece)
                padding = bytes(-len(stream) % _ALIGNED_BYTES)
                ends.append(ends[-1] + len(stream) + len(padding))
                self._make_room(ends[-1], part)
                _write(part, stream)
                _write(part, padding)
                firsts.append(firsts[-1] + piece.num_rows)
            numbers = np.array([*ends, *firsts, len(ends), _MAGIC], np.int64)
            _write(part, numbers.tobytes())
            Path(part.name).replace(path)

    # -- inside -------------------------------------------------------------------------------

    def _path(self, group: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{self._name}-{group}.rows"

    def _map(self, group: int, *, keep: bool) -> MappedRows | None:
        for old in [old for old in self._mapped if not self._path(old).exists()]:
            # Evicted: its room is free once nobody maps it.
            self._mapped.pop(old, None)
        path = self._path(group)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            with contextlib.suppress(OSError):
                os.utime(path)
            view = map_shared(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
        if view is None:
            return None
        rows = MappedRows(view)
        if keep:
            self._mapped[group] = rows
            while len(self._mapped) > _MOST_MAPPED:
                with contextlib.suppress(KeyError):
                    self._mapped.popitem(last=False)
        return rows

    @contextlib.contextmanager
    def _turn(self, path: Path) -> Iterator[io.FileIO | None]:
        """The locked part to write; None once another process has written the file."""
        written, since_s = -1, time.monotonic()
        part_path = path.with_suffix(".part")
        while (part := _try_lock(part_path)) is None:
            time.sleep(_NAP_S)
            with contextlib.suppress(FileNotFoundError):
                now = part_path.stat().st_size
                if now != written:
                    written, since_s = now, time.monotonic()
            if path.exists():
                break
            if time.monotonic() - since_s > _PATIENCE_S:
                raise TimeoutError(
                    f"{part_path} is locked by a process that has written nothing for {_PATIENCE_S:.0f} s"
                )
        if part is None:
            yield None
            return
        try:
            if path.exists():
                yield None
            else:
                os.ftruncate(part.fileno(), 0)
                yield part
        finally:
            # After the rename, the name may belong to another process that decodes the group again.
            with contextlib.suppress(FileNotFoundError):
                if part_path.stat().st_ino == os.fstat(part.fileno()).st_ino:
                    part_path.unlink()
            part.close()

    def _make_room(self, need_bytes: int, own: io.FileIO) -> None:
        """Delete the groups read least recently until the one being written fits."""
        assert self._folder is not None
        files = []
        for path in self._folder.glob(f"{self._name}-*"):
            with contextlib.suppress(FileNotFoundError):
                about = path.stat()
                files.append((about.st_mtime_ns, about.st_size, path))
        taken = sum(size for _, size, path in files if str(path) != own.name)
        free = shutil.disk_usage(self._folder).free
        limit = min(self._limit_bytes, int((free + taken) * _LEAST_FREE))
        for _, size, path in sorted(files):
            if taken + need_bytes <= limit:
                return
            if path.suffix == ".rows":
                path.unlink(missing_ok=True)
                taken -= size
        if taken + need_bytes > limit:
            raise OSError(f"{need_bytes} bytes do not fit into {limit}")


class MappedRows:
    """One decoded group: record batches one after another, each an Arrow stream; then a table of their places."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        count, magic = np.frombuffer(view, np.int64)[-2:].tolist()
        if magic != _MAGIC:
            raise ValueError("not a file of decoded rows")
        numbers = np.frombuffer(view, np.int64)[-2 - 2 * count : -2]
        self._ends, self._firsts = numbers[:count].copy(), numbers[count:].copy()
        self.row_bytes = int(self._ends[-1]) // max(1, int(self._firsts[-1]))
        self._opened: dict[int, RowReader] = {}

    def read(self, places: np.ndarray, columns: list[list[Any]]) -> None:
        pieces = self._firsts.searchsorted(places, "right") - 1
        changes = np.flatnonzero(pieces[1:] != pieces[:-1]) + 1
        for first, end in pairwise([0, *changes.tolist(), len(places)]):
            piece = int(pieces[first])
            self._reader(piece).read(places[first:end] - self._firsts[piece], columns)

    def forget_pages(self) -> None:
        forget_pages(self._view)

    def _reader(self, piece: int) -> RowReader:
        reader = self._opened.get(piece)
        if reader is None:
            pa = arrow()
            first, end = (int(place) for place in self._ends[piece : piece + 2])
            stream = pa.ipc.open_stream(pa.py_buffer(self._view[first:end]))
            reader = RowReader(stream.read_next_batch())
            if len(self._opened) >= _MOST_OPENED:
                self._opened.clear()
            self._opened[piece] = reader
        return reader


def _join(owner: DecodedGroups, name: str) -> Path:
    """Delete what killed programs left, and hold the dataset's files until ``owner`` is gone or this process exits."""
    folder = temporary_folder() / f"penstock-rows-{user_id()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != user_id() or about.st_mode & 0o077:
        raise PermissionError(f"{folder} belongs to another user, or others can read it")
    for users in folder.glob("*.users"):
        _leave(folder, users.stem, None)
    path = folder / f"{name}.users"
    deadline_s = time.monotonic() + _JOIN_PATIENCE_S
    while (file := _try_lock(path, shared=True)) is None:
        # Another process sweeps the folder at this moment.
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path} is locked")
        time.sleep(_NAP_S)
    weakref.finalize(owner, _leave, folder, name, file, os.getpid())
    return folder


def _leave(folder: Path, name: str, file: io.FileIO | None, pid: int | None = None) -> None:
    """Delete the files of a dataset that no process uses any more."""
    if pid is not None and pid != os.getpid():
        return
    with contextlib.suppress(OSError):
        if file is not None:
            file.close()
        users = folder / f"{name}.users"
        lock = _try_lock(users) if users.exists() else None
        if lock is not None:
            with lock:
                for path in folder.glob(f"{name}-*"):
                    path.unlink(missing_ok=True)
                users.unlink(missing_ok=True)
        if file is not None:
            folder.rmdir()


def _try_lock(path: Path, *, shared: bool = False) -> io.FileIO | None:
    """The locked file; None if another process holds the lock. Raises OSError where files cannot be locked."""
    import fcntl

    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    file = _Named(fd, path)
    # A forked child that kept the file open would hold the lock after this process has ended.
    keep_from_children(file)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        # A lock on a file that the previous holder has deleted or renamed excludes nobody.
        if os.fstat(fd).st_ino == path.stat().st_ino:
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        file.close()
        raise
    file.close()
    return None


class _Named(io.FileIO):
    def __init__(self, fd: int, path: Path) -> None:
        super().__init__(fd, "r+b")
        self.name = str(path)


def _write(file: io.FileIO, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


def _joined(pieces: Iterable[pa.RecordBatch], most_bytes: int) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer batches, which are faster to read."""
    waiting: list[pa.RecordBatch] = []
    for piece in pieces:
        waiting.append(piece)
        if sum(each.nbytes for each in waiting) >= most_bytes:
            yield joined(waiting)
            waiting = []
    if waiting:
        yield joined(waiting)


def joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch with the rows of several; texts that several dictionaries have are in one of them."""
    if len(batches) == 1:
        return batches[0]
    (batch,) = arrow().Table.from_batches(batches).unify_dictionaries().combine_chunks().to_batches()
    return batch


def _stream_of(batch: pa.RecordBatch) -> memoryview:
    pa = arrow()
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(out.getvalue())
