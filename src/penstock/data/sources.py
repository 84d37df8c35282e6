"""Where the bytes of a dataset are: files of this machine, or of any store that fsspec reaches.

In:  a path, a glob, a folder, a URL, or a list of those.
Out: the files they name, and each one's bytes by place.
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
"""A store that is restarted, or a network that comes back, is waited for so long."""
_FINAL = (
    FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError,
    TypeError, ValueError, AttributeError, KeyError, ImportError,
)  # fmt: skip
"""What trying again does not mend."""
_FINAL_NAMES = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError")
"""The same, of libraries that are not imported here."""

_T = TypeVar("_T")


class ReadStopped(Exception):
    """The one who wanted it does not want it any more."""


class Source(Protocol):
    """One file's bytes, by place; any thread of the process that opened it."""

    location: str
    size_bytes: int
    version: str
    """Another text when the file is another one."""

    def read(self, offset: int, length: int) -> bytes:
        """Shorter only at the end of the file."""
        ...

    def close(self) -> None: ...


def is_remote(location: str) -> bool:
    return "://" in location and not location.startswith("file://")


def open_source(location: str) -> Source:
    return _RemoteFile(location) if is_remote(location) else _LocalFile(location)


def locate(path: str | os.PathLike[str] | Sequence[Any], *, suffixes: tuple[str, ...]) -> list[str]:
    """The files ``path`` names, in order; of a folder, those that end so, at any depth."""
    if isinstance(path, (str, os.PathLike)):
        found = list(_files_of(os.fspath(path), suffixes))
    elif isinstance(path, Sequence) and path:
        found = [location for one in path for location in locate(one, suffixes=suffixes)]
    else:
        raise ConfigError(f"{path!r} names no file: give a path, a glob, a folder, a URL or a list of those")
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
        # pathlib's own takes no absolute pattern.
        yield from sorted(name for name in glob.glob(str(place), recursive=True) if Path(name).is_file())  # noqa: PTH207
    else:
        raise DataError(f"there is no {path}")


def _is_data(path: PurePath, suffixes: tuple[str, ...]) -> bool:
    # Files and folders that are hidden or begin with _ are how writers mark what is unfinished or not data.
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
        raise ConfigError(f'{url} is read through fsspec: pip install "penstock[remote]"') from None
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as missing:
        raise ConfigError(f"{url}: {missing}") from None
    except ValueError as wrong:
        raise ConfigError(f"{url}: {wrong}") from None


def _again_and_again(what: str, attempt: Callable[[], _T]) -> _T:
    """What ``attempt`` gives in the end: networks and stores come back."""
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
                raise DataError(f"{what} failed for {tried_s:.0f} s, last with {problem!r}") from problem
            _log.warning("%s failed with %r; trying again in %.1f s", what, problem, wait_s)
        # Workers that all failed at once do not all come back at once.
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
                # One call gives at most 2 GiB; of a file that was cut since, less for good.
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

    # At the interpreter's end modules may be gone already, what a function has as its defaults is not.
    __del__ = close


class _RemoteFile:
    def __init__(self, location: str) -> None:
        self.location = location
        self._filesystem, self._path = _filesystem_of(location)
        about = self._again("looking it up", self._look_up)
        size_bytes = about.get("size")
        if about.get("type") == "directory" or size_bytes is None:
            raise DataError(f"{location} is no file of known size")
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
            raise OSError(f"{len(data)} bytes came instead of {length}")
        return data

    def _look_up(self) -> dict[str, Any]:
        self._filesystem.invalidate_cache()
        return self._filesystem.info(self._path)

    def _again(self, what: str, attempt: Callable[[], _T]) -> _T:
        return _again_and_again(f"{self.location}: {what}", attempt)
