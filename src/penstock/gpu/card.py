"""The card that is estimated for: what of its kind changes memory.

In:  a compute capability, or the GPU of this machine.
Out: ``Card``: workspaces, which attention kernels it runs, what CUDA itself takes.
Runs in: trainer, command line. Does not wake CUDA.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.environment import ENVIRONMENT
from penstock.errors import ConfigError
from penstock.meter.gpu import gpus
from penstock.units import GIB, KIB, MIB

_CONTEXT_BYTES = int(0.75 * GIB)
"""CUDA's context, its modules and the libraries' own memory on an H200, torch 2.11: beyond what torch reserves."""
_MULTIPROCESSORS = {
    (7, 0): 80, (7, 5): 40, (8, 0): 108, (8, 6): 84, (8, 9): 142, (9, 0): 132, (10, 0): 148, (12, 0): 188,
}  # fmt: skip
"""Of the largest common card of each capability: V100, T4, A100, A40, L40S, H100 and H200, B200, RTX PRO 6000."""
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
"""That a multiprocessor runs at once; of all others it is 2048."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """A kind of GPU."""

    capability: tuple[int, int] = (9, 0)
    """Compute capability; (9, 0) is Hopper (H100, H200)."""
    memory_bytes: int | None = None
    """What the device has; None: not known."""
    context_bytes: int = _CONTEXT_BYTES
    """What nvidia-smi shows beyond torch's reserved bytes."""
    multiprocessors: int = _MULTIPROCESSORS[9, 0]
    """Partial sums, and the random numbers of cuDNN's dropout, are as many as they can run threads."""
    blas_config: str = ""
    """CUBLAS_WORKSPACE_CONFIG; "": not set."""

    @property
    def threads_per_multiprocessor(self) -> int:
        """That run at once."""
        return _THREADS.get(self.capability, 2048)

    @property
    def blas_workspace_bytes(self) -> int:
        """What each cuBLAS handle keeps for itself, from torch's allocator, from its first product on."""
        pairs = re.findall(r":(\d+):(\d+)", self.blas_config)
        if pairs:
            return sum(int(size) * KIB * int(count) for size, count in pairs)
        return 32 * MIB if self.capability[0] in (9, 10, 12) else 8 * MIB + 128 * KIB


def card(
    capability: tuple[int, int] | None = None,
    memory_bytes: int | None = None,
    environment: Mapping[str, str] = ENVIRONMENT,
) -> Card:
    """The card asked for; where nothing is asked, the first GPU here, and without one a Hopper."""
    if capability is not None and not (len(capability) == 2 and capability[0] >= 5):
        raise ConfigError(f"capability={capability!r} is no compute capability; write (9, 0) for an H100 or H200")
    here = next(iter(gpus()), None)
    if memory_bytes is None and here is not None:
        memory_bytes = here.memory_total_bytes
    found = _capability_here() if capability is None else None
    kind = capability or found or (9, 0)
    usual = _MULTIPROCESSORS.get(kind, Card.multiprocessors)
    return Card(
        capability=kind,
        memory_bytes=memory_bytes,
        multiprocessors=usual if found is None else _multiprocessors_here(found) or usual,
        blas_config=environment.get("CUBLAS_WORKSPACE_CONFIG", ""),
    )


def _capability_here() -> tuple[int, int] | None:
    """Of the first GPU of this machine; asked of the driver, as torch would start CUDA for it."""
    try:
        import pynvml

        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(0))
    except Exception:  # no package, no driver, no device, an old driver: all the same here
        return None
    return int(major), int(minor)


def _multiprocessors_here(capability: tuple[int, int]) -> int | None:
    """Of the first GPU; the driver counts cores, and a multiprocessor of these capabilities has 64 or 128."""
    try:
        import pynvml

        cores = pynvml.nvmlDeviceGetNumGpuCores(pynvml.nvmlDeviceGetHandleByIndex(0))
    except Exception:  # no NVML, no card, or a driver too old to count cores
        return None
    return int(cores) // (64 if capability in ((7, 0), (7, 5), (8, 0)) else 128)
