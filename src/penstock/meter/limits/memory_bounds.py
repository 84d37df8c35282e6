"""Who bounds the memory of this process, and how much each of them has left.

In:  the memory controller's files in every enclosing cgroup; /proc/meminfo.
Out: one ``Bound`` per limit, the host's included; ``headroom_bytes`` for those who poll.
Runs in: trainer, worker, command line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from penstock.meter.kernel_files import find_counter, read_count, read_text
from penstock.meter.limits.cgroup import Cgroups, cgroups_of, read_membership
from penstock.meter.roots import Roots

_NO_LIMIT_BYTES = 1 << 62
"""v1 says "no limit" as the largest multiple of the page size below 2**63: no one number to compare with."""

_REAL = Roots()


@dataclass(frozen=True, kw_only=True)
class MemoryGroup:
    """One cgroup that has the memory controller."""

    version: Literal[1, 2]
    """Version of the controller."""
    path: Path
    """Its directory."""
    limit_files: tuple[str, ...]
    """Files that may set a limit. v1's soft limit is a wish, and not among them."""
    usage_file: str
    """File with the bytes charged to the group and those below it."""
    stat_file: str
    """File with the parts of that usage."""

    @classmethod
    def at(cls, version: Literal[1, 2], path: Path) -> MemoryGroup:
        limits = ("memory.limit_in_bytes",) if version == 1 else ("memory.max", "memory.high")
        return cls(
            version=version,
            path=path,
            limit_files=tuple(str(path / name) for name in limits),
            usage_file=str(path / ("memory.usage_in_bytes" if version == 1 else "memory.current")),
            stat_file=str(path / "memory.stat"),
        )

    def read_stat(self) -> str:
        return read_text(self.stat_file) or ""

    def bound(self, limit_bytes: int, source: str, stat: str) -> Bound:
        """The limit with what is left of it; ``stat`` is what ``read_stat`` gave."""
        usage = read_count(self.usage_file)
        # v1's plain counters leave out the groups below.
        inactive = find_counter(stat, "total_inactive_file " if self.version == 1 else "inactive_file ")
        working_set = None if usage is None else max(0, usage - (inactive or 0))
        return Bound(
            source=source,
            group=self,
            limit_bytes=limit_bytes,
            working_set_bytes=working_set,
            headroom_bytes=max(0, limit_bytes - (working_set or 0)),
        )


@dataclass(frozen=True, kw_only=True)
class Bound:
    """One limit on the way up."""

    source: str
    """"host", or the file that sets the limit."""
    group: MemoryGroup | None
    """The cgroup that sets it; None for the host."""
    limit_bytes: int
    """What everything inside may use together."""
    working_set_bytes: int | None
    """What of it cannot be taken back, as kubelet counts it: usage less inactive file cache. Shared memory
    and tmpfs are never inactive *file* pages, so they count as used. None: the kernel does not say."""
    headroom_bytes: int
    """What is left."""


def headroom_bytes(*, roots: Roots = _REAL) -> int:
    """Memory that can still be used: the least left over all enclosing cgroups and the host.

    For those who poll: the mounts are looked up once for each cgroup the process is moved to. 60-95 µs, of
    which each level costs 8 (v1) or 15 (v2) and 20 more where it has a limit.
    """
    if not roots.is_linux:
        from penstock.meter.other_platforms import host_memory

        return host_memory().available_bytes
    return min(bound.headroom_bytes for bound in bounds_now(roots=roots))


def bounds_now(*, roots: Roots = _REAL) -> list[Bound]:
    """Every limit that applies now, innermost first, the host's last. Linux alone; at the cost of the above."""
    return memory_bounds(_cached_groups(roots, read_membership(roots)), roots)


def memory_bounds(groups: tuple[MemoryGroup, ...], roots: Roots) -> list[Bound]:
    """Every limit that applies, innermost first, the host's last."""
    return [*_group_bounds(groups), host_bound(roots)]


def memory_groups(cgroups: Cgroups) -> tuple[MemoryGroup, ...]:
    """The cgroups that account the memory of this process, innermost first."""
    hierarchy = cgroups.hierarchy("memory")
    if hierarchy is None:
        return ()
    return tuple(MemoryGroup.at(hierarchy.version, level) for level in hierarchy.levels)


@lru_cache(maxsize=8)
def _cached_groups(roots: Roots, membership: str) -> tuple[MemoryGroup, ...]:
    return memory_groups(cgroups_of(membership, roots))


def _group_bounds(groups: tuple[MemoryGroup, ...]) -> Iterator[Bound]:
    if not groups:
        return
    own = groups[0]
    own_stat = own.read_stat()
    smallest = _NO_LIMIT_BYTES
    for group in groups:
        limits = [(limit, file) for file in group.limit_files if (limit := read_count(file)) is not None]
        limit, file = min(limits, default=(_NO_LIMIT_BYTES, ""))
        if limit < _NO_LIMIT_BYTES:
            smallest = min(smallest, limit)
            yield group.bound(limit, file, own_stat if group is own else group.read_stat())
    if own.version == 1:
        # v1 tells the smallest limit of all ancestors, also of those above what a container can see.
        # They hold at least what the topmost visible group holds.
        limit = find_counter(own_stat, "hierarchical_memory_limit ")
        if limit is not None and limit < smallest:
            top = groups[-1]
            yield top.bound(limit, f"{own.stat_file} (hierarchical_memory_limit)", top.read_stat())


def host_bound(roots: Roots) -> Bound:
    text = read_text(f"{roots.proc}/meminfo") or ""
    total = find_counter(text, "MemTotal:")
    if not total:
        total, available = _host_memory_without_proc()
    else:
        available = find_counter(text, "MemAvailable:")
        if available is None:  # kernels before 3.14
            available = (find_counter(text, "MemFree:") or 0) + (find_counter(text, "Inactive(file):") or 0)
    available = min(available, total)
    return Bound(
        source="host",
        group=None,
        limit_bytes=total,
        working_set_bytes=total - available,
        headroom_bytes=available,
    )


def _host_memory_without_proc() -> tuple[int, int]:
    """Total and free bytes by system call: a chroot may have no /proc."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_PHYS_PAGES") * page_bytes, os.sysconf("SC_AVPHYS_PAGES") * page_bytes
