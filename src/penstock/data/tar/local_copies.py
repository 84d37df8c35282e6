"""Keeps local copies of remote shards, each fetched once per machine; the oldest copies are deleted to make room.

In:  the location and version of a remote shard.
Out: its bytes, from a file of this machine.
Runs in: trainer, worker, command line; any number of processes share a folder.

A copy is ``<digest>.tar``. While a shard is being fetched, its file is ``<digest>.part``, which has its full length
from the start, so that all processes agree on how much room is taken. The process that holds the lock on
``<digest>.lock`` fetches the shard; the kernel releases the lock when that process ends. A process holds ``room.lock``
briefly, while it makes room.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from penstock.data.sources import ReadStopped, Source, open_source
from penstock.errors import ConfigError, DataError
from penstock.units import format_bytes
from penstock.workers.fork_hygiene import keep_from_children

_PIECE_BYTES = 8 << 20
_NAP_S = 0.02
_STUCK_S = 150.0
"""A process that has written nothing for this time has stopped fetching: a source does not retry a read for so long."""

_T = TypeVar("_T")


class ShardCopies:
    """A folder of copies, at most ``limit_bytes`` in total."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes

    def open(self, location: str, version: str, is_wanted: Callable[[], bool] = lambda: True) -> Source:
        """The shard as a local file, which stays readable even after its copy is deleted.

        Raises ReadStopped, between two pieces of the copy, once ``is_wanted`` returns false.
        """
        digest = hashlib.blake2b(f"{location}\n{version}".encode(errors="surrogateescape"), digest_size=16).hexdigest()
        copy = self.folder / f"{digest}.tar"
        lock_path = copy.with_suffix(".lock")

        def turn() -> contextlib.AbstractContextManager[object] | None:
            return contextlib.nullcontext() if copy.exists() else _try_lock(lock_path)

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while True:
                found = _opened(copy)
                if found is not None:
                    return found
                stuck = (
                    f"{lock_path} is held by a process that has fetched nothing for {_STUCK_S:.0f} s; end that process"
                )
                with self._wait(turn, f"{digest}.part", stuck, is_wanted):
                    # Another process may have fetched the shard during the wait.
                    if not copy.exists():
                        self._fetch(location, version, copy, is_wanted)
        except OSError as problem:
            if isinstance(problem, DataError):
                raise
            text = f"no copy of {location} can be kept in {self.folder}: {problem}"
            raise DataError(f"{text}; set XDG_CACHE_HOME to a folder with room") from problem

    def _fetch(self, location: str, version: str, copy: Path, is_wanted: Callable[[], bool]) -> None:
        remote = open_source(location)
        part = copy.with_suffix(".part")
        try:
            if remote.version != version:
                raise changed(location, version, remote.version)
            self._reserve(location, part, remote.size_bytes, is_wanted)
            with part.open("r+b") as file:
                for offset in range(0, remote.size_bytes, _PIECE_BYTES):
                    _check_wanted(location, is_wanted)
                    file.write(remote.read(offset, _PIECE_BYTES))
                length = file.tell()
                # Without fsync, a power cut after the rename could leave a file of the right length whose bytes were
                # not written.
                os.fsync(file.fileno())
            now = open_source(location).version
            if now != version:
                raise changed(location, version, now)
            if length != remote.size_bytes:
                raise DataError(f"{location} has {remote.size_bytes} bytes, but {length} were received")
            part.replace(copy)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            remote.close()

    def _reserve(self, location: str, part: Path, size_bytes: int, is_wanted: Callable[[], bool]) -> None:
        """Create ``part`` with its full length, as soon as it fits below the limit."""
        limit = format_bytes(self.limit_bytes)
        if size_bytes > self.limit_bytes:
            raise ConfigError(
                f"{location} has {format_bytes(size_bytes)}, more than copies={limit} can hold; raise copies="
            )
        # This process holds the lock, so the process that left this part has ended.
        part.unlink(missing_ok=True)

        def fits() -> bool | None:
            lock = _try_lock(self.folder / "room.lock")
            if lock is None:
                return None
            with lock:
                if self._make_room(size_bytes) + size_bytes > self.limit_bytes:
                    return None
                part.touch(0o600)
                os.truncate(part, size_bytes)
                return True

        # Shards that other processes fetch take the rest; each of these shards becomes a copy, which can be deleted.
        stuck = (
            f"other processes hold all of copies={limit} and have written nothing for {_STUCK_S:.0f} s; "
            f"there is no room for {location}"
        )
        self._wait(fits, ".part", stuck, is_wanted)

    def _make_room(self, size_bytes: int) -> int:
        """Delete the parts of processes that have ended, then the oldest copies; returns the bytes still taken."""
        for part, _ in self._files(".part"):
            lock = _try_lock(part.with_suffix(".lock"))
            if lock is not None:
                with lock:
                    part.unlink(missing_ok=True)
        taken = sum(about.st_size for _, about in self._files(".part"))
        copies = sorted(self._files(".tar"), key=lambda entry: entry[1].st_mtime_ns)
        taken += sum(about.st_size for _, about in copies)
        for copy, about in copies:
            if taken + size_bytes <= self.limit_bytes:
                break
            copy.unlink(missing_ok=True)
            taken -= about.st_size
            lock = _try_lock(copy.with_suffix(".lock"))
            if lock is not None:
                with lock:
                    copy.with_suffix(".lock").unlink(missing_ok=True)
        return taken

    def _files(self, end: str) -> list[tuple[Path, os.stat_result]]:
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(end):
                    with contextlib.suppress(FileNotFoundError):
                        found.append((Path(entry.path), entry.stat()))
        return found

    def _wait(self, ready: Callable[[], _T | None], end: str, stuck: str, is_wanted: Callable[[], bool]) -> _T:
        """Call ``ready`` until its result is not None, and return the result. Raises DataError(``stuck``) if the files
        whose names end with ``end`` do not grow for a long time during the wait."""
        written, since_s = -1, time.monotonic()
        while (found := ready()) is None:
            _check_wanted(str(self.folder), is_wanted)
            time.sleep(_NAP_S)
            now = sum(about.st_blocks for _, about in self._files(end))
            if now != written:
                written, since_s = now, time.monotonic()
            elif time.monotonic() - since_s > _STUCK_S:
                raise DataError(stuck)
        return found


