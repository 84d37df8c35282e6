"""Shared memory that the processes of a tree have open, mapped or not.

In:  /proc/<pid>/fd.
Out: bytes, each file counted once.
Runs in: trainer, command line.

PSS alone misses batches on their way: between a worker of torch's that has sent one and the training process that has
not asked for it, nobody maps it. It is an open file of the worker's then.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_SHARED_FILES = ("/dev/shm/", "/memfd:")


def open_shared_bytes(pids: Iterable[int]) -> int:
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            opened = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue
        for path in opened:
            try:
                if str(path.readlink()).startswith(_SHARED_FILES):
                    found = path.stat()
                    sizes[found.st_dev, found.st_ino] = 512 * found.st_blocks
            except OSError:
                continue  # closed meanwhile
    return sum(sizes.values())
