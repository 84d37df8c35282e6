"""Keeps the index of a shard on disk: beside the shard, or in a folder that this user may write to.

In:  the location and version of a shard.
Out: its index, read from disk, or built and written to disk for the next time.
Runs in: trainer, command line.

``index.from_bytes`` decides whether a stored index can be trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from penstock.data.sources import ReadStopped, Source, is_remote
from penstock.data.tar.index import ShardIndex, from_bytes, index_of, to_bytes
from penstock.data.tar.members import walk
from penstock.environment import user_cache_folder

_SUFFIX = ".penstock-index"
_LEAST_LIMIT_BYTES = 1 << 20
"""Files up to this size are read in any case; a larger index is always smaller than its shard."""


def read_index(location: str, version: str, size_bytes: int, index_dir: Path | None) -> ShardIndex | None:
    """The stored index; None if there is none, or if it is damaged or belongs to another version of the shard."""
    for path in _places(location, index_dir):
        with contextlib.suppress(OSError):
            data = _content(path, max(size_bytes, _LEAST_LIMIT_BYTES))
            index = None if data is None else from_bytes(data, version=version, size_bytes=size_bytes)
            if index is not None:
                return index
    return None


def build_index(source: Source, version: str, is_wanted: Callable[[], bool] = lambda: True) -> ShardIndex:
    """Walk the shard. Raises ReadStopped as soon as ``is_wanted`` returns false."""

    def read(offset: int, length: int) -> bytes:
        if not is_wanted():
            raise ReadStopped
        return source.read(offset, length)

    return index_of(walk(read, source.size_bytes), version=version, size_bytes=source.size_bytes)


def write_index(location: str, index: ShardIndex, index_dir: Path | None) -> None:
    """Store the index in the first place that can be written to, if there is such a place."""
    data = to_bytes(index)
    for path in _places(location, index_dir):
        with contextlib.suppress(OSError):
            _write(path, data)
            return


def _places(location: str, index_dir: Path | None) -> list[Path]:
    """Where the index of a shard may be, best place first."""
    digest = hashlib.blake2b(os.fsencode(location), digest_size=16).hexdigest()
    # File systems limit a name to 255 bytes, not characters.
    end = os.fsencode(location.rstrip("/").rpartition("/")[2])[-80:].decode("utf-8", "ignore")
    name = f"{end}-{digest}{_SUFFIX}"
    if index_dir is not None:
        return [index_dir / name]
    in_cache = user_cache_folder("tar-indexes") / name
    return [in_cache] if is_remote(location) else [Path(location.removeprefix("file://") + _SUFFIX), in_cache]


def _content(path: Path, limit_bytes: int) -> bytes | None:
    """The bytes of a file; None if it is no regular file, such as a pipe or a device, or larger than an index can
    be."""
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_size > limit_bytes:
            return None
        return file.read(about.st_size)


def _write(path: Path, data: bytes) -> None:
    """Write the whole file or nothing, even if several processes write it at once.

    The partial file has a fixed name and is locked by its writer, so a killed writer leaves at most one partial file,
    and the next build of the same index writes over it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    # If others can write to the folder, the name may be a link, a pipe or a second name of one of this user's files.
    fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    with os.fdopen(fd, "r+b") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1:
            return
        if not _lock(fd) or not part.exists() or part.stat().st_ino != os.fstat(fd).st_ino:
            return  # another process writes the same index, or has just written it
        try:
            file.truncate(0)
            file.write(data)
            file.flush()
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _lock(fd: int) -> bool:
    """False if another process holds the lock. True on file systems without locks, where ``from_bytes`` detects
    damage."""
    try:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        pass
    return True
