"""What the doctor reads of a machine, all at one moment.

In:  ``Roots``.
Out: ``MachineFacts``, for findings, pages and JSON.
Runs in: command line.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from penstock import meter
from penstock.meter import GpuStatus, Limits, Pressure, Roots


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """The meter's answers at one moment."""

    platform: str
    """As in ``sys.platform``: a missing /dev/shm, for example, is a finding on Linux and normal on macOS."""
    limits: Limits
    """Memory, swap, shared memory, open files and processors."""
    pressure: Pressure
    """Stalls, kills and swapping."""
    gpu: GpuStatus
    """The GPUs, or why there are none."""

    def as_json(self) -> dict[str, Any]:
        """The facts by subject, under the names that checks rely on."""
        limits = self.limits
        return {
            "platform": self.platform,
            "memory": {
                "limit_bytes": limits.memory_limit_bytes,
                "limit_source": limits.memory_limit_source,
                "host_bytes": limits.host_memory_bytes,
                "available_bytes": limits.memory_available_bytes,
                "working_set_bytes": limits.working_set_bytes,
            },
            "swap": {"total_bytes": limits.swap_total_bytes, "used_bytes": limits.swap_used_bytes},
            "shm": {"size_bytes": limits.shm_size_bytes, "used_bytes": limits.shm_used_bytes},
            "open_files": {
                "soft": limits.open_files_soft,
                "hard": limits.open_files_hard,
                "used": limits.open_files_used,
            },
            "cpu": {
                "count": limits.cpu_count,
                "affinity": limits.cpu_affinity,
                "quota": limits.cpu_quota,
                "usable": limits.cpu_usable,
            },
            "cgroup": limits.cgroup,
            "pressure": asdict(self.pressure),
            "gpu": asdict(self.gpu),
            "unknown": list(limits.unknown),
        }


def gather_facts(roots: Roots) -> MachineFacts:
    return MachineFacts(
        platform=roots.platform,
        limits=meter.limits(roots=roots),
        pressure=meter.pressure(roots=roots),
        gpu=meter.gpu_status(roots=roots),
    )
