"""What `penstock watch` watches: this machine, processes with their descendants, or a run.

In:  the choice on the command line.
Out: figures at each check; the reason for the end, once the subject has ended.
Runs in: command line. Does not import torch.
"""

from __future__ import annotations

import contextlib
import re
import time
from typing import Any, Protocol

import psutil

from penstock.environment import state_folder
from penstock.errors import PenstockError
from penstock.formatting import one_line
from penstock.meter import Roots
from penstock.monitor.process_trees import WatchedTree, find_roots
from penstock.monitor.runs.reader import Run, ask, open_run
from penstock.monitor.system_levels import system_levels

_STALE_S = 15.0
"""If the latest point of a run is older than this, its recorder has stopped or hangs: figures then come from the
process itself."""


class Subject(Protocol):
    """Something that uses memory."""

    whose: str
    """The owner of the memory, as the subject of a sentence: "this machine", "process 4242"."""
    facts: dict[str, Any]
    """The facts that commands and webhooks get: pid, run."""
    is_tree: bool
    """Whether the subject has memory of its own, apart from the machine's memory."""

    def sample(self) -> dict[str, float] | str:
        """Figures; or, once the subject has ended, a sentence about the end."""
        ...

    def close(self) -> None: ...


class WatchedMachine:
    """The machine, or the container that this process is in."""

    is_tree = False

    def __init__(self, roots: Roots) -> None:
        self.whose = "this machine"
        self.facts: dict[str, Any] = {}
        self._roots = roots

    def sample(self) -> dict[str, float]:
        return system_levels(self._roots)

    def close(self) -> None: ...


class WatchedProcesses:
    """A process, or all processes whose command line matches, with their descendants."""

    is_tree = True

    def __init__(self, pid: int | None, pattern: re.Pattern[str] | None, roots: Roots) -> None:
        self.whose = (
            f"process {pid}" if pattern is None else f"everything that matches {one_line(pattern.pattern, 40)!r}"
        )
        self.facts: dict[str, Any] = {} if pid is None else {"pid": pid}
        self._pattern = pattern
        self._roots = roots
        self._trees = {} if pid is None else {pid: tree_of(pid)}
        add_matching(self._trees, pattern)
        if pattern is not None and not self._trees:
            raise PenstockError(f"no process matches {one_line(pattern.pattern)!r}; start the training first")

    def sample(self) -> dict[str, float] | str:
        add_matching(self._trees, self._pattern)
        samples = {pid: now for pid, tree in self._trees.items() if (now := tree.sample()) is not None}
        self._trees = {pid: self._trees[pid] for pid in samples}
        if not samples:
            return f"{self.whose} has ended"
        names = {name for now in samples.values() for name in now.figures}
        sums = {name: sum(now.figures.get(name, 0.0) for now in samples.values()) for name in names}
        return system_levels(self._roots) | sums

    def close(self) -> None: ...


class RecordedRun:
    """A training with a monitor, by its record."""

    is_tree = True

    def __init__(self, which: str) -> None:
        self._run: Run = open_run(state_folder(), which)
        self.whose = f"run {self._run.id}"
        self.facts: dict[str, Any] = {"run": self._run.id, "pid": self._run.facts.get("pid")}
        outcome = self._run.outcome
        if outcome is not None:
            self._run.close()
            raise PenstockError(f"{self._run.id} has ended ({outcome.state}): nothing is left to watch")

    def sample(self) -> dict[str, float] | str:
        outcome = self._run.outcome
        if outcome is not None:
            return f"{self.whose} has ended: {outcome.state}" + (f", {one_line(outcome.what)}" if outcome.what else "")
        latest = self._run.latest
        if latest is not None and time.time() - latest.t_s < _STALE_S:
            return latest.figures
        with contextlib.suppress(PenstockError):
            return ask(self._run, {"do": "state"}, timeout_s=2.0).get("state", {}).get("figures", {})
        return {}

    def close(self) -> None:
        self._run.close()


def tree_of(pid: int) -> WatchedTree:
    """Raises PenstockError if there is no such process."""
    try:
        return WatchedTree(pid)
    except psutil.Error:
        raise PenstockError(f"there is no process {pid} here") from None


def add_matching(trees: dict[int, WatchedTree], pattern: re.Pattern[str] | None) -> None:
    """Add the trees of processes that match the pattern and are not in ``trees`` yet."""
    for pid in find_roots(pattern) if pattern is not None else ():
        if pid not in trees:
            with contextlib.suppress(psutil.Error):  # ended in the meantime
                trees[pid] = WatchedTree(pid)
