"""The GPU an estimate is for: the properties that change memory use.

In:  a compute capability, or the GPU of this machine.
Out: ``Card``: capability, size of workspaces, memory that CUDA itself takes.
Runs in: trainer, command line. Does not start CUDA.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.environment import ENVIRONMENT
from penstock.errors import ConfigError
from penstock.meter.gpu import gpus
from penstock.units import GIB, KIB, MIB

_CONTEXT_BYTES = int(0.75 * GIB)
"""CUDA's context, its modules and the libraries' own memory, which torch does not reserve (H200, torch 2.11)."""
_MULTIPROCESSORS = {
    (7, 0): 80, (7, 5): 40, (8, 0): 108, (8, 6): 84, (8, 9): 142, (9, 0): 132, (10, 0): 148, (12, 0): 188,
}  # fmt: skip
"""Those of the largest common card of each capability: V100, T4, A100, A40, L40S, H100 and H200, B200, RTX PRO 6000."""
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
"""Threads that a multiprocessor runs at once; 2048 for all other capabilities."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """A kind of GPU."""

    capability: tuple[int, int] = (9, 0)
    """Compute capability; (9, 0) is Hopper (H100, H200)."""
    memory_bytes: int | None = None
    """Memory of the device; None: not known."""
    context_bytes: int = _CONTEXT_BYTES
    """What nvidia-smi shows beyond torch's reserved bytes."""
    multiprocessors: int = _MULTIPROCESSORS[9, 0]
    """With the threads of each, they give the number of partial sums and of random streams of cuDNN's dropout."""
    blas_config: str = ""
    """CUBLAS_WORKSPACE_CONFIG; "": not set."""

    @property
    def threads_per_multiprocessor(self) -> int:
        """Threads that a multiprocessor runs at once."""
        return _THREADS.get(self.capability, 2048)

    @property
    def blas_workspace_bytes(self) -> int:
        """Memory that each cuBLAS handle takes from torch's allocator at its first product, and keeps."""
        pairs = re.findall(r":(\d+):(\d+)", self.blas_config)
        if pairs:
            return sum(int(size) * KIB * int(count) for size, count in pairs)
        return 32 * MIB if self.capability[0] in (9, 10, 12) else 8 * MIB + 128 * KIB


def card(
    capability: tuple[int, int] | None = None,
    memory_bytes: int | None = None,
    environment: Mapping[str, str] = ENVIRONMENT,
) -> Card:
    """The card with these properties. Those not given come from the first GPU here, or without one from a Hopper."""
    if capability is not None and not (len(capability) == 2 and capability[0] >= 5):
        raise ConfigError(f"capability={capability!r} is not a compute capability; write (9, 0) for an H100 or H200")
    here = next(iter(gpus()), None)
    if memory_bytes is None and here is not None:
        memory_bytes = here.memory_total_bytes
    found = _nvml("nvmlDeviceGetCudaComputeCapability") if capability is None else None
    kind = capability or found or (9, 0)
    multiprocessors = _MULTIPROCESSORS.get(kind, Card.multiprocessors)
    if found is not None and (cores := _nvml("nvmlDeviceGetNumGpuCores")):
        # The driver counts cores, and a multiprocessor has 64 or 128 of them.
        multiprocessors = int(cores) // (64 if found in ((7, 0), (7, 5), (8, 0)) else 128)
    return Card(
        capability=kind,
        memory_bytes=memory_bytes,
        multiprocessors=multiprocessors,
        blas_config=environment.get("CUBLAS_WORKSPACE_CONFIG", ""),
    )


def _nvml(question: str) -> Any:
    """The driver's answer for the first GPU, or None. torch would start CUDA for it."""
    try:
        import pynvml

        return getattr(pynvml, question)(pynvml.nvmlDeviceGetHandleByIndex(0))
    except Exception:  # no package, no driver, no device, or a driver too old for the question
        return None
