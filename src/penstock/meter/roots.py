"""The places that facts about the machine are read from: every path, and the platform's name.

In:  nothing, or a directory of fixture files.
Out: ``Roots``, an argument of every function of the meter.
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
    """The fields of ``os.statvfs_result`` with the size of a file system."""

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
    """The places that facts are read from; the defaults are the real ones."""

    proc: Path = Path("/proc")
    """The proc file system: memory, processes, mounts, cgroup membership, open files, affinity."""
    cgroup: Path = Path(_CGROUP_HOME)
    """Replaces /sys/fs/cgroup in the mount table."""
    cpu: Path = Path("/sys/devices/system/cpu")
    """The folder with the list of online processors."""
    dev_shm: Path = Path("/dev/shm")
    """The tmpfs for shared memory with a name."""
    platform: str = sys.platform
    """As in ``sys.platform``: on "linux" the paths above are read, on others psutil is used."""
    statvfs: Callable[[Path], Filesystem] = _statvfs
    """Size and use of a file system; tests replace it, because their folders have no size of their own."""

    @property
    def is_linux(self) -> bool:
        return self.platform.startswith("linux")

    def mounted_at(self, mount_point: str) -> Path:
        """The directory of a mount point of the mount table."""
        point = PurePosixPath(mount_point)
        if point.is_relative_to(_CGROUP_HOME):
            return self.cgroup / point.relative_to(_CGROUP_HOME)
        return Path(point)
