"""How much a process and its workers grow while something runs.

In:  /proc, looked at again and again from a thread.
Out: the most memory (PSS) there was, beyond what there was at the start; how much of it was shared memory.
Runs in: trainer, command line.
"""

from __future__ import annotations

from typing import Self

from penstock.meter.processes.looks import Looks
from penstock.meter.processes.open_shared import open_shared_bytes
from penstock.meter.processes.tree import MemoryReport, memory


class GrowthWatch(Looks):
    """Samples the memory of this process and its children, and keeps the peaks. None where PSS cannot be read."""

    def __init__(self, *, every_s: float = 0.25) -> None:
        super().__init__(every_s=every_s)
        self._start: MemoryReport | None = None
        self._start_shared_bytes = 0
        self._peak_bytes = self._peak_shared_bytes = self._peak_own_bytes = 0
        self.own_bytes = 0
        """Growth of heaps and stacks as it was last seen."""

    @property
    def is_known(self) -> bool:
        return self._start is not None and self._start.pss_bytes is not None

    @property
    def peak_growth_bytes(self) -> int | None:
        """Most memory seen, less what there was at the start."""
        return max(0, self._peak_bytes) if self.is_known else None

    @property
    def peak_shared_bytes(self) -> int | None:
        """Most growth of shared memory seen: batches on their way."""
        return max(0, self._peak_shared_bytes) if self.is_known else None

    @property
    def peak_own_bytes(self) -> int | None:
        """Most growth of heaps and stacks, the workers' and this process's."""
        return max(0, self._peak_own_bytes) if self.is_known else None

    def __enter__(self) -> Self:
        self._start = memory()
        self._start_shared_bytes = self._shared_bytes(self._start)
        return super().__enter__()

    def forget_peaks(self) -> None:
        """Look for the most there is from now on."""
        self._peak_bytes = self._peak_shared_bytes = self._peak_own_bytes = 0

    def look(self) -> None:
        self._note(memory())

    @staticmethod
    def _shared_bytes(now: MemoryReport) -> int:
        return max(now.pss_shared_bytes or 0, open_shared_bytes(process.pid for process in now.processes))

    def _note(self, now: MemoryReport) -> None:
        start = self._start
        if start is None or now.pss_bytes is None or start.pss_bytes is None:
            return
        shared = self._shared_bytes(now) - self._start_shared_bytes
        apart = (now.pss_bytes - (now.pss_shared_bytes or 0)) - (start.pss_bytes - (start.pss_shared_bytes or 0))
        grown = apart + shared
        self._peak_bytes = max(self._peak_bytes, grown)
        self._peak_shared_bytes = max(self._peak_shared_bytes, shared)
        own = self.own_bytes = (now.pss_anon_bytes or 0) - (start.pss_anon_bytes or 0)
        self._peak_own_bytes = max(self._peak_own_bytes, own)
