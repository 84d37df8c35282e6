"""What this machine or container allows: memory, swap, shared memory, open files, processors.

In:  the cgroups that enclose this process, /proc, /dev/shm; psutil where there is no /proc.
Out: ``Limits``.
Runs in: trainer, command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from penstock.meter.kernel_files import read_text
from penstock.meter.limits.cgroup import Cgroups, read_cgroups
from penstock.meter.limits.cpu import Processors, read_processors
from penstock.meter.limits.memory_bounds import Bound, memory_bounds, memory_groups
from penstock.meter.limits.open_files import OpenFiles, read_open_files
from penstock.meter.limits.shared_memory import SharedMemory, read_shared_memory
from penstock.meter.limits.swap import swap_within
from penstock.meter.roots import Roots

_REAL = Roots()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What this process may use, and what is left of it."""

    memory_limit_bytes: int
    """The smallest memory limit over the cgroup, all its ancestors and the host's memory."""
    memory_limit_source: str
    """Who sets that limit: "host", or the cgroup's path and the file in it."""
    host_memory_bytes: int
    """Memory of the whole machine (MemTotal)."""
    memory_available_bytes: int
    """Headroom: how much more can be used before the first limit on the way up, or the host, is full."""
    working_set_bytes: int
    """In use, as kubelet counts it (usage less inactive file cache), where the limit is set."""
    swap_total_bytes: int
    """Swap there is, where the limit is set."""
    swap_used_bytes: int
    """Swap in use, where the limit is set."""
    shm_size_bytes: int | None
    """Size of /dev/shm; None where there is none."""
    shm_used_bytes: int | None
    """Bytes in use in /dev/shm; None where there is none."""
    open_files_soft: int | None
    """Open files this process may have now (``ulimit -n``); None: no limit, or not known."""
    open_files_hard: int | None
    """What the soft limit may be raised to; None: no limit, or not known."""
    open_files_used: int | None
    """Files this process has open; None where it cannot be counted."""
    cpu_count: int
    """Processors of the host that are online."""
    cpu_affinity: int | None
    """Processors this process may run on; None where the platform does not say."""
    cpu_quota: float | None
    """Processors' worth of time allowed: the smallest quota / period on the way up; None: no quota."""
    cpu_usable: float
    """Processors that can really be used: the smaller of affinity and quota. May be 0.5."""
    cgroup: Literal["v1", "v2", "hybrid", "none"]
    """Which control groups the limits came from."""
    unknown: tuple[str, ...]
    """What could not be found out here, each as "field: why"."""


def limits(*, roots: Roots = _REAL) -> Limits:
    """What this process may use here, containers included."""
    if not roots.is_linux:
        from penstock.meter.other_platforms import limits_elsewhere

        return limits_elsewhere(roots)
    cgroups = read_cgroups(roots)
    bounds = memory_bounds(memory_groups(cgroups), roots)
    host = bounds[-1]
    tightest = min(bounds, key=lambda bound: bound.limit_bytes)
    processors = read_processors(cgroups, roots)
    shm = read_shared_memory(roots, host.limit_bytes)
    files = read_open_files(roots)
    swap = swap_within(tightest, roots)
    return Limits(
        memory_limit_bytes=tightest.limit_bytes,
        memory_limit_source=tightest.source,
        host_memory_bytes=host.limit_bytes,
        memory_available_bytes=min(bound.headroom_bytes for bound in bounds),
        working_set_bytes=tightest.working_set_bytes or 0,
        swap_total_bytes=swap.total_bytes,
        swap_used_bytes=swap.used_bytes,
        shm_size_bytes=shm.size_bytes,
        shm_used_bytes=shm.used_bytes,
        open_files_soft=files.soft,
        open_files_hard=files.hard,
        open_files_used=files.used,
        cpu_count=processors.count,
        cpu_affinity=processors.affinity,
        cpu_quota=processors.quota,
        cpu_usable=processors.usable,
        cgroup=cgroups.layout,
        unknown=tuple(_unknown(roots, cgroups, tightest, processors, shm, files)),
    )


def _unknown(
    roots: Roots,
    cgroups: Cgroups,
    tightest: Bound,
    processors: Processors,
    shm: SharedMemory,
    files: OpenFiles,
) -> Iterator[str]:
    if read_text(roots.proc / "meminfo") is None:
        yield f"host_memory_bytes: {roots.proc / 'meminfo'} cannot be read; counted by the kernel's pages"
    seen = cgroups.hierarchy("memory")
    if cgroups.memberships and seen is None:
        yield "memory_limit_bytes: this process is in a control group, but none is mounted here"
    if seen is not None and not seen.own:
        yield (
            "memory_limit_bytes: the control group of this process cannot be seen from here;"
            f" {seen.levels[0]} is the nearest that can"
        )
    if tightest.working_set_bytes is None:
        yield f"working_set_bytes: no usage beside {tightest.source}; headroom is the whole limit"
    if processors.affinity is None:
        yield f"cpu_affinity: {roots.proc / 'self' / 'status'} does not say"
    if shm.size_bytes is None:
        yield f"shm_size_bytes: {roots.dev_shm} cannot be read"
    if files.used is None:
        yield f"open_files_used: {roots.proc / 'self' / 'fd'} cannot be read"
