"""A shard's index on disk: beside the shard, or where this user may write.

In:  a shard's location and version.
Out: its index, read or built anew and written for the next time.
Runs in: trainer, command line.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from penstock.data.sources import Source, is_remote
from penstock.data.tar_index import ShardIndex, from_bytes, index_of, to_bytes
from penstock.data.tar_members import walk
from penstock.data.user_cache import user_cache_folder

_SUFFIX = ".penstock-index"


class Stopped(Exception):
    """The one who wanted the index does not want it any more."""


def kept_index(location: str, version: str, size_bytes: int, index_dir: Path | None) -> ShardIndex | None:
    """The index as somebody wrote it; None where there is none to believe."""
    for path in _places(location, index_dir):
        with contextlib.suppress(OSError):
            index = from_bytes(path.read_bytes(), version=version, size_bytes=size_bytes)
            if index is not None:
                return index
    return None


def build_index(source: Source, version: str, is_wanted: Callable[[], bool] = lambda: True) -> ShardIndex:
    """Walk the shard. Raises Stopped as soon as it is not wanted any more."""

    def read(offset: int, length: int) -> bytes:
        if not is_wanted():
            raise Stopped
        return source.read(offset, length)

    return index_of(walk(read, source.size_bytes), version=version, size_bytes=source.size_bytes)


def keep_index(location: str, index: ShardIndex, index_dir: Path | None) -> None:
    """Write it for the next time, where that is possible."""
    data = to_bytes(index)
    for path in _places(location, index_dir):
        with contextlib.suppress(OSError):
            _write(path, data)
            return


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
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    written = Path(name)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            # Others on a shared file system may read the shards, and so this.
            os.fchmod(file.fileno(), 0o666 & ~_umask())
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


def _umask() -> int:
    """The umask, which can only be read by setting it, from where the kernel says it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text()
        return int(status.partition("Umask:")[2].split()[0], 8)
    return 0o077