def open_shard(
    location: str, version: str, copies: ShardCopies | None, is_wanted: Callable[[], bool] = lambda: True
) -> Source:
    """A shard in the version that was indexed: a local copy with ``copies``, otherwise the shard itself."""
    if copies is not None:
        return copies.open(location, version, is_wanted)
    source = open_source(location)
    if source.version != version:
        source.close()
        raise changed(location, version, source.version)
    return source


def changed(location: str, then: str, now: str) -> DataError:
    return DataError(f"{location} has changed after it was indexed (version {then}, now {now}); make the dataset again")


def _check_wanted(what: str, is_wanted: Callable[[], bool]) -> None:
    if not is_wanted():
        raise ReadStopped(what)


def _opened(copy: Path) -> Source | None:
    try:
        os.utime(copy)
        return open_source(str(copy))
    except FileNotFoundError:
        return None
    except DataError:
        # Another process deleted the copy between the two calls.
        if copy.exists():
            raise
        return None


def _try_lock(path: Path) -> io.FileIO | None:
    """The locked file, which releases the lock when it is closed; None if another process holds the lock."""
    # Remote shards need a POSIX system; local ones do not.
    import fcntl

    file = io.FileIO(path, "ab")
    # A forked child that kept the file open would hold the lock after this process has ended.
    keep_from_children(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # If the previous holder deleted the file, a lock on it excludes no other process.
        if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        file.close()
        raise
    file.close()
    return None
