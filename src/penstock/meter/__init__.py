"""The meter: reads facts about the machine, its limits and the memory of a process tree, and decides nothing.

In:  /proc, cgroups, NVML, psutil. Tests replace all of these through ``Roots``.
Out: frozen dataclasses.
Runs in: trainer, worker, command line. Does not import torch.
"""

from penstock.meter.gpu import Gpu, GpuStatus, gpu_status, gpu_use, gpus
from penstock.meter.limits.machine import Limits, limits, spare_files
from penstock.meter.limits.memory_bounds import headroom_bytes
from penstock.meter.pressure import Pressure, pressure
from penstock.meter.processes.tree import MemoryReport, ProcessMemory, memory
from penstock.meter.processes.tree_meter import TreeMeter
from penstock.meter.processes.tree_parts import TreeParts, require_tree_parts, tree_parts
from penstock.meter.roots import Roots
from penstock.meter.watcher import Watcher

__all__ = [
    "Gpu",
    "GpuStatus",
    "Limits",
    "MemoryReport",
    "Pressure",
    "ProcessMemory",
    "Roots",
    "TreeMeter",
    "TreeParts",
    "Watcher",
    "gpu_status",
    "gpu_use",
    "gpus",
    "headroom_bytes",
    "limits",
    "memory",
    "pressure",
    "require_tree_parts",
    "spare_files",
    "tree_parts",
]
