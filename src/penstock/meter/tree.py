"""Memory of a process and all its descendants.

In:  /proc/<pid>/{stat,statm,smaps_rollup,task/*/children}.
Out: ``MemoryReport``, one ``ProcessMemory`` per process.
Runs in: trainer, command line.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    """Resident pages, each shared one divided by the processes that map it; None: not read, or not allowed."""
    uss_bytes: int | None
    """Pages no other process maps: what a kill would free; None: not read, or not allowed."""


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
    """True: PSS and USS were read for this report. False: they are missing, or carried on from an earlier one."""
    skipped: tuple[int, ...]
    """Processes the sums lack: gone before they were read, or another user's (then only PSS and USS lack)."""
