"""Where the machine is read from: every path and platform name the meter depends on, in one value.

In:  nothing, or a directory of fixture files.
Out: ``Roots``, which every reader of the meter takes.
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
    """The part of ``os.statvfs_result`` that says how large a file system is."""

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
    """The places facts come from; the defaults are the real ones."""

    proc: Path = Path("/proc")
    """The proc file system: memory, processes, mounts, cgroup membership, open files, affinity."""
    cgroup: Path = Path(_CGROUP_HOME)
    """Stands in for /sys/fs/cgroup, wherever the mount table names that."""
    cpu: Path = Path("/sys/devices/system/cpu")
    """Has the list of processors that are online."""
    dev_shm: Path = Path("/dev/shm")
    """The tmpfs that shared memory with a name lives in."""
    platform: str = sys.platform
    """As in ``sys.platform``: "linux" reads the paths above, anything else asks psutil."""
    statvfs: Callable[[Path], Filesystem] = _statvfs
    """Size and use of a file system, because a fixture directory cannot have a size of its own."""

    @property
    def is_linux(self) -> bool:
        return self.platform.startswith("linux")

    def mounted_at(self, mount_point: str) -> Path:
        """The directory that a mount point of the mount table stands for."""
        point = PurePosixPath(mount_point)
        if point.is_relative_to(_CGROUP_HOME):
            return self.cgroup / point.relative_to(_CGROUP_HOME)
        return Path(point)
