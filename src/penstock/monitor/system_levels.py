"""Figures of the whole machine or container: memory, swap, GPUs.

In:  cgroups, /proc/meminfo; the answers of NVML.
Out: figures, named as in ``figures``.
Runs in: trainer, command line. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.meter import Gpu, Roots
from penstock.meter.limits.memory_bounds import bounds_now, swap_within

_REAL = Roots()


def system_levels(roots: Roots = _REAL) -> dict[str, float]:
    """The smallest limit, the memory in use and available within it, and swap."""
    if not roots.is_linux:
        import psutil

        host, swap = psutil.virtual_memory(), psutil.swap_memory()
        limit, available, swap_used = host.total, host.available, swap.used
    else:
        bounds = bounds_now(roots=roots)
        tightest = min(bounds, key=lambda bound: bound.limit_bytes)
        limit, available = tightest.limit_bytes, min(bound.headroom_bytes for bound in bounds)
        swap_used = swap_within(tightest, roots).used_bytes
    available = min(available, limit)
    return {
        "limit_bytes": float(limit),
        "used_bytes": float(limit - available),
        "available_bytes": float(available),
        "swap_used_bytes": float(swap_used),
    }


def gpu_levels(numbered: Iterable[tuple[int, Gpu]]) -> dict[str, float]:
    """The known figures of each GPU, as ``gpu.N.…``."""
    figures: dict[str, float] = {}
    for number, gpu in numbered:
        busy = gpu.utilisation_percent
        values = {
            "used_bytes": gpu.memory_used_bytes,
            "total_bytes": gpu.memory_total_bytes,
            "busy_fraction": None if busy is None else busy / 100,
            "allocated_bytes": gpu.torch_allocated_bytes,
            "reserved_bytes": gpu.torch_reserved_bytes,
        }
        figures |= {f"gpu.{number}.{name}": float(value) for name, value in values.items() if value is not None}
    return figures
