"""Memory of another process and its workers, batches that nobody maps at the moment included.

In:  /proc/<pid>/smaps_rollup of the tree, and the machine's shared memory as a whole.
Out: the most there was, beyond what there was at the start.
Runs in: the harness, in a thread. Nothing else may use shared memory meanwhile.

A batch that a worker of torch's has sent, and the training process has not taken, is an open file that no process maps:
no PSS has it. The machine's count does.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from child import Child

_EVERY_S = 0.03
_MOST_DUTY = 0.04


def tree_bytes(root: int) -> int:
    """Heaps of the tree (each page once) and all shared memory of the machine."""
    own, waiting = 0, [root]
    while waiting:
        process = Path(f"/proc/{waiting.pop()}")
        try:
            for children in process.glob("task/*/children"):
                waiting += map(int, children.read_text().split())
            own += _kilobytes(process / "smaps_rollup", "Pss_Anon:")
        except OSError:
            continue
    return 1024 * (own + _kilobytes(Path("/proc/meminfo"), "Shmem:"))


def _kilobytes(path: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(name)), 0)


class Watch:
    """Keeps the peak from ``__enter__`` to ``__exit__``."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._start = self._peak = tree_bytes(root)

    @property
    def growth_bytes(self) -> int:
        return self._peak - self._start

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s = _EVERY_S
        while not self._ended.wait(pause_s):
            began_s, began_cpu_s = time.monotonic(), time.thread_time()
            self._peak = max(self._peak, tree_bytes(self._root))
            cpu_s = time.thread_time() - began_cpu_s
            pause_s = max(_EVERY_S - (time.monotonic() - began_s), cpu_s * (1 / _MOST_DUTY - 1))


def run_watched(request: dict[str, Any], *, deadline_s: float) -> dict[str, Any]:
    """What a child says of one load, and by how much it and its workers grew meanwhile."""
    with Child("planned.measure", request, deadline_s=deadline_s) as child:
        child.event()
        with Watch(child.pid) as watch:
            child.go()
            result = child.event()
    return {**result, "growth_bytes": watch.growth_bytes}
