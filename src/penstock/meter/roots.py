"""The places from which facts about the machine are read: every path, and the name of the platform.

In:  nothing, or a directory of files that tests made.
Out: ``Roots``, which is an argument of every function of the meter.
Runs in: trainer, worker, command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

_CGROUP_HOME = PurePosixPath("/sys/fs/cgroup")


class Filesystem(Protocol):
    """The fields of ``os.statvfs_result`` that give the size of a file system."""

    @property
    def f_frsize(self) -> int: ...
    @property
    def f_blocks(self) -> int: ...
    @property
    def f_bfree(self) -> int: ...


def _statvfs(path: Path) -> Filesystem:
    if sys.platform == "win32":
        raise OSError("this platform has no statvfs")
    return os.statvfs(path)


@dataclass(frozen=True, kw_only=True)
class Roots:
    """The places from which facts are read; the defaults are the real places."""

    proc: Path = Path("/proc")
    """The proc file system: memory, processes, mounts, cgroup membership, open files, affinity."""
    cgroup: Path = Path(_CGROUP_HOME)
    """The folder that stands for /sys/fs/cgroup in the mount table."""
    cpu: Path = Path("/sys/devices/system/cpu")
    """The folder with the list of online processors."""
    dev_shm: Path = Path("/dev/shm")
    """The tmpfs in which shared memory with a name lies."""
    platform: str = sys.platform
    """The platform, as in ``sys.platform``. On "linux" the paths above are read; on other platforms psutil is used."""
    statvfs: Callable[[Path], Filesystem] = _statvfs
    """A function that returns the size and the use of a file system. Tests replace it, because their folders have no
    size of their own."""

    @property
    def is_linux(self) -> bool:
        return self.platform.startswith("linux")

    def mounted_at(self, mount_point: str) -> Path:
        """The directory that stands for a mount point of the mount table."""
        point = PurePosixPath(mount_point)
        if point.is_relative_to(_CGROUP_HOME):
            return self.cgroup / point.relative_to(_CGROUP_HOME)
        return Path(point)
