"""Names of caches on this node: who has which one open, and how another process of the user joins.

In:  a name.
Out: the cache's shared memory, made or joined; caches that live and caches whose processes are all dead.
Runs in: trainer, worker, command line.

A cache's memory has no name of its own. Whoever has it open is listed in a file only the user can read, and whoever
comes next opens the memory through the kernel's own list of that process's descriptors. Memory goes with the last
process; a list of dead ones is removed by whoever finds it. The locks are in a file beside the list: a process that
closes it lets go of all of them, and so opens it once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.cache.store.locks import TooLong, release, wait_for
from penstock.cache.store.region import Region
from penstock.environment import runtime_folder
from penstock.errors import CacheError

_L_REGISTRY = 1 << 40
_WITHIN_S = 5.0
_SUFFIX = ".cache"
_LOCKS = ".locks"
_FRESH = ".new"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process that has a cache open."""

    pid: int
    started: str
    """When the process started, as the kernel counts: another process may get the same number."""
    meta_fd: int
    data_fd: int

    @property
    def is_alive(self) -> bool:
        return started_at(self.pid) == self.started


def started_at(pid: int) -> str | None:
    """When a process started; None if there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def folder() -> Path:
    """Where this user's caches are listed. Nobody else can look inside."""
    base = runtime_folder()
    path = Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}" if base is None else base / "penstock"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as problem:
        raise CacheError(f"{path}, where caches are listed, cannot be made: {problem}; set TMPDIR") from problem
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise CacheError(f"{path} must be a directory that belongs to you and nobody else can read; remove it")
    return path


def open_region(
    name: str, make: Callable[[int], Region], join: Callable[[int, int, int], Region]
) -> tuple[Region, Path]:
    """Join the cache of that name, or make it with ``make``, which gets the descriptor for locks."""
    if not _NAME.fullmatch(name):
        raise CacheError(f"{name!r} cannot be a cache's name: letters, digits, '_', '.' and '-', at most 100")
    path = folder() / f"{name}{_SUFFIX}"
    with _locked(path) as fd:
        members = [member for member in _read(path) if member.is_alive]
        region = next((joined for member in members if (joined := _join(member, fd, join)) is not None), None)
        if region is None:
            region, members = make(fd), []
        started = started_at(os.getpid())
        assert started is not None
        own = Member(pid=os.getpid(), started=started, meta_fd=region.meta_fd, data_fd=region.data_fd)
        _write(path, [*members, own])
    return region, path


def visit(name: str, *, locks: bool) -> Region | None:
    """A view of a living cache, for one who does not use it; None if there is none of that name. To be closed.

    Without ``locks``, to look only; with them, not by a process that has the cache open.
    """
    path = folder() / f"{name}{_SUFFIX}"
    for member in _read(path):
        if member.is_alive:
            lock_fd = os.open(path.with_suffix(_LOCKS), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC) if locks else -1
            joined = _join(member, lock_fd, Region)
            if joined is not None:
                return joined
            if locks:
                os.close(lock_fd)
    return None


def leave(path: Path, fd: int) -> None:
    """This process has the cache open no more. The last one removes the file."""
    wait_for(fd, _L_REGISTRY, _WITHIN_S)
    others = [member for member in _read(path) if member.pid != os.getpid() and member.is_alive]
    if others:
        _write(path, others)
    else:
        _unlink(path)
    release(fd, _L_REGISTRY)


def listed() -> dict[str, list[Member]]:
    """Every cache of this user on this node, with its living processes; none for a stale one."""
    found = {}
    for path in sorted(folder().glob(f"*{_SUFFIX}")):
        found[path.name.removesuffix(_SUFFIX)] = [member for member in _read(path) if member.is_alive]
    return found


def remove_stale() -> list[str]:
    """Remove the files of caches whose processes are all dead; their memory went with them."""
    gone = []
    # Of a process that died while it made or left a cache there may be the files beside the list, and none.
    names = {path.stem for suffix in (_SUFFIX, _LOCKS, _FRESH) for path in folder().glob(f"*{suffix}")}
    living = {name for name, members in listed().items() if members}
    for name in sorted(names - living):
        path = folder() / f"{name}{_SUFFIX}"
        with contextlib.suppress(OSError, CacheError):
            fd = _open_locked(path)
            try:
                # Somebody may have begun it anew meanwhile.
                if not any(member.is_alive for member in _read(path)):
                    _unlink(path)
                    gone.append(name)
            finally:
                os.close(fd)
    return gone


def _unlink(path: Path) -> None:
    for suffix in (_FRESH, _SUFFIX, _LOCKS):
        path.with_suffix(suffix).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The file of locks, open for good, with the list's own lock held inside."""
    fd = _open_locked(path)
    try:
        yield fd
    except BaseException:
        if not path.exists():
            path.with_suffix(_LOCKS).unlink(missing_ok=True)
        os.close(fd)
        raise
    release(fd, _L_REGISTRY)


def _open_locked(path: Path) -> int:
    """The file of locks, with the list's own lock held until it is released, or the file closed."""
    path = path.with_suffix(_LOCKS)
    deadline_s = time.monotonic() + _WITHIN_S
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            wait_for(fd, _L_REGISTRY, _WITHIN_S)
        except TooLong:
            os.close(fd)
            raise CacheError(
                f"somebody holds {path} and does not let go; end the processes that use this cache"
            ) from None
        # The last user may have removed it while this process waited.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(fd).st_ino:
                return fd
        os.close(fd)
        if time.monotonic() > deadline_s:
            raise CacheError(f"{path} comes and goes; is it on a file system that others clean up?")


def _join(member: Member, lock_fd: int, join: Callable[[int, int, int], Region]) -> Region | None:
    """The memory a living process has open; None if it cannot be had."""
    fds: list[int] = []
    try:
        for number in (member.meta_fd, member.data_fd):
            link = Path(f"/proc/{member.pid}/fd/{number}")
            if not str(link.readlink()).startswith("/memfd:penstock-cache"):
                return None
            fds.append(os.open(link, os.O_RDWR | os.O_CLOEXEC))
        region = join(fds[0], fds[1], lock_fd)
        fds.clear()
        return region
    except OSError:
        return None
    finally:
        for fd in fds:
            os.close(fd)


def _read(path: Path) -> list[Member]:
    members = []
    with contextlib.suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            # A process that died while writing leaves a line that is none.
            with contextlib.suppress(ValueError, TypeError):
                members.append(Member(**json.loads(line)))
    return members


def _write(path: Path, members: list[Member]) -> None:
    fresh = path.with_suffix(_FRESH)
    fresh.write_text("".join(json.dumps(asdict(member)) + "\n" for member in members))
    fresh.replace(path)
