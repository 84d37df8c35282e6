"""What `penstock watch` looks at: this machine, a process tree, all that match a pattern, or a run.

In:  which of them.
Out: figures at each look; how it ended, once it has.
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
"""A record that is older has stopped, or its process is stuck; the process itself is asked then."""


class Subject(Protocol):
    """Something that has memory."""

    whose: str
    """As the subject of a sentence."""
    facts: dict[str, Any]
    """For commands and webhooks: pid, run."""
    is_tree: bool
    """Whether it has memory of its own, apart from the machine's."""

    def look(self) -> dict[str, float] | str:
        """Figures, or, once it has ended, how."""
        ...

    def close(self) -> None: ...


class Machine:
    """The machine, or the container this runs in."""

    is_tree = False

    def __init__(self, roots: Roots) -> None:
        self.whose = "this machine"
        self.facts: dict[str, Any] = {}
        self._roots = roots

    def look(self) -> dict[str, float]:
        return system_levels(self._roots)

    def close(self) -> None: ...


class OneProcess:
    """A process and its descendants."""

    is_tree = True

    def __init__(self, pid: int, roots: Roots) -> None:
        self.whose = f"process {pid}"
        self.facts: dict[str, Any] = {"pid": pid}
        self._roots = roots
        self._tree = tree_of(pid)

    def look(self) -> dict[str, float] | str:
        now = self._tree.sample()
        return f"{self.whose} has ended" if now is None else system_levels(self._roots) | now.figures

    def close(self) -> None: ...


class Matching:
    """All processes whose command line matches, with their descendants."""

    is_tree = True

    def __init__(self, pattern: re.Pattern[str], roots: Roots) -> None:
        self.whose = f"what matches {one_line(pattern.pattern, 40)!r}"
        self.facts: dict[str, Any] = {}
        self._pattern = pattern
        self._roots = roots
        self._trees: dict[int, WatchedTree] = {}
        self._refresh()
        if not self._trees:
            raise PenstockError(f"no process matches {one_line(pattern.pattern)!r}; start the training first")

    def look(self) -> dict[str, float] | str:
        self._refresh()
        seen = {pid: now for pid, tree in self._trees.items() if (now := tree.sample()) is not None}
        self._trees = {pid: self._trees[pid] for pid in seen}
        if not seen:
            return f"{self.whose} has ended"
        names = ("tree_bytes", "processes")
        return system_levels(self._roots) | {
            name: sum(now.figures[name] for now in seen.values()) for name in names
        }  # fmt: skip

    def close(self) -> None: ...

    def _refresh(self) -> None:
        for pid in find_roots(self._pattern):
            if pid not in self._trees:
                with contextlib.suppress(psutil.Error):  # gone meanwhile
                    self._trees[pid] = WatchedTree(pid)


class RecordedRun:
    """A training with a monitor, by what it writes down itself."""

    is_tree = True

    def __init__(self, which: str) -> None:
        self._run: Run = open_run(state_folder(), which)
        self.whose = f"run {self._run.id}"
        self.facts: dict[str, Any] = {"run": self._run.id, "pid": self._run.facts.get("pid")}
        outcome = self._run.outcome
        if outcome is not None:
            self._run.close()
            raise PenstockError(f"{self._run.id} is over ({outcome.state}): nothing is left to watch")

    def look(self) -> dict[str, float] | str:
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
    """Raises PenstockError where there is no such process."""
    try:
        return WatchedTree(pid)
    except psutil.Error:
        raise PenstockError(f"there is no process {pid} here") from None
