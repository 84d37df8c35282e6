"""The memory of a process and all its descendants.

In:  /proc/<pid>/{stat,statm,smaps_rollup,task/*/children}; psutil if there is no /proc.
Out: ``MemoryReport``, one ``ProcessMemory`` per process.
Runs in: trainer, command line.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.meter.kernel_files import parse_count, read_text
from penstock.meter.processes.process import ProcessSnapshot, parse_stat, read_process
from penstock.meter.roots import Roots

_REAL = Roots()


@dataclass(frozen=True, kw_only=True)
class ProcessMemory:
    """The memory of one process."""

    pid: int
    """Process id."""
    parent_pid: int
    """The process id of the parent."""
    name: str
    """The name of the command as the kernel keeps it (15 characters)."""
    rss_bytes: int
    """The resident pages; shared pages count in full."""
    pss_bytes: int | None
    """The resident pages, where each page is divided by the number of processes that map it; None if not read or not
    allowed."""
    uss_bytes: int | None
    """The pages that no other process maps, which are freed when this process ends; None if not read or not allowed."""
    pss_shared_bytes: int | None = None
    """The part of the PSS in shared memory; None if not read."""
    pss_anon_bytes: int | None = None
    """The part of the PSS in heaps and stacks; None if not read."""
    rss_file_bytes: int | None = None
    """The part of the RSS in mapped files and shared memory; None if not read."""


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """The memory of a process tree."""

    processes: tuple[ProcessMemory, ...]
    """One entry for each living process, the root first; empty if the root itself has ended."""
    rss_bytes: int
    """The sum of the RSS, in which a shared page counts once for each process that maps it."""
    pss_bytes: int | None
    """The sum of the PSS, in which every page counts once; None if unknown."""
    uss_bytes: int | None
    """The sum of the USS; None if unknown."""
    exact: bool
    """Whether PSS and USS were read for this report; if not, they are missing or extrapolated from an earlier
    report."""
    skipped: tuple[int, ...]
    """The processes that are missing from the sums, because they ended before they were read or belong to another user.
    Of another user's process only PSS and USS are missing."""
    pss_shared_bytes: int | None = None
    """The part of the PSS in shared memory; None if not read for this report."""
    pss_anon_bytes: int | None = None
    """The part of the PSS in heaps and stacks; None if not read for this report."""


def memory(pid: int | None = None, *, exact: bool = True, roots: Roots = _REAL) -> MemoryReport:
    """The memory of process ``pid`` and its descendants; without ``pid``, of this process.

    ``exact`` also reads PSS and USS, which takes 11-18 ms per GiB that each process maps. Without ``exact`` only RSS is
    read, which takes 40-60 µs per process.
    """
    root = os.getpid() if pid is None else pid
    if not roots.is_linux:
        from penstock.meter.other_platforms import memory_elsewhere

        return memory_elsewhere(root, exact=exact)
    snapshots, gone = read_tree(root, exact=exact, roots=roots)
    denied = tuple(snapshot.pid for snapshot in snapshots if exact and snapshot.rollup is None)
    return report_of(map(process_memory, snapshots), exact=exact, skipped=gone + denied)


def process_memory(snapshot: ProcessSnapshot) -> ProcessMemory:
    """A snapshot in its public form."""
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
    """The living processes of the tree, root first, and the ids of the processes that ended meanwhile."""
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
    """A report about these processes, with its sums. A sum is None if no process has the figure."""
    processes = tuple(processes)

    def total(figure: str) -> int | None:
        known = [value for process in processes if (value := getattr(process, figure)) is not None]
        return sum(known) if known else None

    pss_bytes = total("pss_bytes")
    return MemoryReport(
        processes=processes,
        rss_bytes=total("rss_bytes") or 0,
        pss_bytes=pss_bytes,
        uss_bytes=total("uss_bytes"),
        exact=exact and pss_bytes is not None,
        skipped=skipped,
        pss_shared_bytes=total("pss_shared_bytes") if exact else None,
        pss_anon_bytes=total("pss_anon_bytes") if exact else None,
    )


class Children:
    """The children of processes at one moment. Every sample needs a new object of this class.

    The kernel's own lists cost 12 µs per process and 3 µs per further thread. On a kernel that is built without these
    lists (CONFIG_PROC_CHILDREN), every process of the machine is scanned once, at 12 µs each.
    """

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._by_parent: dict[int, list[int]] | None = None

    def of(self, pid: int) -> list[int]:
        """The children of ``pid`` in no particular order; empty if the process has ended."""
        if self._by_parent is None:
            listed = self._listed(pid)
            if listed is not None:
                return listed
            self._by_parent = self._scan()
        return self._by_parent.get(pid, [])

    def _listed(self, pid: int) -> list[int] | None:
        """The children of all threads of ``pid``, from the kernel's lists; None if this kernel has no lists of
        children."""
        tasks = f"{self._roots.proc}/{pid}/task"
        children: list[int] = []
        for thread in _numbers_in(tasks):
            text = read_text(f"{tasks}/{thread}/children")
            if text is not None:
                children += [child for word in text.split() if (child := parse_count(word)) is not None]
            elif read_text(f"{tasks}/{thread}/stat") is not None:
                return None
        return children

    def _scan(self) -> dict[int, list[int]]:
        by_parent: dict[int, list[int]] = defaultdict(list)
        for pid in _numbers_in(str(self._roots.proc)):
            stat = parse_stat(read_text(f"{self._roots.proc}/{pid}/stat") or "")
            if stat is not None:
                by_parent[stat.parent_pid].append(pid)
        return dict(by_parent)


def _numbers_in(directory: str) -> list[int]:
    try:
        names = os.listdir(directory)  # noqa: PTH208 - only names are needed, thousands of them
    except OSError:
        return []
    return [number for name in names if (number := parse_count(name)) is not None]
