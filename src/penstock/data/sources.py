"""Reads the files of a dataset, which lie on this machine or in any store that fsspec supports.

In:  a path, a glob, a folder, a URL, or a list of these.
Out: the files that the path names, and the bytes of each file by offset.
Runs in: trainer and worker. A source belongs to the process that opened it.
"""

from __future__ import annotations

import glob
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Protocol, TypeVar

from penstock.errors import ConfigError, DataError

_log = logging.getLogger("penstock.data")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0
_GIVE_UP_AFTER_S = 120.0
"""Reads are retried for this long, so that a store has time to restart, and a network to come back."""
_FINAL = (
    FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError,
    TypeError, ValueError, AttributeError, KeyError, ImportError,
)  # fmt: skip
"""Errors that a retry cannot fix."""
_FINAL_NAMES = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError")
"""Names of more errors that a retry cannot fix; their libraries are not imported here."""

_T = TypeVar("_T")


class ReadStopped(Exception):
    """The caller no longer needs the read."""


class Source(Protocol):
    """The bytes of one file, by offset. Any thread of the process that opened the source may read from it."""

    location: str
    size_bytes: int
    version: str
    """A text that changes when the file changes."""

    def read(self, offset: int, length: int) -> bytes:
        """The bytes from ``offset`` on; fewer than ``length`` only at the end of the file."""
        ...

    def close(self) -> None: ...


def is_remote(location: str) -> bool:
    return "://" in location and not location.startswith("file://")


def open_source(location: str) -> Source:
    return _RemoteFile(location) if is_remote(location) else _LocalFile(location)


def locate(path: str | os.PathLike[str] | Sequence[Any], *, suffixes: tuple[str, ...]) -> list[str]:
    """The files that ``path`` names, in order. A folder stands for its files with one of the suffixes, at any depth."""
    if isinstance(path, (str, os.PathLike)):
        found = list(_files_of(os.fspath(path), suffixes))
    elif isinstance(path, Sequence) and path:
        found = [location for one in path for location in locate(one, suffixes=suffixes)]
    else:
        raise ConfigError(f"{path!r} names no file: give a path, a glob, a folder, a URL or a list of these")
    if not found:
        raise DataError(f"{path} names no {' or '.join(suffixes)} file")
    return found


def _files_of(path: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    if is_remote(path):
        yield from _remote_files_of(path, suffixes)
        return
    place = Path(path.removeprefix("file://")).expanduser()
    if place.is_dir():
        yield from (
            str(file)
            for file in sorted(place.rglob("*"))
            if _is_data(file.relative_to(place), suffixes) and file.is_file()
        )
    elif place.exists():
        yield str(place)
    elif glob.has_magic(path):
        # Path.glob() refuses absolute patterns.
        yield from sorted(name for name in glob.glob(str(place), recursive=True) if Path(name).is_file())  # noqa: PTH207
    else:
        raise DataError(f"there is no {path}")


def _is_data(path: PurePath, suffixes: tuple[str, ...]) -> bool:
    # Writers hide a file or begin its name with _ if it is unfinished or not data.
    return path.name.lower().endswith(suffixes) and not any(part.startswith((".", "_")) for part in path.parts)


def _remote_files_of(url: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    filesystem, path = _filesystem_of(url)

    def names() -> list[str]:
        filesystem.invalidate_cache()
        if glob.has_magic(path):
            return sorted(filesystem.glob(path))
        if filesystem.isfile(path):
            return [path]
        below = len(path.rstrip("/")) + 1
        return sorted(name for name in filesystem.find(path) if _is_data(PurePosixPath(name[below:]), suffixes))

    for name in _again_and_again(f"listing {url}", names):
        yield filesystem.unstrip_protocol(name)


def _filesystem_of(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise ConfigError(f'to read {url}, install fsspec: pip install "penstock[remote]"') from None
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as missing:
        raise ConfigError(f"{url}: {missing}") from None
    except ValueError as wrong:
        raise ConfigError(f"{url}: {wrong}") from None


def _again_and_again(what: str, attempt: Callable[[], _T]) -> _T:
    """Retry ``attempt`` until it succeeds, for two minutes at most, because networks and stores may come back."""
    began_s = time.monotonic()
    wait_s = _FIRST_WAIT_S
    while True:
        try:
            return attempt()
        except _FINAL as final:
            raise DataError(f"{what}: {final!r}") from final
        except Exception as problem:
            if type(problem).__name__ in _FINAL_NAMES:
                raise DataError(f"{what}: {problem!r}") from problem
            tried_s = time.monotonic() - began_s
            if tried_s + wait_s > _GIVE_UP_AFTER_S:
                raise DataError(f"{what} failed for {tried_s:.0f} s; the last error was {problem!r}") from problem
            _log.warning("%s failed with %r; trying again in %.1f s", what, problem, wait_s)
        # The wait is random, so that workers that failed at the same time do not all retry at the same time.
        time.sleep(wait_s * random.SystemRandom().uniform(0.75, 1.25))
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


_READING = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_position = threading.Lock()


def _read_at(fd: int, length: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(fd, length, offset)
    with _position:  # Windows has one position per file, and no fork that could inherit the lock
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, length)


class _LocalFile:
    def __init__(self, location: str) -> None:
        self.location = location
        try:
            self._fd = os.open(location.removeprefix("file://"), _READING)
        except OSError as problem:
            raise DataError(f"{location} cannot be opened: {problem.strerror}") from problem
        about = os.fstat(self._fd)
        self.size_bytes = about.st_size
        self.version = f"{about.st_size}-{about.st_mtime_ns}-{about.st_ino}"

    def read(self, offset: int, length: int) -> bytes:
        length = min(length, self.size_bytes - offset)
        if length <= 0:
            return b""
        try:
            data = _read_at(self._fd, length, offset)
            while len(data) < length:
                # One call returns at most 2 GiB. If the file was cut short meanwhile, it returns nothing.
                more = _read_at(self._fd, length - len(data), offset + len(data))
                if not more:
                    break
                data += more
        except OSError as problem:
            raise DataError(f"{self.location} cannot be read at byte {offset}: {problem.strerror}") from problem
        return data

    def close(self, close: Any = os.close) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            close(fd)

    # When the interpreter exits, modules may be gone, but default arguments of functions are not.
    __del__ = close


class _RemoteFile:
    def __init__(self, location: str) -> None:
        self.location = location
        self._filesystem, self._path = _filesystem_of(location)
        about = self._again("looking it up", self._look_up)
        size_bytes = about.get("size")
        if about.get("type") == "directory" or size_bytes is None:
            raise DataError(f"{location} is not a file whose size is known")
        self.size_bytes = int(size_bytes)
        marks = (about.get(name) for name in ("ETag", "etag", "md5Hash", "mtime", "LastModified"))
        self.version = f"{self.size_bytes}-{next(filter(None, marks), '')}"

    def read(self, offset: int, length: int) -> bytes:
        length = min(length, self.size_bytes - offset)
        if length <= 0:
            return b""
        return self._again(f"reading {length} bytes at {offset}", lambda: self._read(offset, length))

    def close(self) -> None:
        pass

    def _read(self, offset: int, length: int) -> bytes:
        data = self._filesystem.cat_file(self._path, start=offset, end=offset + length)
        if len(data) != length:
            raise OSError(f"the store returned {len(data)} bytes instead of {length}")
        return data

    def _look_up(self) -> dict[str, Any]:
        self._filesystem.invalidate_cache()
        return self._filesystem.info(self._path)

    def _again(self, what: str, attempt: Callable[[], _T]) -> _T:
        return _again_and_again(f"{self.location}: {what}", attempt)
