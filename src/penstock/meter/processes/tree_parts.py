"""The memory of this process and its descendants, in parts: shared memory, the training process, the workers.

In:  /proc.
Out: ``TreeParts``.
Runs in: trainer, command line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import PenstockError
from penstock.meter.kernel_files import find_counter
from penstock.meter.processes.tree import memory

_SHARED_FILES = ("/dev/shm/", "/memfd:")


@dataclass(frozen=True, kw_only=True)
class TreeParts:
    """One reading of the memory of a process tree."""

    shared_bytes: int
    """The bytes of shared memory, which hold the batches that are ahead, being built or in use."""
    heap_bytes: int
    """The PSS of the heaps and stacks of all processes."""
    file_bytes: int
    """The PSS of mapped files, which are programs and libraries."""
    trainer_bytes: int
    """The bytes of the training process: its heap, and the resident pages of programs and libraries, which workers
    share."""
    workers_bytes: int
    """The heaps and stacks of the workers, without the pages that they share with the training process."""

    @property
    def total_bytes(self) -> int:
        """The sum of all parts, in which libraries count in full."""
        return self.shared_bytes + self.trainer_bytes + self.workers_bytes

    @property
    def pss_bytes(self) -> int:
        """The sum of all parts, in which each library is divided among the processes of the machine that map it."""
        return self.shared_bytes + self.heap_bytes + self.file_bytes


def tree_parts() -> TreeParts | None:
    """The parts of this process and its descendants now; None if the system does not report PSS."""
    report = memory()
    if report.pss_bytes is None or report.pss_shared_bytes is None or report.pss_anon_bytes is None:
        return None
    status = Path("/proc/self/status").read_text()
    own_heap_bytes, own_file_bytes = find_counter(status, "RssAnon:") or 0, find_counter(status, "RssFile:") or 0
    return TreeParts(
        shared_bytes=max(report.pss_shared_bytes, _open_shared_bytes(process.pid for process in report.processes)),
        heap_bytes=report.pss_anon_bytes,
        file_bytes=report.pss_bytes - report.pss_shared_bytes - report.pss_anon_bytes,
        # Libraries count in full, because this program does not decide how many other programs map them.
        trainer_bytes=own_heap_bytes + own_file_bytes,
        # PSS divides pages that are shared since a fork among all processes that map them, but the training process
        # would also hold these pages without workers.
        workers_bytes=max(0, report.pss_anon_bytes - own_heap_bytes) if len(report.processes) > 1 else 0,
    )


def require_tree_parts() -> TreeParts:
    """Like ``tree_parts``, but raises PenstockError if the system does not report PSS."""
    parts = tree_parts()
    if parts is None:
        raise PenstockError(
            "memory cannot be divided among processes on this system: this needs /proc/<pid>/smaps_rollup, which only "
            "Linux has; penstock bench works without this file"
        )
    return parts


def _open_shared_bytes(pids: Iterable[int]) -> int:
    """The bytes of shared memory that these processes have open, whether mapped or not; each file counts once.

    PSS misses batches in transit: after a worker of torch's DataLoader has sent a batch, no process maps the batch
    until the training process receives it. Until then the batch is an open file of the worker.
    """
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
                continue  # the file was closed after the folder was listed
    return sum(sizes.values())
