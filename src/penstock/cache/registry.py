"""Lists the caches of this user on this node: which processes have a cache open, and how another process joins it.

In:  a name.
Out: the cache's shared memory, created or joined; the living caches, and the stale caches, whose processes have ended.
Runs in: trainer, worker, command line. Does not import torch.

A cache's memory has no name of its own. A file that only this user can read lists the processes that have it open; the
next process opens the memory through /proc/PID/fd of one of them. The kernel releases the memory when the last process
has closed the cache or ended. If that process crashed, the next process that opens any cache removes the file. The
locks are in a second file in the same folder. A process that closes any descriptor of the second file loses all its
locks, so every process keeps one descriptor open.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.cache.store.locks import TooLong, release, wait_for
from penstock.cache.store.region import Region
from penstock.environment import own_temporary_folder, private_folder, runtime_folder
from penstock.errors import CacheError, PenstockError

_L_REGISTRY = 1 << 40
_WITHIN_S = 5.0
_SUFFIX = ".cache"
_LOCKS = ".locks"
_FRESH = ".new"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, kw_only=True)
class CacheProcess:
    """A process that has a cache open."""

    pid: int
    started: str
    """When the process started, in the kernel's ticks: a later process may get the same pid."""
    meta_fd: int
    data_fd: int
    namespace: str = ""
    """Boot and pid namespace in which ``pid`` counts: containers that share the folder have a namespace each."""

    @property
    def is_here(self) -> bool:
        """Whether this process can see that process. The memory of a process in another container cannot be opened."""
        return self.namespace in ("", pid_namespace())

    @property
    def is_alive(self) -> bool:
        """Whether the process is alive, as far as can be known from this container."""
        if self.is_here:
            return started_at(self.pid) == self.started
        return self.namespace.partition(" ")[0] == pid_namespace().partition(" ")[0]


def pid_namespace() -> str:
    """The kernel's id of this boot and of the namespace of process ids; "" if the system has no such id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def started_at(pid: int) -> str | None:
    """When a process started; None if it has ended, even if it was not reaped yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def folder() -> Path:
    """The folder that lists this user's caches. No other user can read it."""
    base = runtime_folder()
    try:
        return own_temporary_folder() if base is None else private_folder(base / "penstock", is_in_public=True)
    except PenstockError as problem:
        raise CacheError(f"The folder that lists caches cannot be used: {problem}") from problem


def open_region(
    name: str, make: Callable[[int], Region], join: Callable[[int, int, int], Region]
) -> tuple[Region, Path]:
    """Join the cache of that name, or create it with ``make``, which gets the descriptor for locks."""
    if not _NAME.fullmatch(name):
        raise CacheError(f"{name!r} cannot be the name of a cache. Use at most 100 letters, digits, '_', '.' and '-'.")
    path = folder() / f"{name}{_SUFFIX}"
    with _locked(path) as fd:
        members = [member for member in _read(path) if member.is_alive]
        joined = (_join(member, fd, join) for member in members if member.is_here)
        region = next((each for each in joined if each is not None), None)
        if region is None:
            # Processes in other containers continue with a memory of their own.
            region, members = make(fd), [member for member in members if not member.is_here]
        started = started_at(os.getpid())
        assert started is not None
        own = CacheProcess(
            pid=os.getpid(), started=started, meta_fd=region.meta_fd, data_fd=region.data_fd, namespace=pid_namespace()
        )
        _write(path, [*members, own])
    return region, path


def visit(name: str, *, locks: bool) -> Region | None:
    """A view of a living cache; None if there is no cache of that name. The caller closes the view.

    Without ``locks`` the view is for reading only. A process that has the cache open must not pass ``locks=True``.
    """
    path = folder() / f"{name}{_SUFFIX}"
    for member in _read(path):
        if member.is_here and member.is_alive:
            lock_fd = os.open(path.with_suffix(_LOCKS), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC) if locks else -1
            joined = _join(member, lock_fd, Region)
            if joined is not None:
                return joined
            if locks:
                os.close(lock_fd)
    return None


def leave(path: Path, fd: int) -> None:
    """Remove this process from the list; the last one removes the files."""
    wait_for(fd, _L_REGISTRY, _WITHIN_S)
    others = [
        member for member in _read(path) if member.is_alive and not (member.is_here and member.pid == os.getpid())
    ]
    if others:
        _write(path, others)
    else:
        _unlink(path)
    release(fd, _L_REGISTRY)


def listed() -> dict[str, list[CacheProcess]]:
    """Every cache of this user on this node, with its living processes, including processes in other containers; a
    stale cache has no living process."""
    found = {}
    for path in sorted(folder().glob(f"*{_SUFFIX}")):
        found[path.name.removesuffix(_SUFFIX)] = [member for member in _read(path) if member.is_alive]
    return found


def remove_stale() -> list[str]:
    """Remove the files of caches whose processes have all ended; their memory is released already."""
    gone = []
    # A process that crashed while it opened or closed a cache may leave the other files without the list.
    names = {path.stem for suffix in (_SUFFIX, _LOCKS, _FRESH) for path in folder().glob(f"*{suffix}")}
    living = {name for name, members in listed().items() if members}
    for name in sorted(names - living):
        path = folder() / f"{name}{_SUFFIX}"
        with contextlib.suppress(OSError, CacheError):
            fd = _open_locked(path)
            try:
                # Another process may have created the cache again meanwhile.
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
    """A descriptor of the lock file, which stays open; inside the block, the lock of the list is held."""
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
    """A descriptor of the lock file, with the lock of the list held."""
    path = path.with_suffix(_LOCKS)
    deadline_s = time.monotonic() + _WITHIN_S
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            wait_for(fd, _L_REGISTRY, _WITHIN_S)
        except TooLong:
            os.close(fd)
            raise CacheError(
                f"Another process holds {path} and does not release it. End the processes that use this cache."
            ) from None
        # The last user may have removed the file while this process waited for the lock.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(fd).st_ino:
                return fd
        os.close(fd)
        if time.monotonic() > deadline_s:
            raise CacheError(f"{path} disappears again and again. Does another program clean up that folder?")


def _join(member: CacheProcess, lock_fd: int, join: Callable[[int, int, int], Region]) -> Region | None:
    """The memory that a living process has open; None if it cannot be opened."""
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


def _read(path: Path) -> list[CacheProcess]:
    members = []
    with contextlib.suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            # A process that crashed while writing may leave an incomplete line.
            with contextlib.suppress(ValueError, TypeError):
                members.append(CacheProcess(**json.loads(line)))
    return members


def _write(path: Path, members: list[CacheProcess]) -> None:
    fresh = path.with_suffix(_FRESH)
    fresh.write_text("".join(json.dumps(asdict(member)) + "\n" for member in members))
    fresh.replace(path)
