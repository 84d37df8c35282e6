"""Who is whose child.

In:  /proc/<pid>/task/<tid>/children where the kernel keeps them; else the parent in every /proc/<pid>/stat.
Out: ``Children.of(pid)``.
Runs in: trainer, command line.
"""

from __future__ import annotations

import os
from collections import defaultdict

from penstock.meter.kernel_files import parse_count, read_text
from penstock.meter.processes.process import parse_stat
from penstock.meter.roots import Roots


class Children:
    """Parents and children as they are now; make a new one for the next look.

    The kernel's own lists cost 12 µs per process and 3 µs per further thread. Kernels built without them
    (CONFIG_PROC_CHILDREN) take one look at every process of the machine, 12 µs each.
    """

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._by_parent: dict[int, list[int]] | None = None

    def of(self, pid: int) -> list[int]:
        """Children of ``pid``, in no order that means anything; none if it is gone."""
        if self._by_parent is None:
            listed = self._listed(pid)
            if listed is not None:
                return listed
            self._by_parent = self._scan()
        return self._by_parent.get(pid, [])

    def _listed(self, pid: int) -> list[int] | None:
        """Children of all threads, or None where this kernel keeps no lists."""
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
        names = os.listdir(directory)  # noqa: PTH208 - names alone are needed, thousands of them
    except OSError:
        return []
    return [number for name in names if (number := parse_count(name)) is not None]
