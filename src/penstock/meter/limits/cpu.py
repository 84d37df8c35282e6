"""The number of processors that this process can use.

In:  the kernel's list of online processors, the affinity in /proc/self/status, the CPU quota of every cgroup.
Out: ``Processors``.
Runs in: trainer, command line.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.meter.kernel_files import parse_count, read_count, read_text
from penstock.meter.limits.cgroup_paths import Cgroups
from penstock.meter.roots import Roots

_MOST_PROCESSORS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Processors:
    """The processors of the host, and the part of them that this process may use."""

    count: int
    """The number of processors that are online on the host."""
    affinity: int | None
    """The number of processors that this process may run on, within its cpuset; None if unknown."""
    quota: float | None
    """The smallest quota / period of all enclosing cgroups; None if there is no quota."""

    @property
    def usable(self) -> float:
        whole = float(self.affinity or self.count)
        return whole if self.quota is None else min(whole, self.quota)


def read_processors(cgroups: Cgroups, roots: Roots) -> Processors:
    online = parse_cpu_list(read_text(roots.cpu / "online") or "")
    allowed = parse_cpu_list(_allowed_list(read_text(roots.proc / "self" / "status") or ""))
    # By default the kernel allows every processor that the mainboard could hold, not only existing processors.
    affinity = len(allowed & online) if online else len(allowed)
    return Processors(
        count=len(online) or os.cpu_count() or 1,
        affinity=affinity or None,
        quota=_smallest_quota(cgroups),
    )


def parse_cpu_list(text: str) -> frozenset[int]:
    """ "0-3,8" -> {0, 1, 2, 3, 8}; other text is ignored."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        first, last = parse_count(low), parse_count(high or low)
        if first is not None and last is not None and last < _MOST_PROCESSORS:
            numbers.update(range(first, last + 1))
    return frozenset(numbers)


def parse_cpu_max(text: str) -> float | None:
    """Parse v2's cpu.max: "50000 100000" is half a processor, "max 100000" means no quota."""
    words = text.split()
    if len(words) != 2:
        return None
    return _ratio(parse_count(words[0]), parse_count(words[1]))


def _smallest_quota(cgroups: Cgroups) -> float | None:
    hierarchy = cgroups.hierarchy("cpu")
    if hierarchy is None:
        return None
    quotas = [_quota(hierarchy.version, level) for level in hierarchy.levels]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(version: Literal[1, 2], level: Path) -> float | None:
    if version == 2:
        return parse_cpu_max(read_text(level / "cpu.max") or "")
    return _ratio(read_count(level / "cpu.cfs_quota_us"), read_count(level / "cpu.cfs_period_us"))


def _ratio(quota_us: int | None, period_us: int | None) -> float | None:
    return quota_us / period_us if quota_us and period_us else None


def _allowed_list(status: str) -> str:
    for line in status.splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return line.partition(":")[2]
    return ""
