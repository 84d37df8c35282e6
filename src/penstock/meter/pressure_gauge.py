"""Signs that memory is running out: stalls, limit hits, kills, swapping.

In:  PSI, memory.events or memory.oom_control, /proc/vmstat.
Out: ``Pressure`` (now) and ``PressureRates`` (between two polls).
Runs in: trainer, command line.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Pressure:
    """Counters and averages at one moment. None: this kernel does not say."""

    stall_source: str | None
    """Whose stalls these are: "host", or the path of a cgroup. None: no PSI."""
    some_avg10: float | None
    """Per cent of the last 10 s in which at least one task waited for memory."""
    full_avg10: float | None
    """Per cent of the last 10 s in which all tasks waited for memory."""
    oom_kills: int | None
    """Processes killed for want of memory, since the cgroup (or the host) began."""
    high_events: int | None
    """Times memory.high was crossed and the cgroup throttled."""
    max_events: int | None
    """Times the hard limit was reached and memory had to be reclaimed first."""
    swap_used_bytes: int | None
    """Swap of the host in use."""
    swapped_in_bytes: int | None
    """Bytes the host has read back from swap since it booted."""


@dataclass(frozen=True, kw_only=True)
class PressureRates:
    """What happened between two polls. None: not known, or the first poll."""

    now: Pressure
    """The later of the two readings."""
    elapsed_s: float
    """Time between the polls; 0 at the first."""
    swap_in_bytes_per_s: float | None
    """How fast the host reads memory back from swap."""
    swap_growth_bytes: int | None
    """Swap in use now, less swap in use at the earlier poll; negative when it shrank."""
    oom_kills: int | None
    """Kills since the earlier poll."""
    high_events: int | None
    """Crossings of memory.high since the earlier poll."""
    max_events: int | None
    """Hits of the hard limit since the earlier poll."""
