"""Where this process stands in the control groups, whatever their layout.

In:  /proc/self/cgroup (which group) and /proc/self/mountinfo (which part of the tree can be seen, and where).
Out: ``Cgroups``: for each controller the directories from the process's own group up to the last visible one.
Runs in: trainer, worker, command line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Literal

from penstock.meter.kernel_files import read_text
from penstock.meter.roots import Roots

Layout = Literal["v1", "v2", "hybrid", "none"]

_UNIFIED = ""
"""The key of the v2 group among memberships: its line in /proc/self/cgroup names no controller."""

_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, kw_only=True)
class Hierarchy:
    """The groups that enclose this process under one controller."""

    version: Literal[1, 2]
    """Decides the names and the meaning of the files in ``levels``."""
    levels: tuple[Path, ...]
    """Directories that exist, innermost first; the last is the root of the mount."""


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One cgroup file system of the mount table."""

    version: Literal[1, 2]
    """1: has the ``controllers``; 2: has whatever v1 has not taken."""
    root: str
    """The group its top directory shows; "/" unless a container sees only a part."""
    point: str
    """Where it is mounted."""
    controllers: frozenset[str]
    """Controllers of a v1 mount, named hierarchies ("name=systemd") left out; empty for v2."""


@dataclass(frozen=True, kw_only=True)
class Cgroups:
    """Memberships of this process and the mounts that show them."""

    roots: Roots
    """Where the mount points are."""
    memberships: dict[str, str]
    """Controller -> path of the group; the v2 group under the empty name."""
    mounts: tuple[Mount, ...]
    """The cgroup file systems that are mounted, a later mount replacing an earlier one on the same point."""

    @property
    def layout(self) -> Layout:
        v1 = any(mount.controllers for mount in self.mounts)
        v2 = any(mount.version == 2 for mount in self.mounts)
        return "hybrid" if v1 and v2 else "v1" if v1 else "v2" if v2 else "none"

    def hierarchy(self, controller: str) -> Hierarchy | None:
        """The groups that bound ``controller``, or None where none can be seen."""
        path = self.memberships.get(controller)
        if path is not None:
            shown = [mount for mount in self.mounts if controller in mount.controllers]
            if levels := self._levels(path, shown):
                return Hierarchy(version=1, levels=levels)
        return self.unified()

    def unified(self) -> Hierarchy | None:
        """The v2 groups, with or without controllers of their own: pressure is accounted in every one."""
        path = self.memberships.get(_UNIFIED)
        shown = [mount for mount in self.mounts if mount.version == 2]
        if path is not None and (levels := self._levels(path, shown)):
            return Hierarchy(version=2, levels=levels)
        return None

    def _levels(self, path: str, mounts: list[Mount]) -> tuple[Path, ...]:
        """The longest way up that any of the mounts shows; of equal ones the latest mount's."""
        best: tuple[Path, ...] = ()
        for mount in mounts:
            top = self.roots.mounted_at(mount.point)
            levels = _existing(top, _below(mount.root, path))
            if levels and len(levels) >= len(best):
                best = levels
        return best


def read_cgroups(roots: Roots) -> Cgroups:
    return _cgroups(roots, read_membership(roots))


@lru_cache(maxsize=8)
def cached_cgroups(roots: Roots, membership: str) -> Cgroups:
    """For pollers: the mount table is read once for each group the process is moved to."""
    return _cgroups(roots, membership)


def read_membership(roots: Roots) -> str:
    return read_text(f"{roots.proc}/self/cgroup") or ""


def _cgroups(roots: Roots, membership: str) -> Cgroups:
    table = read_text(f"{roots.proc}/self/mountinfo") or ""
    return Cgroups(roots=roots, memberships=parse_membership(membership), mounts=parse_mounts(table))


def parse_membership(text: str) -> dict[str, str]:
    """Lines such as "4:cpu,cpuacct:/docker/1f" (v1) and "0::/user.slice" (v2)."""
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
    """The cgroup mounts among lines such as "35 31 0:32 /docker/1f /cg/memory rw - cgroup cgroup rw,cpu"."""
    mounts: dict[str, Mount] = {}
    for line in text.split("\n"):
        # Optional fields end at a lone "-"; their number differs from line to line.
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
            controllers=frozenset(
                option for option in options if option not in ("rw", "ro") and "=" not in option
            ),
        )
    return tuple(mounts.values())


def _unescaped(field: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match.group(1), 8) & 0xFF), field)


def _below(root: str, path: str) -> PurePosixPath:
    """The way down to ``path`` from the group a mount shows at its top; empty where ``path`` lies outside."""
    try:
        below = PurePosixPath(path).relative_to(PurePosixPath(root))
    except ValueError:
        return PurePosixPath()
    # A cgroup namespace shows groups outside it as "/../x": following that would leave the mount.
    return PurePosixPath() if ".." in below.parts else below


def _existing(top: Path, below: PurePosixPath) -> tuple[Path, ...]:
    """The directories from ``top / below`` up to ``top``, less those that cannot be seen from here."""
    ways = [top / below, *(top / parent for parent in below.parents)]
    try:
        return tuple(dict.fromkeys(way for way in ways if way.is_dir()))
    except (OSError, ValueError):
        return ()
