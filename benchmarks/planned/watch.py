"""Memory of another process and its workers, including batches that no process maps at the moment.

In:  /proc/<pid>/smaps_rollup of the tree, and the machine's shared memory as a whole.
Out: the most there was, beyond what there was at the start.
Runs in: the harness, in a thread. Nothing else may use shared memory meanwhile.

A batch that a worker of torch's has sent, and the training process has not taken, is an open file that no process maps:
no PSS has it. The machine's count does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from child import Child
from peak import Peak, kilobytes, read_tree

_MOST_DUTY = 0.04


def tree_bytes(root: int) -> int:
    """Heaps of the tree (each page once) and all shared memory of the machine."""
    own = sum(process.get("Pss_Anon", 0) for process in read_tree(root, "smaps_rollup"))
    return 1024 * (own + kilobytes(Path("/proc/meminfo").read_text())["Shmem"])


def run_watched(request: dict[str, Any], *, deadline_s: float) -> dict[str, Any]:
    """What a child says of one load, and by how much it and its workers grew meanwhile."""
    with Child("planned.measure", request, deadline_s=deadline_s) as child:
        child.event()
        with Peak(lambda: tree_bytes(child.pid), int, most_duty=_MOST_DUTY) as watch:
            child.go()
            result = child.event()
    return {**result, "growth_bytes": watch.growth_bytes}
