"""When a fault strikes: a count of passes that all processes share and that survives those it kills.

In:  passes through a point, from any process.
Out: whether this pass is to be the one.
Runs in: test process and workers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Trigger:
    """Fires at every ``every``-th pass after the first ``skip``, ``times`` times in all.

    A worker's successor makes a pass of its own, so with ``every`` above 1 a retried task gets through, unless it comes
    to the point at just the wrong passes. With ``rest`` it does so at the third try at the latest: after every second
    time, so many passes are left alone.
    """

    path: Path
    every: int = 1
    times: int = 1
    skip: int = 0
    rest: int = 0

    def fires(self) -> bool:
        fd = os.open(self.path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        try:
            os.write(fd, b".")
            # An appending write leaves the offset at its own end: a number no other pass has.
            number = os.lseek(fd, 0, os.SEEK_CUR) - self.skip
        finally:
            os.close(fd)
        return self._fired_by(number) > self._fired_by(number - 1)

    @property
    def passes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def fired(self) -> int:
        """How often it has fired so far, in whatever process."""
        return self._fired_by(self.passes - self.skip)

    def _fired_by(self, number: int) -> int:
        pairs, more = divmod(max(0, number), 2 * self.every + self.rest)
        return min(self.times, 2 * pairs + min(2, more // self.every))
