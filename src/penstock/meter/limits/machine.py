"""The limits of this machine or container: memory, swap, shared memory, open files, processors.

In:  the cgroups that enclose this process, /proc, /dev/shm; psutil if there is no /proc.
Out: ``Limits``.
Runs in: trainer, command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from penstock.meter.kernel_files import parse_count, read_text
from penstock.meter.limits.cgroup_paths import Cgroups, read_cgroups
from penstock.meter.limits.cpu import Processors, read_processors
from penstock.meter.limits.memory_bounds import Bound, memory_bounds, memory_groups, swap_within
from penstock.meter.roots import Roots

_OPEN_FILES_ROW = "Max open files"
_REAL = Roots()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The resources that this process may use, and how much of them is left."""

    memory_limit_bytes: int
    """The smallest of the memory limits of the cgroup, of all its ancestors and of the host."""
    memory_limit_source: str
    """The source of the smallest memory limit: "host", or the path of the cgroup's file."""
    host_memory_bytes: int
    """The memory of the whole machine (MemTotal)."""
    memory_available_bytes: int
    """The headroom: the bytes that can still be used before the first of the enclosing cgroups and the host is full."""
    working_set_bytes: int
    """The bytes in use in the group that sets the limit, counted as kubelet does: usage minus inactive file cache."""
    swap_total_bytes: int
    """The swap that the group with the smallest memory limit may use."""
    swap_used_bytes: int
    """The swap that the group with the smallest memory limit uses."""
    shm_size_bytes: int | None
    """The size of /dev/shm; None if it does not exist."""
    shm_used_bytes: int | None
    """The bytes in use in /dev/shm; None if it does not exist."""
    open_files_soft: int | None
    """The number of files that this process may have open now (``ulimit -n``); None if there is no limit or it is
    unknown."""
    open_files_hard: int | None
    """The number to which the soft limit may be raised; None if there is no limit or it is unknown."""
    open_files_used: int | None
    """The number of files that this process has open; None if these files cannot be counted."""
    cpu_count: int
    """The number of processors that are online on the host."""
    cpu_affinity: int | None
    """The number of processors that this process may run on; None if the platform does not report this number."""
    cpu_quota: float | None
    """The allowed processor time, in processors: the smallest quota / period of all enclosing cgroups; None if there is
    no quota."""
    cpu_usable: float
    """The number of processors that can be used, which is the smaller of affinity and quota. It may be a fraction such
    as 0.5."""
    cgroup: Literal["v1", "v2", "hybrid", "none"]
    """The layout of the control groups from which the limits are read."""
    unknown: tuple[str, ...]
    """The figures that are unknown on this machine, each as "field: reason"."""


def limits(*, roots: Roots = _REAL) -> Limits:
    """The limits of this process, including limits that a container sets."""
    if not roots.is_linux:
        from penstock.meter.other_platforms import limits_elsewhere

        return limits_elsewhere(roots)
    cgroups = read_cgroups(roots)
    bounds = memory_bounds(memory_groups(cgroups), roots)
    host = bounds[-1]
    tightest = min(bounds, key=lambda bound: bound.limit_bytes)
    processors = read_processors(cgroups, roots)
    shm_size_bytes, shm_used_bytes = _shared_memory(roots, host.limit_bytes)
    files_soft, files_hard, files_used = _open_files(roots)
    swap = swap_within(tightest, roots)
    return Limits(
        memory_limit_bytes=tightest.limit_bytes,
        memory_limit_source=tightest.source,
        host_memory_bytes=host.limit_bytes,
        memory_available_bytes=min(bound.headroom_bytes for bound in bounds),
        working_set_bytes=tightest.working_set_bytes or 0,
        swap_total_bytes=swap.total_bytes,
        swap_used_bytes=swap.used_bytes,
        shm_size_bytes=shm_size_bytes,
        shm_used_bytes=shm_used_bytes,
        open_files_soft=files_soft,
        open_files_hard=files_hard,
        open_files_used=files_used,
        cpu_count=processors.count,
        cpu_affinity=processors.affinity,
        cpu_quota=processors.quota,
        cpu_usable=processors.usable,
        cgroup=cgroups.layout,
        unknown=tuple(_unknown(roots, cgroups, tightest, processors, shm_size_bytes, files_used)),
    )


def spare_files(*, roots: Roots = _REAL) -> int | None:
    """The number of files that this process may still open; None if there is no limit or it is unknown."""
    soft, _, used = _open_files(roots)
    return None if soft is None or used is None else max(0, soft - used)


def parse_open_file_limits(text: str) -> tuple[int | None, int | None]:
    """The soft and the hard limit, from lines such as "Max open files     1024     1048576     files"."""
    for line in text.splitlines():
        words = line.removeprefix(_OPEN_FILES_ROW).split()
        if line.startswith(_OPEN_FILES_ROW) and len(words) >= 2:
            return parse_count(words[0]), parse_count(words[1])
    return None, None


def _open_files(roots: Roots) -> tuple[int | None, int | None, int | None]:
    """The soft limit, the hard limit and the descriptors in use; a limit is None if it does not exist or is unknown."""
    try:
        used = sum(1 for _ in (roots.proc / "self" / "fd").iterdir())
    except OSError:
        used = None
    return *parse_open_file_limits(read_text(roots.proc / "self" / "limits") or ""), used


def _shared_memory(roots: Roots, host_memory_bytes: int) -> tuple[int | None, int | None]:
    """The size of /dev/shm and the bytes in use in /dev/shm; None if unknown."""
    try:
        found = roots.statvfs(roots.dev_shm)
    except OSError:
        return None, None
    if found.f_blocks == 0:
        # A tmpfs that is mounted with size=0 has no limit of its own and does not count its blocks.
        return host_memory_bytes, None
    return found.f_blocks * found.f_frsize, (found.f_blocks - found.f_bfree) * found.f_frsize


def _unknown(
    roots: Roots, cgroups: Cgroups, tightest: Bound, processors: Processors, shm_size: int | None, files: int | None
) -> Iterator[str]:
    if read_text(roots.proc / "meminfo") is None:
        yield f"host_memory_bytes: {roots.proc / 'meminfo'} cannot be read; the size comes from system calls"
    visible = cgroups.hierarchy("memory")
    if cgroups.memberships and visible is None:
        yield "memory_limit_bytes: this process is in a control group, but no control group is mounted here"
    if visible is not None and not visible.own:
        yield (
            "memory_limit_bytes: the control group of this process is not visible here;"
            f" {visible.levels[0]} is the nearest visible group"
        )
    if tightest.working_set_bytes is None:
        yield f"working_set_bytes: {tightest.source} gives a limit but no usage; the headroom shown is the whole limit"
    if processors.affinity is None:
        yield f"cpu_affinity: {roots.proc / 'self' / 'status'} does not contain the affinity"
    if shm_size is None:
        yield f"shm_size_bytes: {roots.dev_shm} cannot be read"
    if files is None:
        yield f"open_files_used: {roots.proc / 'self' / 'fd'} cannot be read"
