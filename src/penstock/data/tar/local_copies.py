"""Local copies of shards that lie elsewhere: fetched once per machine, the least recently used deleted for new ones.

In:  a remote shard's location and version.
Out: its bytes, from a file of this machine.
Runs in: trainer, worker, command line; any number of processes share a folder.

A copy is ``<digest>.tar``. While it is fetched it is ``<digest>.part-*``, of its full length from the start, so that
all who look agree on how much is taken; who holds the lock on ``<digest>.lock`` fetches it, and the lock ends with its
holder. ``room.lock`` is held, briefly, while room is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.data.sources import ReadStopped, Source, open_source
from penstock.errors import ConfigError, DataError
from penstock.units import format_bytes

_PIECE_BYTES = 8 << 20
_NAP_S = 0.02
_STUCK_S = 150.0
"""Longer than a source tries again: who has written nothing for so long is not fetching."""

_held: set[int] = set()


def _let_go() -> None:
    """In a forked child: a copied descriptor would keep the parent's lock after its death."""
    for fd in _held:
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


class ShardCopies:
    """A folder of copies, at most ``limit_bytes`` in all."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes

    def open(self, location: str, version: str, is_wanted: Callable[[], bool] = lambda: True) -> Source:
        """The shard, as a local file that stays readable even when its copy is deleted. Raises ReadStopped between two
        pieces of the copy once it is not wanted any more."""
        digest = hashlib.blake2b(f"{location}\n{version}".encode(errors="surrogateescape"), digest_size=16).hexdigest()
        copy = self.folder / f"{digest}.tar"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while True:
                found = _opened(copy)
                if found is not None:
                    return found
                with self._turn(digest, is_wanted) as is_ours:
                    # Somebody may have fetched it while we waited.
                    if is_ours and not copy.exists():
                        self._fetch(location, version, digest, copy, is_wanted)
        except OSError as problem:
            if isinstance(problem, DataError):
                raise
            text = f"no copy of {location} can be kept in {self.folder}: {problem}"
            raise DataError(f"{text}; set XDG_CACHE_HOME to a folder with room") from problem

    def _fetch(self, location: str, version: str, digest: str, copy: Path, is_wanted: Callable[[], bool]) -> None:
        remote = open_source(location)
        try:
            if remote.version != version:
                raise changed(location, version, remote.version)
            part = self._reserve(location, digest, remote.size_bytes, is_wanted)
            try:
                with part.open("r+b") as file:
                    for offset in range(0, remote.size_bytes, _PIECE_BYTES):
                        _check_wanted(location, is_wanted)
                        file.write(remote.read(offset, _PIECE_BYTES))
                    length = file.tell()
                    # After a power cut, a file renamed before its bytes were safe has its length and no bytes.
                    os.fsync(file.fileno())
                now = open_source(location).version
                if now != version:
                    raise changed(location, version, now)
                if length != remote.size_bytes:
                    raise DataError(f"{location} has {remote.size_bytes} bytes, {length} came")
                part.replace(copy)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
        finally:
            remote.close()

    def _reserve(self, location: str, digest: str, size_bytes: int, is_wanted: Callable[[], bool]) -> Path:
        """A file of that length, once it fits under the limit."""
        if size_bytes > self.limit_bytes:
            limit = format_bytes(self.limit_bytes)
            raise ConfigError(
                f"{location} has {format_bytes(size_bytes)}, copies={limit} holds no such shard; raise copies="
            )
        for part, _ in self._files(f"{digest}.part-"):
            # Ours is the turn: who began these is dead.
            part.unlink(missing_ok=True)
        seen, since_s = 0, time.monotonic()
        while True:
            with _locked(self.folder / "room.lock"):
                taken = self._make_room(size_bytes)
                if taken + size_bytes <= self.limit_bytes:
                    fd, name = tempfile.mkstemp(dir=self.folder, prefix=f"{digest}.part-")
                    os.truncate(fd, size_bytes)
                    os.close(fd)
                    return Path(name)
            # What is left is being fetched by others; each of them will be a copy, which can be deleted.
            written = sum(about.st_blocks for _, about in self._files(".part-"))
            if written != seen:
                seen, since_s = written, time.monotonic()
            elif time.monotonic() - since_s > _STUCK_S:
                text = f"{format_bytes(taken)} of copies={format_bytes(self.limit_bytes)} are being fetched by others"
                raise DataError(f"{text}, who wrote nothing for {_STUCK_S:.0f} s; no room for {location}")
            _check_wanted(location, is_wanted)
            time.sleep(_NAP_S)

    def _make_room(self, size_bytes: int) -> int:
        """Delete what nobody fetches any more, then the oldest copies; gives the bytes that are left."""
        for part, _ in self._files(".part-"):
            lock = _try_lock(self.folder / f"{part.name.partition('.')[0]}.lock")
            if lock is not None:
                part.unlink(missing_ok=True)
                _close(lock)
        taken = sum(about.st_size for _, about in self._files(".part-"))
        copies = sorted(self._files(".tar"), key=lambda entry: entry[1].st_mtime_ns)
        taken += sum(about.st_size for _, about in copies)
        for copy, about in copies:
            if taken + size_bytes <= self.limit_bytes:
                break
            copy.unlink(missing_ok=True)
            taken -= about.st_size
            lock = _try_lock(copy.with_suffix(".lock"))
            if lock is not None:
                copy.with_suffix(".lock").unlink(missing_ok=True)
                _close(lock)
        return taken

    def _files(self, mark: str) -> list[tuple[Path, os.stat_result]]:
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if mark in entry.name:
                    with contextlib.suppress(FileNotFoundError):
                        found.append((Path(entry.path), entry.stat()))
        return found

    @contextlib.contextmanager
    def _turn(self, digest: str, is_wanted: Callable[[], bool]) -> Iterator[bool]:
        """Wait until nobody fetches it. False: somebody did, and it may be there now."""
        path = self.folder / f"{digest}.lock"
        lock = _try_lock(path)
        if lock is None:
            seen, since_s = -1, time.monotonic()
            while lock is None:
                _check_wanted(str(path), is_wanted)
                time.sleep(_NAP_S)
                if (self.folder / f"{digest}.tar").exists():
                    break
                written = sum(about.st_blocks for part, about in self._files(".part-") if part.name.startswith(digest))
                if written != seen:
                    seen, since_s = written, time.monotonic()
                elif time.monotonic() - since_s > 2 * _STUCK_S:
                    raise DataError(
                        f"{path} is held by a process that fetched nothing for {2 * _STUCK_S:.0f} s; end it"
                    )
                lock = _try_lock(path)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                _close(lock)


def open_shard(
    location: str, version: str, copies: ShardCopies | None, is_wanted: Callable[[], bool] = lambda: True
) -> Source:
    """A shard as it was indexed; with ``copies``, through a local copy."""
    if copies is not None:
        return copies.open(location, version, is_wanted)
    source = open_source(location)
    if source.version != version:
        source.close()
        raise changed(location, version, source.version)
    return source


def changed(location: str, then: str, now: str) -> DataError:
    return DataError(f"{location} was changed after it was indexed (version {then}, now {now}); make the dataset anew")


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
        # Deleted between the two.
        if copy.exists():
            raise
        return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    deadline_s = time.monotonic() + _STUCK_S
    lock = _try_lock(path)
    while lock is None:
        if time.monotonic() > deadline_s:
            raise DataError(f"{path} was held by others for {_STUCK_S:.0f} s; end the process that does not let go")
        time.sleep(_NAP_S)
        lock = _try_lock(path)
    try:
        yield
    finally:
        _close(lock)


def _try_lock(path: Path) -> int | None:
    # Remote shards need a POSIX system; local ones do not.
    import fcntl

    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _held.add(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Who deleted the file held it: a lock on what has no name any more keeps nobody out.
        if os.fstat(fd).st_ino == path.stat().st_ino:
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        _close(fd)
        raise
    _close(fd)
    return None


def _close(fd: int) -> None:
    _held.discard(fd)
    os.close(fd)
