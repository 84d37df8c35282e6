"""Swap there is and swap in use, for the host and inside a cgroup.

In:  /proc/meminfo; the swap files beside a cgroup's memory limit.
Out: ``Swap``.
Runs in: trainer, command line.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.meter.kernel_files import find_counter, read_count, read_text
from penstock.meter.limits.memory_bounds import Bound
from penstock.meter.roots import Roots


@dataclass(frozen=True, kw_only=True)
class Swap:
    """Swap of the host, or of one cgroup on it."""

    total_bytes: int
    """What may be used."""
    used_bytes: int
    """What is used."""


def host_swap(roots: Roots) -> Swap | None:
    """None where the kernel does not say."""
    text = read_text(roots.proc / "meminfo") or ""
    total, free = find_counter(text, "SwapTotal:"), find_counter(text, "SwapFree:")
    if total is None or free is None:
        return None
    return Swap(total_bytes=total, used_bytes=max(0, total - free))


def swap_within(bound: Bound, roots: Roots) -> Swap:
    """Swap as those inside ``bound`` may use it: others' swap on the same host is not theirs."""
    host = host_swap(roots) or Swap(total_bytes=0, used_bytes=0)
    group = bound.group
    if group is None:
        return host
    if group.version == 2:
        allowed = read_count(group.path / "memory.swap.max")
        used = read_count(group.path / "memory.swap.current")
    else:
        # v1 limits memory and swap together.
        together = read_count(group.path / "memory.memsw.limit_in_bytes")
        allowed = None if together is None else max(0, together - bound.limit_bytes)
        used = find_counter(group.read_stat(), "total_swap ")
    return Swap(
        total_bytes=host.total_bytes if allowed is None else min(allowed, host.total_bytes),
        used_bytes=host.used_bytes if used is None else used,
    )
