"""The meter: facts about the machine, its limits and the memory of a process tree. It decides nothing.

In:  /proc, cgroups, NVML, psutil; all of them injectable through ``Roots``.
Out: frozen dataclasses.
Runs in: trainer, worker, command line. Does not import torch.
"""

from penstock.meter.gpu import Gpu, GpuStatus
from penstock.meter.machine import Limits
from penstock.meter.pressure_gauge import Pressure, PressureRates
from penstock.meter.roots import Roots
from penstock.meter.tree import MemoryReport, ProcessMemory

__all__ = [
    "Gpu",
    "GpuStatus",
    "Limits",
    "MemoryReport",
    "Pressure",
    "PressureRates",
    "ProcessMemory",
    "Roots",
]
