"""Every limit on the memory and the swap of this process, and how much of each limit is left.

In:  the memory controller's files in every enclosing cgroup; /proc/meminfo.
Out: one ``Bound`` per limit, including the host's limit; ``headroom_bytes`` for frequent calls; ``Swap``.
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
from penstock.meter.limits.cgroup_paths import Cgroups, cgroups_of, read_membership
from penstock.meter.roots import Roots

_NO_LIMIT_BYTES = 1 << 62
"""The value from which on a limit of v1 means "no limit". v1 writes the largest multiple of the page size below 2**63,
and page sizes differ between machines."""

_REAL = Roots()


@dataclass(frozen=True, kw_only=True)
class MemoryGroup:
    """One cgroup that has the memory controller."""

    version: Literal[1, 2]
    """The version of the controller."""
    path: Path
    """Its directory."""
    limit_files: tuple[str, ...]
    """The files that may set a limit. The file of v1's soft limit is left out, because that limit is not enforced."""
    usage_file: str
    """The file with the bytes that are charged to the group and to the groups below it."""
    stat_file: str
    """The file that divides the charged bytes into kinds."""

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
        """A limit and what is left of it. ``stat`` is the result of ``read_stat``."""
        usage = read_count(self.usage_file)
        # In v1, counters without "total_" leave out the groups below.
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
    """One limit, which is set by a cgroup or is the memory of the host."""

    source: str
    """The file that sets the limit, or "host"."""
    group: MemoryGroup | None
    """The cgroup that sets the limit; None for the host."""
    limit_bytes: int
    """The bytes that all processes in the cgroup, or on the host, may use together."""
    working_set_bytes: int | None
    """The bytes in use that the kernel cannot reclaim, counted as kubelet does: usage minus inactive file cache. Shared
    memory and tmpfs are never inactive *file* pages, so they count as used. None if the kernel reports no usage."""
    headroom_bytes: int
    """The bytes that are left of the limit."""


def headroom_bytes(*, roots: Roots = _REAL) -> int:
    """The memory that can still be used: the smallest headroom of all enclosing cgroups and the host.

    A call takes 60-95 µs. Each level costs 8 µs (v1) or 15 µs (v2) of this, and 20 µs more if the level has a limit.
    The mount table is read again only after the process has moved to another cgroup.
    """
    if not roots.is_linux:
        from penstock.meter.other_platforms import host_memory_bytes

        return host_memory_bytes()[1]
    return min(bound.headroom_bytes for bound in bounds_now(roots=roots))


def bounds_now(*, roots: Roots = _REAL) -> list[Bound]:
    """Every limit that applies now, innermost first and the host's last. It works only on Linux and is as fast as
    ``headroom_bytes``."""
    return memory_bounds(_cached_groups(roots, read_membership(roots)), roots)


def memory_bounds(groups: tuple[MemoryGroup, ...], roots: Roots) -> list[Bound]:
    """Every limit that applies, innermost first and the host's last."""
    return [*_group_bounds(groups), _host_bound(roots)]


def memory_groups(cgroups: Cgroups) -> tuple[MemoryGroup, ...]:
    """The cgroups that count this process's memory, innermost first."""
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
        # v1 reports the smallest limit of all ancestors, including ancestors that a container cannot see. Such an
        # ancestor contains at least the topmost visible group, whose usage is therefore a lower bound of the ancestor's
        # usage.
        limit = find_counter(own_stat, "hierarchical_memory_limit ")
        if limit is not None and limit < smallest:
            top = groups[-1]
            yield top.bound(limit, f"{own.stat_file} (hierarchical_memory_limit)", top.read_stat())


def _host_bound(roots: Roots) -> Bound:
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
    """The total and the free bytes from system calls, because a chroot may have no /proc."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_PHYS_PAGES") * page_bytes, os.sysconf("SC_AVPHYS_PAGES") * page_bytes


@dataclass(frozen=True, kw_only=True)
class Swap:
    """The swap of the host, or of one cgroup on the host."""

    total_bytes: int
    """The bytes of swap that may be used."""
    used_bytes: int
    """The bytes of swap in use."""


def host_swap(roots: Roots) -> Swap | None:
    """The swap of the host; None if the kernel does not report it."""
    text = read_text(roots.proc / "meminfo") or ""
    total, free = find_counter(text, "SwapTotal:"), find_counter(text, "SwapFree:")
    if total is None or free is None:
        return None
    return Swap(total_bytes=total, used_bytes=max(0, total - free))


def swap_within(bound: Bound, roots: Roots) -> Swap:
    """The swap that processes inside ``bound`` may use, without the swap of other processes on the host."""
    host = host_swap(roots) or Swap(total_bytes=0, used_bytes=0)
    group = bound.group
    if group is None:
        return host
    if group.version == 2:
        allowed = read_count(group.path / "memory.swap.max")
        used = read_count(group.path / "memory.swap.current")
    else:
        # v1 has a single limit for memory and swap together.
        together = read_count(group.path / "memory.memsw.limit_in_bytes")
        allowed = None if together is None else max(0, together - bound.limit_bytes)
        used = find_counter(group.read_stat(), "total_swap ")
    return Swap(
        total_bytes=host.total_bytes if allowed is None else min(allowed, host.total_bytes),
        used_bytes=host.used_bytes if used is None else used,
    )
