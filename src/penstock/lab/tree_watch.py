"""The memory of a training process and its workers at its fullest, told apart by whose it is.

In:  /proc, looked at again and again from a thread.
Out: ``TreeNow``: shared memory, the training process, the workers, at the moment when all together was most.
Runs in: trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.errors import PenstockError
from penstock.meter import memory
from penstock.meter.kernel_files import find_counter
from penstock.meter.processes.looks import Looks
from penstock.meter.processes.open_shared import open_shared_bytes


@dataclass(frozen=True, kw_only=True)
class TreeNow:
    """Memory of a process and its descendants, in parts that add up."""

    shared_bytes: int
    """Shared memory: batches ahead, being built or in use."""
    trainer_bytes: int
    """The process itself: its heap, and the pages of programs and libraries, its workers' included."""
    workers_bytes: int
    """What its descendants have that it does not share with them."""

    @property
    def total_bytes(self) -> int:
        return self.shared_bytes + self.trainer_bytes + self.workers_bytes


def tree_now() -> TreeNow:
    """This process and its descendants. Raises where the system does not tell pages apart."""
    report = memory()
    if report.pss_bytes is None or report.pss_shared_bytes is None or report.pss_anon_bytes is None:
        raise PenstockError(
            "this system does not say whose memory is whose: it is read from /proc/<pid>/smaps_rollup, which Linux "
            "has; penstock bench measures without it"
        )
    own_bytes, files_bytes = _own_bytes()
    return TreeNow(
        shared_bytes=max(report.pss_shared_bytes, open_shared_bytes(process.pid for process in report.processes)),
        # Libraries count in full: how many other programs of this machine use them as well says nothing of this one.
        trainer_bytes=own_bytes + files_bytes,
        # Pages shared since a fork are divided among all who map them; what this process has, it would have anyway.
        workers_bytes=max(0, report.pss_anon_bytes - own_bytes) if len(report.processes) > 1 else 0,
    )


def _own_bytes() -> tuple[int, int]:
    """Heap and files of this process, resident."""
    status = Path("/proc/self/status").read_text()
    return find_counter(status, "RssAnon:") or 0, find_counter(status, "RssFile:") or 0


class TreeWatch(Looks):
    """Looks at the tree while something runs, and keeps the fullest moment."""

    def __init__(self, *, every_s: float = 0.04) -> None:
        super().__init__(every_s=every_s)
        self.start = tree_now()
        self.peak = self.now = self.start
        """The fullest moment since the last ``forget``, and the latest."""

    def forget(self) -> None:
        """The fullest moment is from now on."""
        # Not the latest look: that may be of before, and looks are rare where there are many processes.
        self.peak = self.now = tree_now()

    def look(self) -> None:
        self.now = tree_now()
        if self.now.total_bytes > self.peak.total_bytes:
            self.peak = self.now
