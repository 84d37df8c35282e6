"""Finds the control groups of this process, in any layout. ``memory_bounds`` and ``cpu`` read the limits of these
groups.

In:  /proc/self/cgroup (the groups) and /proc/self/mountinfo (the mounted parts of the tree, and their places).
Out: ``Cgroups``: for each controller, the directories from the process's own group up to the last visible one.
Runs in: trainer, worker, command line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from penstock.meter.kernel_files import read_text
from penstock.meter.roots import Roots

Layout = Literal["v1", "v2", "hybrid", "none"]

_UNIFIED = ""
"""The key of the v2 group in ``memberships``, because the line of this group in /proc/self/cgroup names no
controller."""

_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, kw_only=True)
class Hierarchy:
    """The groups of one controller that this process belongs to."""

    version: Literal[1, 2]
    """The version of the hierarchy, which decides the names and meanings of the files in ``levels``."""
    levels: tuple[Path, ...]
    """The existing directories of the groups, innermost first; the last is the root of the mount."""
    own: bool
    """Whether the first directory is the process's own group; if not, that group and its limits are not visible
    here."""


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One cgroup file system of the mount table."""

    version: Literal[1, 2]
    """The version: a v1 mount has ``controllers``; a v2 mount has all controllers that no v1 mount has."""
    root: str
    """The group of the top directory: "/", unless a container sees only a part of the tree."""
    point: str
    """The path where the file system is mounted."""
    controllers: frozenset[str]
    """The controllers of a v1 mount, without named hierarchies such as "name=systemd"; empty for v2."""


@dataclass(frozen=True, kw_only=True)
class Cgroups:
    """The groups of this process, and the mounts in which the groups are visible."""

    roots: Roots
    """The directories that stand for the mount points."""
    memberships: dict[str, str]
    """Controller -> path of the group; the key of the v2 group is ""."""
    mounts: tuple[Mount, ...]
    """The mounted cgroup file systems. A later mount replaces an earlier mount on the same point."""

    @property
    def layout(self) -> Layout:
        v1 = any(mount.controllers for mount in self.mounts)
        v2 = any(mount.version == 2 for mount in self.mounts)
        return "hybrid" if v1 and v2 else "v1" if v1 else "v2" if v2 else "none"

    def hierarchy(self, controller: str) -> Hierarchy | None:
        """The groups that limit ``controller``; None if no group is visible."""
        path = self.memberships.get(controller)
        if path is not None:
            shown = [mount for mount in self.mounts if controller in mount.controllers]
            if found := self._visible(path, shown):
                return found
        return self.unified()

    def unified(self) -> Hierarchy | None:
        """The v2 groups, including groups without controllers, because every group counts pressure."""
        path = self.memberships.get(_UNIFIED)
        shown = [mount for mount in self.mounts if mount.version == 2]
        return None if path is None else self._visible(path, shown)

    def _visible(self, path: str, mounts: list[Mount]) -> Hierarchy | None:
        """The longest chain of groups upwards from ``path`` in any mount; of chains of equal length, the one in the
        latest mount."""
        best: Hierarchy | None = None
        for mount in mounts:
            top = self.roots.mounted_at(mount.point)
            below = _below(mount.root, path)
            levels = _existing(top, below or PurePosixPath())
            if not levels:
                continue
            own = below is not None and levels[0] == top / below
            if best is None or (own, len(levels)) >= (best.own, len(best.levels)):
                best = Hierarchy(version=mount.version, levels=levels, own=own)
        return best


def read_cgroups(roots: Roots) -> Cgroups:
    """Find the control groups to which this process belongs now."""
    return cgroups_of(read_membership(roots), roots)


def read_membership(roots: Roots) -> str:
    """The content of /proc/self/cgroup. The groups of this process change only if this content changes."""
    return read_text(f"{roots.proc}/self/cgroup") or ""


def cgroups_of(membership: str, roots: Roots) -> Cgroups:
    table = read_text(f"{roots.proc}/self/mountinfo") or ""
    return Cgroups(roots=roots, memberships=parse_membership(membership), mounts=parse_mounts(table))


def parse_membership(text: str) -> dict[str, str]:
    """Parse lines such as "4:cpu,cpuacct:/docker/1f" (v1) and "0::/user.slice" (v2)."""
    memberships: dict[str, str] = {}
    for line in text.split("\n"):
        number, first, rest = line.partition(":")
        controllers, second, path = rest.partition(":")
        if not (first and second and number.isdigit() and path.startswith("/")):
            continue
        for controller in controllers.split(","):
            memberships[controller] = path
    return memberships


def parse_mounts(text: str) -> tuple[Mount, ...]:
    """Parse the cgroup mounts from lines such as "35 31 0:32 /docker/1f /cg/memory rw - cgroup cgroup rw,cpu"."""
    mounts: dict[str, Mount] = {}
    for line in text.split("\n"):
        # A lone "-" ends the optional fields, whose number differs from line to line.
        head, _, tail = line.partition(" - ")
        where, what = head.split(" "), tail.split(" ")
        if len(where) < 5 or len(what) < 3 or what[0] not in ("cgroup", "cgroup2"):
            continue
        version = 2 if what[0] == "cgroup2" else 1
        options = what[2].split(",") if version == 1 else []
        point = _unescaped(where[4])
        mounts.pop(point, None)
        mounts[point] = Mount(
            version=version,
            root=_unescaped(where[3]),
            point=point,
            controllers=frozenset(option for option in options if option not in ("rw", "ro") and "=" not in option),
        )
    return tuple(mounts.values())


def _unescaped(field: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match.group(1), 8) & 0xFF), field)


def _below(root: str, path: str) -> PurePosixPath | None:
    """``path`` relative to the group at the top of a mount; None if the path is outside the mount."""
    try:
        below = PurePosixPath(path).relative_to(PurePosixPath(root))
    except ValueError:
        return None
    # A cgroup namespace writes a group outside the namespace as "/../x", a path that would leave the mount.
    return None if ".." in below.parts else below


def _existing(top: Path, below: PurePosixPath) -> tuple[Path, ...]:
    """The existing directories from ``top / below`` up to ``top``."""
    paths = [top / below, *(top / parent for parent in below.parents)]
    return tuple(dict.fromkeys(path for path in paths if _is_directory(path)))


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # forbidden, or a name with a null byte
        return False
