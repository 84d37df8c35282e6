"""GPUs of this machine, through NVML; none is a normal answer.

In:  the pynvml module where it is installed; torch where the program has loaded it already.
Out: ``GpuStatus`` and in it one ``Gpu`` per device.
Runs in: trainer, command line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device. None: this device or driver does not say."""

    index: int
    """NVML's index, as nvidia-smi shows it; CUDA_VISIBLE_DEVICES does not change it."""
    name: str
    """Product name."""
    uuid: str
    """NVML's id ("GPU-..."), the same in every process and container."""
    memory_total_bytes: int | None
    """Memory of the device."""
    memory_used_bytes: int | None
    """Memory in use, by anyone."""
    utilisation_percent: int | None
    """Share of the last sample period in which a kernel ran."""
    processes: dict[int, int | None] = field(default_factory=dict)
    """Process id -> bytes it holds on the device; in containers the ids may be the host's."""
    torch_allocated_bytes: int | None = None
    """Bytes of live tensors of this process; None where torch is not loaded or has not used CUDA."""
    torch_reserved_bytes: int | None = None
    """Bytes torch's caching allocator of this process keeps, live or not; None as above."""


@dataclass(frozen=True, kw_only=True)
class GpuStatus:
    """The GPUs, or why there are none."""

    gpu_library: Literal["nvml", "missing", "no device"]
    """"nvml": devices were read; "missing": NVML cannot be asked; "no device": nothing to ask about."""
    reason: str
    """The same in words, with what to do where something can be done."""
    gpus: tuple[Gpu, ...]
    """The devices; empty unless ``gpu_library`` is "nvml"."""
