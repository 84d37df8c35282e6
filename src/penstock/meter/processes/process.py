"""The identity and the memory of one process in /proc.

In:  /proc/<pid>/{stat,statm,smaps_rollup}.
Out: ``ProcessSnapshot``, or None for a process that has ended.
Runs in: trainer, command line.

Every file of a process is opened through one descriptor of its directory. The descriptor belongs to the process, not to
the process id: if the id is reused meanwhile, reading fails instead of returning the memory of another process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from penstock.meter.kernel_files import PAGE_BYTES, parse_count, parse_counters, read_or_raise, read_text
from penstock.meter.roots import Roots


@dataclass(frozen=True, kw_only=True)
class Stat:
    """The fields of /proc/<pid>/stat that identify a process."""

    name: str
    """Command name."""
    parent_pid: int
    """The present parent. After the first parent has ended, this is process 1 or a subreaper."""
    started_ticks: int
    """The start time in clock ticks since boot. Together with the process id it is unique."""


@dataclass(frozen=True, kw_only=True)
class Statm:
    """The fields of /proc/<pid>/statm, which the kernel keeps up to date."""

    anon_bytes: int
    """The resident pages of heaps and stacks, including pages that are shared with the parent since a fork."""
    file_bytes: int
    """The resident pages of files and shared memory."""

    @property
    def rss_bytes(self) -> int:
        return self.anon_bytes + self.file_bytes


@dataclass(frozen=True, kw_only=True)
class Rollup:
    """The fields of /proc/<pid>/smaps_rollup. To read them, the kernel visits every page."""

    rss_bytes: int
    """The resident pages, counted exactly, whereas statm may be late by some pages per processor."""
    pss_bytes: int
    """The resident pages, where each page is divided by the number of processes that map it."""
    uss_bytes: int
    """The pages that only this process maps."""
    pss_shared_bytes: int = 0
    """The part of the PSS in shared memory: segments, memfds, files in a tmpfs."""
    pss_anon_bytes: int = 0
    """The part of the PSS in memory without a file: heaps and stacks."""


@dataclass(frozen=True, kw_only=True)
class ProcessSnapshot:
    """One living process at one moment."""

    pid: int
    """Process id."""
    stat: Stat
    """Its identity."""
    statm: Statm
    """The memory of the process from statm, which is fast to read."""
    rollup: Rollup | None
    """The exact memory of the process; None if it was not requested, is not allowed, or is not provided by the
    kernel."""


def read_process(pid: int, *, parent: int | None, exact: bool, roots: Roots) -> ProcessSnapshot | None:
    """A living process; None if it has ended, or if ``parent`` is given and the process has another parent now."""
    try:
        directory = os.open(f"{roots.proc}/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        stat = parse_stat(read_text("stat", dir_fd=directory) or "")
        statm = _read_statm(directory)
        if stat is None or statm is None or (parent is not None and stat.parent_pid != parent):
            return None
        rollup = None
        if exact:
            try:
                rollup = parse_rollup(read_or_raise("smaps_rollup", dir_fd=directory))
            except OSError:
                if _read_statm(directory) is None:
                    return None
        return ProcessSnapshot(pid=pid, stat=stat, statm=statm, rollup=rollup)
    finally:
        os.close(directory)


def parse_stat(text: str) -> Stat | None:
    """Parse text such as "4242 (a (b) c) S 17 ...". The name may hold spaces and brackets, so it ends at the last
    bracket."""
    head, closing, tail = text.rpartition(")")
    fields = tail.split()
    name = head.partition("(")[2]
    if not closing or len(fields) < 20:
        return None
    parent, started = parse_count(fields[1]), parse_count(fields[19])
    if parent is None or started is None:
        return None
    return Stat(name=name, parent_pid=parent, started_ticks=started)


def parse_statm(text: str) -> Statm | None:
    """Parse the text of statm; None for a zombie or a kernel thread, which have no address space."""
    fields = [parse_count(word) for word in text.split()[:3]]
    if len(fields) < 3 or not (size := fields[0]):
        return None
    rss, shared = min(fields[1] or 0, size), fields[2] or 0
    return Statm(anon_bytes=max(0, rss - shared) * PAGE_BYTES, file_bytes=min(shared, rss) * PAGE_BYTES)


def parse_rollup(text: str) -> Rollup | None:
    fields = parse_counters(text)
    if "Rss" not in fields or "Pss" not in fields:
        return None
    return Rollup(
        rss_bytes=fields["Rss"],
        pss_bytes=fields["Pss"],
        uss_bytes=sum(fields.get(key, 0) for key in ("Private_Clean", "Private_Dirty", "Private_Hugetlb")),
        pss_shared_bytes=fields.get("Pss_Shmem", 0),
        pss_anon_bytes=fields.get("Pss_Anon", 0),
    )


def _read_statm(directory: int) -> Statm | None:
    return parse_statm(read_text("statm", dir_fd=directory) or "")
