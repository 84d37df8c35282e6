"""A shard's index on disk: beside the shard, or where this user may write.

In:  a shard's location and version.
Out: its index, read or built anew and written for the next time.
Runs in: trainer, command line.

While it is written it is ``.penstock-index-*.part`` in the same folder, locked by its writer. One that is not locked
was left by a writer that was killed, and goes at the next build.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from penstock.data.sources import ReadStopped, Source, is_remote
from penstock.data.tar.index import ShardIndex, from_bytes, index_of, to_bytes
from penstock.data.tar.members import walk
from penstock.environment import user_cache_folder

_SUFFIX = ".penstock-index"
_PART_PREFIX, _PART_SUFFIX = ".penstock-index-", ".part"
_OLD_S = 24 * 3600.0
"""Where files cannot be locked, one that nobody wrote to for so long has no writer."""


def kept_index(location: str, version: str, size_bytes: int, index_dir: Path | None) -> ShardIndex | None:
    """The index as somebody wrote it; None where there is none to believe."""
    for path in _places(location, index_dir):
        with contextlib.suppress(OSError):
            index = from_bytes(path.read_bytes(), version=version, size_bytes=size_bytes)
            if index is not None:
                return index
    return None


def build_index(source: Source, version: str, is_wanted: Callable[[], bool] = lambda: True) -> ShardIndex:
    """Walk the shard. Raises ReadStopped as soon as it is not wanted any more."""

    def read(offset: int, length: int) -> bytes:
        if not is_wanted():
            raise ReadStopped
        return source.read(offset, length)

    return index_of(walk(read, source.size_bytes), version=version, size_bytes=source.size_bytes)


def keep_index(location: str, index: ShardIndex, index_dir: Path | None) -> Path | None:
    """Write it for the next time, where that is possible; gives the folder it is in."""
    data = to_bytes(index)
    for path in _places(location, index_dir):
        with contextlib.suppress(OSError):
            _write(path, data)
            return path.parent
    return None


def clear_parts(folder: Path) -> None:
    """Delete what writers that were killed left in a folder."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(_PART_PREFIX) and entry.name.endswith(_PART_SUFFIX):
                with contextlib.suppress(OSError):
                    if _is_left(Path(entry.path), time.time() - entry.stat().st_mtime):
                        Path(entry.path).unlink(missing_ok=True)


def _places(location: str, index_dir: Path | None) -> list[Path]:
    """Where the index of a shard may be, the best first."""
    digest = hashlib.blake2b(os.fsencode(location), digest_size=16).hexdigest()
    # File systems count bytes, and take no more than 255.
    end = os.fsencode(location.rstrip("/").rpartition("/")[2])[-80:].decode("utf-8", "ignore")
    name = f"{end}-{digest}{_SUFFIX}"
    if index_dir is not None:
        return [index_dir / name]
    elsewhere = user_cache_folder("tar-indexes") / name
    return [elsewhere] if is_remote(location) else [Path(location.removeprefix("file://") + _SUFFIX), elsewhere]


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all, however many write it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, written = _locked_part(path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            # Others on a shared file system may read the shards, and so this.
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            file.flush()
            # Still locked: a file that is open no more is a left one.
            written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


def _locked_part(folder: Path) -> tuple[int, Path]:
    while True:
        fd, name = tempfile.mkstemp(dir=folder, prefix=_PART_PREFIX, suffix=_PART_SUFFIX)
        _try_lock(fd)
        # Before it was locked, somebody who clears the folder may have taken it for a left one.
        if os.fstat(fd).st_nlink:
            return fd, Path(name)
        os.close(fd)


def _is_left(part: Path, age_s: float) -> bool:
    if age_s > _OLD_S:
        return True
    fd = os.open(part, os.O_RDWR | os.O_CLOEXEC)
    try:
        return _try_lock(fd) is True
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool | None:
    """Whether the file is ours until it is closed; None where files cannot be locked."""
    try:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


def _umask() -> int:
    """The umask, which can only be read by setting it, from where the kernel says it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text()
        return int(status.partition("Umask:")[2].split()[0], 8)
    return 0o077
