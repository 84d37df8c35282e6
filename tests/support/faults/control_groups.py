"""Full memory: real control groups that kill.

In:  a limit in bytes.
Out: a group to start a training in.
Runs in: test process, as root.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.meter import Roots
from penstock.meter.kernel_files import read_text
from penstock.meter.limits.cgroup_paths import read_cgroups


@contextlib.contextmanager
def control_group(controller: str, *names: str) -> Iterator[list[Path]]:
    """Real groups of ``controller``, each inside the one before; gone afterwards."""
    if os.geteuid() != 0:
        pytest.skip("only root may make control groups")
    hierarchy = read_cgroups(Roots()).hierarchy(controller)
    usable = [level for level in hierarchy.levels if _gives(level, controller)] if hierarchy else []
    if not hierarchy or not usable:
        pytest.skip(f"no control group around this process gives the {controller} controller to groups below it")
    made: list[Path] = []
    parent = usable[0]
    try:
        for name in names:
            parent = parent / f"penstock-{name}-{os.getpid()}"
            try:
                parent.mkdir()
            except OSError as error:
                pytest.skip(f"cannot make a control group here: {error}")
            made.append(parent)
            if hierarchy.version == 2 and len(made) < len(names):
                (parent / "cgroup.subtree_control").write_text(f"+{controller}")
        yield made
    finally:
        for group in reversed(made):
            group.rmdir()


def _gives(group: Path, controller: str) -> bool:
    """v1 groups hand down all they have; v2 groups what they are told to."""
    handed_down = read_text(group / "cgroup.subtree_control")
    return handed_down is None or controller in handed_down.split()


def limit_memory(group: Path, limit_bytes: int) -> None:
    v1 = group / "memory.limit_in_bytes"
    (v1 if v1.exists() else group / "memory.max").write_text(str(limit_bytes))


def enter(group: Path) -> Callable[[], None]:
    def move() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    return move
