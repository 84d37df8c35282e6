"""Signs that memory is running out: stalls, limit hits, kills, swapping.

In:  PSI, memory.events or memory.oom_control, /proc/vmstat.
Out: ``Pressure`` (now) and ``PressureRates`` (between two polls).
Runs in: trainer, command line.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.meter.kernel_files import PAGE_BYTES, find_counter, parse_counters, read_count, read_text
from penstock.meter.limits.cgroup import Cgroups, read_cgroups
from penstock.meter.limits.memory_bounds import memory_groups
from penstock.meter.limits.swap import host_swap
from penstock.meter.roots import Roots

_REAL = Roots()


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


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """Averages of one PSI file."""

    some_avg10: float | None
    """Per cent; None where the line is missing."""
    full_avg10: float | None
    """Per cent; None where the line is missing."""


def pressure(*, roots: Roots = _REAL) -> Pressure:
    """Signs of memory pressure on this process's cgroup and host."""
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


class PressureMeter:
    """Remembers the last poll and says what has happened since."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, roots: Roots = _REAL) -> None:
        self._clock = clock
        self._roots = roots
        self._last: tuple[float, Pressure] | None = None

    def poll(self) -> PressureRates:
        now_s, now = self._clock(), pressure(roots=self._roots)
        then_s, then = self._last or (now_s, None)
        self._last = now_s, now
        elapsed_s = max(0.0, now_s - then_s)
        swapped_in = _since(now.swapped_in_bytes, then and then.swapped_in_bytes)
        growth = None
        if then is not None and now.swap_used_bytes is not None and then.swap_used_bytes is not None:
            growth = now.swap_used_bytes - then.swap_used_bytes
        return PressureRates(
            now=now,
            elapsed_s=elapsed_s,
            swap_in_bytes_per_s=None if swapped_in is None or not elapsed_s else swapped_in / elapsed_s,
            swap_growth_bytes=growth,
            oom_kills=_since(now.oom_kills, then and then.oom_kills),
            high_events=_since(now.high_events, then and then.high_events),
            max_events=_since(now.max_events, then and then.max_events),
        )


def parse_stalls(text: str) -> Stalls:
    """Lines such as "some avg10=0.12 avg60=0.05 avg300=0.00 total=1234"."""
    averages: dict[str, float] = {}
    for line in text.splitlines():
        kind, *words = line.split() or [""]
        for word in words:
            key, _, value = word.partition("=")
            if key == "avg10" and (percent := _percent(value)) is not None:
                averages[kind] = percent
    return Stalls(some_avg10=averages.get("some"), full_avg10=averages.get("full"))


def _read_stalls(cgroups: Cgroups, roots: Roots) -> tuple[str | None, Stalls]:
    """The stalls of this process's own v2 group, or those of the host."""
    unified = cgroups.unified()
    places = [(str(unified.levels[0]), unified.levels[0] / "memory.pressure")] if unified is not None else []
    for source, file in [*places, ("host", roots.proc / "pressure" / "memory")]:
        stalls = parse_stalls(read_text(file) or "")
        if stalls.some_avg10 is not None:
            return source, stalls
    return None, Stalls(some_avg10=None, full_avg10=None)


def _read_events(cgroups: Cgroups) -> dict[str, int]:
    """Counters of this process's own group, under v2's names; empty where it keeps none."""
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


def _since(now: int | None, then: int | None) -> int | None:
    """Growth of a counter; one that went back belongs to another cgroup now, and starts from nothing."""
    if now is None or then is None:
        return None
    return now - then if now >= then else now


def _percent(text: str) -> float | None:
    try:
        percent = float(text)
    except ValueError:
        return None
    return percent if 0 <= percent <= 100 else None
