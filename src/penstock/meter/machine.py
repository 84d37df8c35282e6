"""What this machine or container allows: memory, swap, shared memory, open files, processors.

In:  the cgroups that enclose this process, /proc, /dev/shm; psutil where there is no /proc.
Out: ``Limits``.
Runs in: trainer, command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
