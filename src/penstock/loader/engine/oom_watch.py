"""Why a worker died, as far as the machine can tell.

In:  the meter's OOM counter, before and after.
Out: a sentence with numbers and the next move, or nothing.
Runs in: trainer.
"""

from __future__ import annotations

from penstock.meter import limits, pressure
from penstock.units import format_bytes


class OomWatch:
    """Remembers the OOM counter from when the pipeline began."""

    def __init__(self) -> None:
        self._before = pressure().oom_kills

    def sentence(self) -> str | None:
        """What to say if the kernel has killed for memory since; None if it has not, or cannot be asked."""
        now = pressure().oom_kills
        if now is None or self._before is None or now <= self._before:
            return None
        found = limits()
        return (
            f"the kernel's out-of-memory counter rose by {now - self._before} meanwhile: the memory limit here is "
            f"{format_bytes(found.memory_limit_bytes)} ({found.memory_limit_source}), of which "
            f"{format_bytes(found.memory_available_bytes)} is left; lower num_workers, batch_size or memory=, load "
            "less per sample, or raise the limit"
        )
