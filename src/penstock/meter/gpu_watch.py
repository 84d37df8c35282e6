"""How busy this process's GPUs are while something runs.

In:  NVML, asked again and again from a thread.
Out: the share of the time in which a kernel ran.
Runs in: trainer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from penstock.meter.gpu import Gpu, gpus
from penstock.meter.processes.looks import Looks


class GpuWatch(Looks):
    """Samples the utilisation of the GPUs on which torch has memory for this process; without any it knows nothing."""

    def __init__(self, *, every_s: float = 0.1, read: Callable[[], tuple[Gpu, ...]] = gpus) -> None:
        super().__init__(every_s=every_s)
        self._read = read
        self._seen: list[float] = []

    @property
    def use(self) -> float | None:
        """Share of the time, 0 to 1, the mean over GPUs; None: this process has used none, or NVML does not say."""
        return statistics.fmean(self._seen) if self._seen else None

    def look(self) -> None:
        mine = [gpu for gpu in self._read() if gpu.torch_reserved_bytes]
        self._seen += [gpu.utilisation_percent / 100 for gpu in mine if gpu.utilisation_percent is not None]
