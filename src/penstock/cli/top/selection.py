"""Which trainings `penstock top` shows: all that run, one run, a process, all that match.

In:  the choice on the command line.
Out: trainings at each look; the machine they are on.
Runs in: command line. Does not import torch.
"""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import Protocol

import psutil

from penstock.cli.top.trainings import RecordedTraining, StrangeTraining, Training, opened
from penstock.cli.watch.subjects import tree_of
from penstock.errors import PenstockError
from penstock.formatting import one_line
from penstock.meter import Roots, gpu_status
from penstock.monitor.process_trees import WatchedTree, find_roots
from penstock.monitor.runs.format import SUFFIX
from penstock.monitor.runs.home import runs_folder
from penstock.monitor.runs.reader import open_run

_CPU_OVER_S = 0.3


class Gathering(Protocol):
    """Trainings that are looked at again and again."""

    nothing: str
    """What to say where there is none."""

    def look(self, chosen: str | None) -> list[Training]:
        """All of them, ``chosen`` (an id) in detail; None: each in detail."""
        ...

    def recorded(self, training_id: str) -> RecordedTraining | None:
        """The one with valves, if it has any."""
        ...

    def close(self) -> None: ...


class Runs:
    """All runs that go on, newest first; or one, running or not."""

    def __init__(self, home: Path, which: str | None) -> None:
        self.nothing = (
            "no training with a monitor is running; penstock.Monitor(loader) makes one show here, and --pid N or "
            "--match REGEX shows any other"
        )
        self._home = home
        self._only = None if which is None else RecordedTraining(open_run(home, which))
        self._running: dict[str, RecordedTraining] = {}
        self._over: set[str] = set()
        """Records that need not be opened again."""

    def look(self, chosen: str | None) -> list[Training]:
        if self._only is not None:
            return [self._only.look(in_detail=True)]
        self._find()
        shown = []
        for each in sorted(self._running.values(), key=lambda each: each.id, reverse=True):
            try:
                found = each.look(in_detail=chosen in (None, each.id))
            except PenstockError:  # the record was removed
                self._forget(each.id)
                continue
            if found.state != "running":
                self._forget(each.id)
            shown.append(found)
        return shown

    def recorded(self, training_id: str) -> RecordedTraining | None:
        return self._only or self._running.get(training_id)

    def close(self) -> None:
        for each in (*self._running.values(), *([self._only] if self._only else [])):
            each.close()

    def _find(self) -> None:
        for path in runs_folder(self._home).glob(f"*{SUFFIX}"):
            run_id = path.name.removesuffix(SUFFIX)
            if run_id in self._running or run_id in self._over:
                continue
            found = opened(path)
            if found is None:
                self._over.add(run_id)
            else:
                self._running[run_id] = found

    def _forget(self, run_id: str) -> None:
        self._over.add(run_id)
        self._running.pop(run_id).close()


class Processes:
    """A process by its id, or all that match a pattern; those that end stay on the page."""

    def __init__(self, pid: int | None, pattern: re.Pattern[str] | None, roots: Roots) -> None:
        self._pattern = pattern
        self._roots = roots
        self._gpu_library = gpu_status(roots=roots).gpu_library
        self._trees: dict[int, StrangeTraining] = {}
        if pid is not None:
            self._trees[pid] = StrangeTraining(tree_of(pid), roots)
        self.nothing = "" if pattern is None else f"no process matches {one_line(pattern.pattern)!r}"

    def look(self, chosen: str | None) -> list[Training]:
        self._refresh()
        found = self._look()
        if chosen is None and found:
            # Use of processors needs two looks.
            time.sleep(_CPU_OVER_S)
            found = self._look()
        return found

    def recorded(self, training_id: str) -> None:
        return None

    def close(self) -> None: ...

    def _refresh(self) -> None:
        for pid in find_roots(self._pattern) if self._pattern is not None else ():
            if pid not in self._trees:
                with contextlib.suppress(psutil.Error):  # gone meanwhile
                    self._trees[pid] = StrangeTraining(WatchedTree(pid), self._roots)

    def _look(self) -> list[Training]:
        gpus = gpu_status(roots=self._roots).gpus if self._gpu_library == "nvml" else ()
        found = []
        for pid, each in list(self._trees.items()):
            try:
                found.append(each.look(gpus))
            except PenstockError:  # ended before it was seen once
                del self._trees[pid]
        return found
