"""Any training, watched from outside: a process and its descendants, chosen by id or by pattern.

In:  a process id, or a pattern of command lines; /proc.
Out: ``TreeSample``: figures named as in ``figures``, and each process with its activity.
Runs in: command line. Does not import torch.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from penstock.meter import MemoryReport, Roots, TreeMeter
from penstock.monitor.runs.facts import without_secrets

_EXACT_UP_TO_BYTES = 32 << 30
"""Resident memory up to which PSS is read. Reading PSS of this much takes half a second, during which page faults of
the training wait."""
_REAL = Roots()
_DOING = {
    psutil.STATUS_RUNNING: "running", psutil.STATUS_SLEEPING: "waiting", psutil.STATUS_IDLE: "waiting",
    psutil.STATUS_DISK_SLEEP: "waiting for disk", psutil.STATUS_STOPPED: "stopped", psutil.STATUS_ZOMBIE: "ended",
    psutil.STATUS_TRACING_STOP: "stopped",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ProcessSample:
    """One process of a tree."""

    pid: int
    name: str
    doing: str
    """running, waiting, waiting for disk, stopped."""
    processors: float | None
    """The number of processors that the process has kept busy since the last sample; None: not known yet."""
    bytes: int
    """Private memory, or resident memory if private memory cannot be read."""


@dataclass(frozen=True, kw_only=True)
class TreeSample:
    """A process and its descendants at one moment."""

    pid: int
    command: str
    """Its command line without secrets."""
    started_s: float
    measure: str
    """How tree_bytes was measured: pss, rss, or sum of parts."""
    figures: dict[str, float]
    """The figures: tree_bytes, which is the sum of trainer_bytes (private to the process), workers_bytes (private to
    its descendants) and other_bytes (shared); processes; processors_busy and read_bytes_per_s since the last sample."""
    processes: tuple[ProcessSample, ...]
    """The processes of the tree, the root first."""


class WatchedTree:
    """One process tree, sampled repeatedly."""

    def __init__(self, pid: int, *, clock: Callable[[], float] = time.monotonic, roots: Roots = _REAL) -> None:
        """Raises psutil.NoSuchProcess."""
        self.pid = pid
        root = psutil.Process(pid)
        self._started_s = root.create_time()
        self._clock = clock
        self._meter = TreeMeter(pid, exact_up_to_bytes=_EXACT_UP_TO_BYTES, clock=clock, roots=roots)
        self._known: dict[int, psutil.Process] = {pid: root}
        self._before: dict[psutil.Process, tuple[float, float]] = {}
        """Processor seconds and bytes read, as of the last sample."""
        self._sampled_s: float | None = None
        self._command = ""

    def sample(self) -> TreeSample | None:
        """The tree now; None once its root has ended."""
        report = self._meter.poll()
        try:
            if not report.processes or not self._known[self.pid].is_running():
                return None
            self._command = self._command or _command(self._known[self.pid])
        except psutil.Error:
            return None
        now_s = self._clock()
        elapsed_s = None if self._sampled_s is None else max(1e-6, now_s - self._sampled_s)
        used = {process: _used(process) for each in report.processes if (process := self._process(each.pid))}
        before, self._before, self._sampled_s = self._before, used, now_s
        # A new process began after the last sample, so all of its use counts.
        more = {
            process: (each[0] - then[0], each[1] - then[1])
            for process, each in used.items()
            if (then := before.get(process, (0.0, 0.0)))
        }
        processes = tuple(self._now(each, more, elapsed_s) for each in report.processes)
        # Ended processes are forgotten, because a training that starts workers for every epoch creates thousands of
        # processes.
        self._known = {pid: process for pid, process in self._known.items() if process in used or pid == self.pid}
        own = [each.bytes for each in processes]
        tree_bytes, measure = _tree_bytes(report)
        figures = {
            "tree_bytes": tree_bytes,
            "trainer_bytes": float(own[0]),
            "workers_bytes": float(sum(own[1:])),
            "other_bytes": max(0.0, tree_bytes - sum(own)),
            "processes": float(len(processes)),
        }
        if elapsed_s is not None:
            figures["processors_busy"] = sum(max(0.0, cpu_s) for cpu_s, _ in more.values()) / elapsed_s
            figures["read_bytes_per_s"] = sum(max(0.0, count) for _, count in more.values()) / elapsed_s
        return TreeSample(
            pid=self.pid, command=self._command, started_s=self._started_s, measure=measure, figures=figures,
            processes=processes,
        )  # fmt: skip

    # -- inside -----------------------------------------------------------------------------

    def _process(self, pid: int) -> psutil.Process | None:
        known = self._known.get(pid)
        try:
            if known is None or not known.is_running():
                known = self._known[pid] = psutil.Process(pid)
        except psutil.Error:
            self._known.pop(pid, None)
            return None
        return known

    def _now(
        self, each: Any, more: dict[psutil.Process, tuple[float, float]], elapsed_s: float | None
    ) -> ProcessSample:
        process = self._known.get(each.pid)
        doing, cpu_s = "ended", None
        if process is not None:
            cpu_s = more.get(process, (None, 0.0))[0]
            try:
                doing = _DOING.get(process.status(), "waiting")
            except psutil.Error:
                pass  # it has ended in the meantime
        return ProcessSample(
            pid=each.pid,
            name=each.name,
            doing=doing,
            processors=None if cpu_s is None or elapsed_s is None else max(0.0, cpu_s) / elapsed_s,
            bytes=each.rss_bytes if each.uss_bytes is None else each.uss_bytes,
        )


def _tree_bytes(report: MemoryReport) -> tuple[float, str]:
    """Memory of the tree, and how it was measured."""
    if report.pss_bytes is not None:
        return float(report.pss_bytes), "pss"
    files = [each.rss_file_bytes for each in report.processes if each.rss_file_bytes is not None]
    if not files or report.rss_bytes <= _EXACT_UP_TO_BYTES:
        return float(report.rss_bytes), "rss"
    # The process that maps the most files and shared memory maps nearly all files and shared memory of the tree.
    return float(report.rss_bytes - sum(files) + max(files)), "sum of parts"


def find_roots(pattern: re.Pattern[str]) -> list[int]:
    """The processes whose command line matches, except descendants of other matching processes, this process and its
    callers."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    for process in psutil.process_iter(["pid", "ppid", "cmdline", "status"]):
        facts = process.info
        parents[facts["pid"]] = facts["ppid"]
        words = facts["cmdline"]
        if words and facts["status"] != psutil.STATUS_ZOMBIE and pattern.search(" ".join(words)):
            found.add(facts["pid"])
    # The command lines of this process and of the shell or tmux that started it contain the pattern itself.
    found -= set(_line(os.getpid(), parents))
    return sorted(pid for pid in found if not found & set(_line(pid, parents)[1:]))


def _line(pid: int, parents: dict[int, int]) -> list[int]:
    """A process, its parent, and all further ancestors."""
    line = [pid]
    while (parent := parents.get(line[-1])) and parent not in line:
        line.append(parent)
    return line


def _used(process: psutil.Process) -> tuple[float, float]:
    """Processor seconds that a process has used and bytes that it has read since its start; 0 if unknown."""
    cpu_s = read = 0.0
    try:
        times = process.cpu_times()
        cpu_s = times.user + times.system
        read = float(getattr(process.io_counters(), "read_chars", 0))
    except (psutil.Error, AttributeError, OSError):
        pass  # it has ended, belongs to another user, or the platform does not count these
    return cpu_s, read


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(without_secrets(process.cmdline())) or process.name()
    except psutil.AccessDenied:
        return process.name()
