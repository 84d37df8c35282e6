"""Memory of a process and all its descendants.

In:  /proc/<pid>/{stat,statm,smaps_rollup,task/*/children}; psutil where there is no /proc.
Out: ``MemoryReport``, one ``ProcessMemory`` per process.
Runs in: trainer, command line.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.meter.processes.children import Children
from penstock.meter.processes.process import ProcessSnapshot, read_process
from penstock.meter.roots import Roots

_REAL = Roots()


@dataclass(frozen=True, kw_only=True)
class ProcessMemory:
    """Memory of one process."""

    pid: int
    """Process id."""
    parent_pid: int
    """Process id of its parent."""
    name: str
    """Command name, as the kernel keeps it (15 characters)."""
    rss_bytes: int
    """Resident pages, shared ones in full."""
    pss_bytes: int | None
    """Resident pages, each divided by the number of processes that map it; None: not read, or not allowed."""
    uss_bytes: int | None
    """Pages no other process maps: what a kill would free; None: not read, or not allowed."""
    pss_shared_bytes: int | None = None
    """Of the PSS, shared memory; None: not read."""
    pss_anon_bytes: int | None = None
    """Of the PSS, heaps and stacks; None: not read."""
    rss_file_bytes: int | None = None
    """Of the RSS, mapped files and shared memory; None: not read."""


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Memory of a process tree, root first."""

    processes: tuple[ProcessMemory, ...]
    """One entry per living process; empty when the root itself is gone."""
    rss_bytes: int
    """Sum of RSS: counts a shared page once per process that maps it."""
    pss_bytes: int | None
    """Sum of PSS: what the tree really holds. None: not known."""
    uss_bytes: int | None
    """Sum of USS. None: not known."""
    exact: bool
    """True: PSS and USS were read for this report. False: they are missing, or carried on from an earlier
    one."""
    skipped: tuple[int, ...]
    """Processes the sums lack: gone before they were read, or another user's (then only PSS and USS lack)."""
    pss_shared_bytes: int | None = None
    """Of the PSS, shared memory. None: not read for this report."""
    pss_anon_bytes: int | None = None
    """Of the PSS, heaps and stacks. None: not read for this report."""


def memory(pid: int | None = None, *, exact: bool = True, roots: Roots = _REAL) -> MemoryReport:
    """Memory of process ``pid`` (this one, if left out) and its descendants.

    ``exact`` also reads PSS and USS, at 11-18 ms per GiB that each process maps. Without it: RSS alone, at
    40-60 µs per process.
    """
    root = os.getpid() if pid is None else pid
    if not roots.is_linux:
        from penstock.meter.other_platforms import memory_elsewhere

        return memory_elsewhere(root, exact=exact)
    snapshots, gone = read_tree(root, exact=exact, roots=roots)
    denied = tuple(snapshot.pid for snapshot in snapshots if exact and snapshot.rollup is None)
    return report_of(map(process_memory, snapshots), exact=exact, skipped=gone + denied)


def process_memory(snapshot: ProcessSnapshot) -> ProcessMemory:
    """The public form of a snapshot."""
    rollup = snapshot.rollup
    return ProcessMemory(
        pid=snapshot.pid,
        parent_pid=snapshot.stat.parent_pid,
        name=snapshot.stat.name,
        rss_bytes=snapshot.statm.rss_bytes if rollup is None else rollup.rss_bytes,
        pss_bytes=None if rollup is None else rollup.pss_bytes,
        uss_bytes=None if rollup is None else rollup.uss_bytes,
        pss_shared_bytes=None if rollup is None else rollup.pss_shared_bytes,
        pss_anon_bytes=None if rollup is None else rollup.pss_anon_bytes,
        rss_file_bytes=snapshot.statm.file_bytes,
    )


def read_tree(root: int, *, exact: bool, roots: Roots) -> tuple[tuple[ProcessSnapshot, ...], tuple[int, ...]]:
    """The living processes of the tree, root first, and the ids of those that went away meanwhile."""
    snapshots: list[ProcessSnapshot] = []
    gone: list[int] = []
    children = Children(roots)
    seen = {root}
    waiting: list[tuple[int, int | None]] = [(root, None)]
    while waiting:
        pid, parent = waiting.pop()
        snapshot = read_process(pid, parent=parent, exact=exact, roots=roots)
        if snapshot is None:
            gone.append(pid)
            continue
        snapshots.append(snapshot)
        for child in children.of(pid):
            if child not in seen:
                seen.add(child)
                waiting.append((child, pid))
    return tuple(snapshots), tuple(gone)


def report_of(processes: Iterable[ProcessMemory], *, exact: bool, skipped: tuple[int, ...]) -> MemoryReport:
    """A report with the sums made. A sum of which no part is known is not known."""
    processes = tuple(processes)
    pss = [process.pss_bytes for process in processes if process.pss_bytes is not None]
    uss = [process.uss_bytes for process in processes if process.uss_bytes is not None]
    shared = [process.pss_shared_bytes for process in processes if process.pss_shared_bytes is not None]
    anon = [process.pss_anon_bytes for process in processes if process.pss_anon_bytes is not None]
    return MemoryReport(
        processes=processes,
        rss_bytes=sum(process.rss_bytes for process in processes),
        pss_bytes=sum(pss) if pss else None,
        uss_bytes=sum(uss) if uss else None,
        exact=exact and bool(pss),
        skipped=skipped,
        pss_shared_bytes=sum(shared) if exact and shared else None,
        pss_anon_bytes=sum(anon) if exact and anon else None,
    )
