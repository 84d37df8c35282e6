"""Starting points: settings chosen by platform, GPU memory, cores and RAM, for when nothing can be measured.

In:  the facts of the machine.
Out: ``StartingPoint``, with the source of each figure.
Runs in: anywhere; pure.

These figures are no predictions, but settings that teams started with and kept. A dataset of large samples needs fewer
workers than these; a dataset that waits needs more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.units import format_bytes

_GB = 10**9


@dataclass(frozen=True, kw_only=True)
class StartingMachine:
    """The facts that decide a starting point."""

    platform: str
    """The platform, as in ``sys.platform``."""
    cores: float
    """The number of cores that all ranks together may use, with CPU quotas taken into account."""
    ram_bytes: int
    """The memory of the machine, or the memory limit of its container."""
    gpu_bytes: int | None
    """The memory of one GPU; None if there is no GPU or its memory is unknown."""
    ranks: int
    """The number of training processes on the machine."""


@dataclass(frozen=True, kw_only=True)
class GpuClass:
    """GPUs with about the same memory, and the settings for them."""

    up_to_bytes: float
    """A GPU reports a little more or less memory than its nominal size."""
    name: str
    batch_low: int
    batch_high: int
    workers: int
    prefetch_factor: int


GPU_CLASSES = (
    GpuClass(up_to_bytes=12 * _GB, name="8 GB", batch_low=4, batch_high=8, workers=8, prefetch_factor=2),
    GpuClass(up_to_bytes=20 * _GB, name="16 GB", batch_low=8, batch_high=16, workers=8, prefetch_factor=4),
    GpuClass(
        up_to_bytes=float("inf"), name="24 GB and more", batch_low=16, batch_high=32, workers=16, prefetch_factor=8
    ),
)
NO_GPU = GpuClass(up_to_bytes=0, name="no GPU known", batch_low=8, batch_high=8, workers=8, prefetch_factor=4)
WORKERS_A_GPU = 4
"""The number of workers for each GPU in a machine with several GPUs."""
CACHES = ((96 * _GB, 10 / 64, 20 / 64), (192 * _GB, 20 / 128, 40 / 128), (float("inf"), 50 / 256, 80 / 256))
"""For each size of machine: the largest memory, then the least and the largest share of memory for a cache."""


@dataclass(frozen=True, kw_only=True)
class StartingPoint:
    """Settings to begin with."""

    batch_size: int
    batch_high: int
    """The largest batch size that leaves 10-20% of this GPU's memory free."""
    workers: int
    """Of one rank."""
    workers_on_node: int
    torch_workers: int
    """The number of workers for torch's own loader: 0 on Windows, where torch's worker processes caused failures."""
    prefetch_factor: int
    pin_memory: bool
    cache_low_bytes: int
    cache_high_bytes: int
    """The largest size of the cache, which all processes of a node share."""
    why: tuple[str, ...]
    """The source of each figure, a line for each."""

    def arguments(self) -> dict[str, Any]:
        """Arguments of ``penstock.DataLoader``."""
        return {
            "batch_size": self.batch_size,
            "num_workers": self.workers,
            "prefetch_factor": self.prefetch_factor,
            "persistent_workers": True,
            "pin_memory": self.pin_memory,
            "memory": "auto",
        }

    def to_yaml(self) -> str:
        lines = ["# Starting points: nothing was measured. Figures are for one rank."]
        for key, value in self.arguments().items():
            shown = str(value).lower() if isinstance(value, bool) else value
            lines += ["penstock:", f"  {key}: {shown}"] if key == "memory" else [f"{key}: {shown}"]
        return "\n".join(lines) + "\n"


def starting_point(machine: StartingMachine) -> StartingPoint:
    """Settings to begin with on a machine."""
    gpu_bytes = machine.gpu_bytes
    size = NO_GPU if gpu_bytes is None else next(each for each in GPU_CLASSES if gpu_bytes <= each.up_to_bytes)
    half = max(1, int(machine.cores / 2 / machine.ranks))
    usual = size.workers if machine.ranks == 1 else WORKERS_A_GPU
    workers = min(usual, half)
    is_windows = machine.platform == "win32"
    low, high = next((low, high) for up_to, low, high in CACHES if machine.ram_bytes <= up_to)
    return StartingPoint(
        batch_size=size.batch_low,
        batch_high=size.batch_high,
        workers=workers,
        workers_on_node=workers * machine.ranks,
        torch_workers=0 if is_windows else workers,
        prefetch_factor=size.prefetch_factor,
        pin_memory=gpu_bytes is not None,
        cache_low_bytes=int(low * machine.ram_bytes),
        cache_high_bytes=int(high * machine.ram_bytes),
        why=tuple(_why(machine, size, workers, half, is_windows=is_windows)),
    )


def _why(machine: StartingMachine, size: GpuClass, workers: int, half: int, *, is_windows: bool) -> list[str]:
    known = size.name if machine.gpu_bytes is None else f"a GPU of {size.name} ({format_bytes(machine.gpu_bytes)} here)"
    why = [
        f"batch: {known}; a speech team's settings: 4-8 samples on GPUs of 8 GB, 8-16 on 16 GB, 16-32 on 24 GB and "
        "more, which leave 10-20% of the GPU's memory free"
    ]
    rule = "16 for a GPU of 24 GB and more, else 8 (a speech team's settings)"
    if machine.ranks > 1:
        rule = f"{WORKERS_A_GPU} for each GPU of a machine with several (a video team's settings)"
    limit = (
        f"; half of {machine.cores:g} cores, shared by {machine.ranks} rank{'s' * (machine.ranks > 1)}, is {half} each"
    )
    on_node = workers * machine.ranks
    why.append(f"workers: {rule}{limit}; that makes {workers} per rank, {on_node} on this node")
    if is_windows:
        why.append("platform: on Windows penstock's workers are threads; torch's worker processes stay at 0 there")
    why.append(
        "cache: 10-20 GB on a machine of 64 GB, 20-40 on 128, 50-80 on 256, but never more than half of the memory; "
        f"one cache serves the whole node; this machine has {format_bytes(machine.ram_bytes)}"
    )
    return why
