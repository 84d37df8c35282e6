"""Machines without /proc (Mac, Windows): figures from psutil, and the reason for each figure that is missing.

In:  psutil.
Out: ``Limits``, ``MemoryReport`` and ``Pressure`` with fewer figures than on Linux.
Runs in: trainer, worker, command line.
"""

from __future__ import annotations

import os
import sys

import psutil

from penstock.meter.limits.machine import Limits
from penstock.meter.pressure import Pressure
from penstock.meter.processes.tree import MemoryReport, ProcessMemory, report_of
from penstock.meter.roots import Roots


def host_memory_bytes() -> tuple[int, int]:
    """The memory of the machine, and the part of it that is available without swapping."""
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def limits_elsewhere(roots: Roots) -> Limits:
    (total_bytes, available_bytes), swap = host_memory_bytes(), psutil.swap_memory()
    count = psutil.cpu_count() or os.cpu_count() or 1
    affinity = _affinity(roots)
    soft, hard = _open_file_limits(roots)
    used = _open_files_used()
    missing = {
        "memory_limit_bytes": "limits of containers and job objects cannot be read here; this is the host's memory",
        "shm_size_bytes": "this platform has no /dev/shm",
        "cpu_quota": "no CPU quota can be read on this platform",
    }
    if affinity is None:
        missing["cpu_affinity"] = "this platform does not report the affinity"
    if soft is None:
        missing["open_files_soft"] = "this platform has no limit on open files"
    if used is None:
        missing["open_files_used"] = "this platform does not report the number of open files"
    return Limits(
        memory_limit_bytes=total_bytes,
        memory_limit_source="host",
        host_memory_bytes=total_bytes,
        memory_available_bytes=available_bytes,
        working_set_bytes=total_bytes - available_bytes,
        swap_total_bytes=swap.total,
        swap_used_bytes=swap.used,
        shm_size_bytes=None,
        shm_used_bytes=None,
        open_files_soft=soft,
        open_files_hard=hard,
        open_files_used=used,
        cpu_count=count,
        cpu_affinity=affinity,
        cpu_quota=None,
        cpu_usable=float(affinity or count),
        cgroup="none",
        unknown=tuple(f"{field}: {why}" for field, why in missing.items()),
    )


def pressure_elsewhere() -> Pressure:
    """The swap in use. Without /proc there are no counts of stalls and kills."""
    swap = psutil.swap_memory()
    return Pressure(
        stall_source=None,
        some_avg10=None,
        full_avg10=None,
        oom_kills=None,
        high_events=None,
        max_events=None,
        swap_used_bytes=swap.used,
        swapped_in_bytes=swap.sin,
    )


def memory_elsewhere(pid: int, *, exact: bool) -> MemoryReport:
    """The RSS of the process tree, and with ``exact`` the USS. Only Linux has PSS."""
    skipped: list[int] = []
    found: list[ProcessMemory] = []
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.Error:
        return report_of((), exact=False, skipped=(pid,))
    for process in family:
        try:
            found.append(
                ProcessMemory(
                    pid=process.pid,
                    parent_pid=process.ppid(),
                    name=process.name(),
                    rss_bytes=process.memory_info().rss,
                    pss_bytes=None,
                    uss_bytes=_uss(process) if exact else None,
                )
            )
        except psutil.Error:
            skipped.append(process.pid)
    return report_of(tuple(found), exact=False, skipped=tuple(skipped))


def _uss(process: psutil.Process) -> int | None:
    try:
        return process.memory_full_info().uss
    except psutil.AccessDenied:
        return None


def _affinity(roots: Roots) -> int | None:
    if roots.platform == "darwin":
        return None
    try:
        return len(psutil.Process().cpu_affinity() or ()) or None
    except (AttributeError, psutil.Error):
        return None


def _open_file_limits(roots: Roots) -> tuple[int | None, int | None]:
    if roots.platform == "win32" or sys.platform == "win32":
        return None, None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    return None if soft == unlimited else soft, None if hard == unlimited else hard


def _open_files_used() -> int | None:
    """The number of descriptors in use; None on Windows, which counts handles, to which no limit on open files
    applies."""
    try:
        return psutil.Process().num_fds()
    except (AttributeError, psutil.Error):
        return None
