"""Signs that memory is running out: stalls, reached limits, kills, swapping.

In:  PSI, memory.events or memory.oom_control, /proc/vmstat.
Out: ``Pressure``.
Runs in: trainer, command line.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.meter.kernel_files import PAGE_BYTES, find_counter, parse_counters, read_count, read_text
from penstock.meter.limits.cgroup_paths import Cgroups, read_cgroups
from penstock.meter.limits.memory_bounds import host_swap, memory_groups
from penstock.meter.roots import Roots

_REAL = Roots()


@dataclass(frozen=True, kw_only=True)
class Pressure:
    """Counters and averages at one moment. A field is None if this kernel does not report the figure."""

    stall_source: str | None
    """The source of the stall figures: "host", or the path of a cgroup; None if the kernel has no PSI."""
    some_avg10: float | None
    """The per cent of the last 10 s in which at least one process waited for memory."""
    full_avg10: float | None
    """The per cent of the last 10 s in which all processes waited for memory."""
    oom_kills: int | None
    """The number of processes that were killed because memory ran out, since the cgroup was made or the host booted."""
    high_events: int | None
    """The number of times that the cgroup exceeded memory.high and was throttled."""
    max_events: int | None
    """The number of times that the hard limit was reached and the kernel had to reclaim memory."""
    swap_used_bytes: int | None
    """The swap in use on the host."""
    swapped_in_bytes: int | None
    """The bytes that the host has read from swap since it booted."""

    def oom_kills_since(self, earlier: Pressure) -> int | None:
        """The number of kills since an earlier reading; None if the kernel does not count kills."""
        if self.oom_kills is None or earlier.oom_kills is None:
            return None
        # A counter that has become smaller belongs to a new cgroup, which was made after the earlier reading.
        return self.oom_kills - earlier.oom_kills if self.oom_kills >= earlier.oom_kills else self.oom_kills

    def swap_growth_bytes(self, earlier: Pressure) -> int | None:
        """The growth of swap in use since an earlier reading, which is negative if swap shrank; None if unknown."""
        if self.swap_used_bytes is None or earlier.swap_used_bytes is None:
            return None
        return self.swap_used_bytes - earlier.swap_used_bytes


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """The averages from one PSI file."""

    some_avg10: float | None
    """Per cent; None where the line is missing."""
    full_avg10: float | None
    """Per cent; None where the line is missing."""


def pressure(*, roots: Roots = _REAL) -> Pressure:
    """Read the signs of memory pressure on this process's cgroup and on the host."""
    if not roots.is_linux:
        from penstock.meter.other_platforms import pressure_elsewhere

        return pressure_elsewhere()
    cgroups = read_cgroups(roots)
    source, stalls = _read_stalls(cgroups, roots)
    vmstat = read_text(roots.proc / "vmstat") or ""
    events = _read_events(cgroups)
    swap = host_swap(roots)
    swapped_in_pages = find_counter(vmstat, "pswpin ")
    return Pressure(
        stall_source=source,
        some_avg10=stalls.some_avg10,
        full_avg10=stalls.full_avg10,
        oom_kills=events.get("oom_kill", find_counter(vmstat, "oom_kill ")),
        high_events=events.get("high"),
        max_events=events.get("max"),
        swap_used_bytes=None if swap is None else swap.used_bytes,
        swapped_in_bytes=None if swapped_in_pages is None else swapped_in_pages * PAGE_BYTES,
    )


def parse_stalls(text: str) -> Stalls:
    """Parse lines such as "some avg10=0.12 avg60=0.05 avg300=0.00 total=1234"."""
    averages: dict[str, float] = {}
    for line in text.splitlines():
        kind, *words = line.split() or [""]
        for word in words:
            key, _, value = word.partition("=")
            if key == "avg10" and (percent := _percent(value)) is not None:
                averages[kind] = percent
    return Stalls(some_avg10=averages.get("some"), full_avg10=averages.get("full"))


def _read_stalls(cgroups: Cgroups, roots: Roots) -> tuple[str | None, Stalls]:
    """The stalls of this process's own v2 cgroup, or the stalls of the host."""
    unified = cgroups.unified()
    places = [(str(unified.levels[0]), unified.levels[0] / "memory.pressure")] if unified is not None else []
    for source, file in [*places, ("host", roots.proc / "pressure" / "memory")]:
        stalls = parse_stalls(read_text(file) or "")
        if stalls.some_avg10 is not None:
            return source, stalls
    return None, Stalls(some_avg10=None, full_avg10=None)


def _read_events(cgroups: Cgroups) -> dict[str, int]:
    """The counters of this process's own cgroup, under the names of v2; empty if the cgroup has no counters."""
    groups = memory_groups(cgroups)
    if not groups:
        return {}
    own = groups[0]
    if own.version == 2:
        return parse_counters(read_text(own.path / "memory.events") or "")
    events = {
        "oom_kill": find_counter(read_text(own.path / "memory.oom_control") or "", "oom_kill "),
        "max": read_count(own.path / "memory.failcnt"),
    }
    return {name: count for name, count in events.items() if count is not None}


def _percent(text: str) -> float | None:
    try:
        percent = float(text)
    except ValueError:
        return None
    return percent if 0 <= percent <= 100 else None
