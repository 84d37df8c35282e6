"""The GPU that an estimate is for: the properties of a GPU that change memory use.

In:  a compute capability, or the GPU of this machine.
Out: ``Card``: the capability, the size of workspaces, the memory that CUDA itself takes.
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
"""The memory of CUDA's context, its modules and its libraries, which torch does not reserve; measured on an H200 with
torch 2.11."""
_MULTIPROCESSORS = {
    (7, 0): 80, (7, 5): 40, (8, 0): 108, (8, 6): 84, (8, 9): 142, (9, 0): 132, (10, 0): 148, (12, 0): 188,
}  # fmt: skip
"""Capability -> the multiprocessors of its largest common card: V100, T4, A100, A40, L40S, H100 and H200, B200, RTX PRO
6000."""
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
"""Capability -> the threads that a multiprocessor runs at the same time; 2048 for all other capabilities."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """The properties of one kind of GPU."""

    capability: tuple[int, int] = (9, 0)
    """The compute capability; (9, 0) is Hopper (H100, H200)."""
    memory_bytes: int | None = None
    """The memory of the device; None if unknown."""
    context_bytes: int = _CONTEXT_BYTES
    """The bytes that nvidia-smi shows in addition to torch's reserved bytes."""
    multiprocessors: int = _MULTIPROCESSORS[9, 0]
    """The number of multiprocessors. Multiplied by the threads of each, it decides how many partial sums and how many
    random streams of cuDNN's dropout there are."""
    blas_config: str = ""
    """The value of CUBLAS_WORKSPACE_CONFIG; "" if it is not set."""

    @property
    def threads_per_multiprocessor(self) -> int:
        """The threads that a multiprocessor runs at the same time."""
        return _THREADS.get(self.capability, 2048)

    @property
    def blas_workspace_bytes(self) -> int:
        """The memory that each cuBLAS handle takes from torch's allocator at its first product and never frees."""
        pairs = re.findall(r":(\d+):(\d+)", self.blas_config)
        if pairs:
            return sum(int(size) * KIB * int(count) for size, count in pairs)
        return 32 * MIB if self.capability[0] in (9, 10, 12) else 8 * MIB + 128 * KIB


def card(
    capability: tuple[int, int] | None = None,
    memory_bytes: int | None = None,
    environment: Mapping[str, str] = ENVIRONMENT,
) -> Card:
    """The card with these properties. Properties that are not given come from the first GPU of this machine, or from a
    Hopper if there is no GPU."""
    if capability is not None and not (len(capability) == 2 and capability[0] >= 5):
        raise ConfigError(f"capability={capability!r} is not a compute capability; write (9, 0) for an H100 or H200")
    here = next(iter(gpus()), None)
    if memory_bytes is None and here is not None:
        memory_bytes = here.memory_total_bytes
    found = _nvml("nvmlDeviceGetCudaComputeCapability") if capability is None else None
    kind = capability or found or (9, 0)
    multiprocessors = _MULTIPROCESSORS.get(kind, Card.multiprocessors)
    if found is not None and (cores := _nvml("nvmlDeviceGetNumGpuCores")):
        # The driver counts cores, not multiprocessors; a multiprocessor has 64 or 128 cores.
        multiprocessors = int(cores) // (64 if found in ((7, 0), (7, 5), (8, 0)) else 128)
    return Card(
        capability=kind,
        memory_bytes=memory_bytes,
        multiprocessors=multiprocessors,
        blas_config=environment.get("CUBLAS_WORKSPACE_CONFIG", ""),
    )


def _nvml(question: str) -> Any:
    """The driver's answer for the first GPU, or None. torch is not used, because it would start CUDA to answer."""
    try:
        import pynvml

        return getattr(pynvml, question)(pynvml.nvmlDeviceGetHandleByIndex(0))
    except Exception:  # no package, no driver, no device, or a driver too old for the question
        return None
