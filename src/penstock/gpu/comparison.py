"""A prediction beside what was measured.

In:  an estimate; torch's memory statistics, or a GPU to ask.
Out: ``Comparison``.
Runs in: trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import ConfigError
from penstock.gpu.estimates import Estimate
from penstock.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Predicted and measured, in bytes; errors as shares of what was measured, positive if predicted too high."""

    batch_size: int
    predicted_allocated_bytes: int
    measured_allocated_bytes: int
    allocated_error: float
    predicted_reserved_bytes: int
    measured_reserved_bytes: int
    reserved_error: float
    is_within_range: bool
    """Whether both lie in the estimate's ranges."""
    retries: int
    """How often the allocator had to give back cached memory: the device was nearly full."""

    def __str__(self) -> str:
        return (
            f"GPU memory at batch size {self.batch_size}: "
            f"allocated {format_bytes(self.measured_allocated_bytes)} "
            f"(predicted {format_bytes(self.predicted_allocated_bytes)}, {self.allocated_error:+.1%}), "
            f"reserved {format_bytes(self.measured_reserved_bytes)} "
            f"(predicted {format_bytes(self.predicted_reserved_bytes)}, {self.reserved_error:+.1%})"
        )


def compare(
    estimate: Estimate, stats: Mapping[str, Any] | None = None, *, device: torch.device | int | str | None = None
) -> Comparison:
    """The estimate against the peaks since the start, or since ``torch.cuda.reset_peak_memory_stats()``.

    ``stats``: what ``torch.cuda.memory_stats()`` returned; without it, the device is asked.
    """
    if stats is None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "compare: no GPU here to ask; pass stats=torch.cuda.memory_stats() from where there is one"
            )
        stats = torch.cuda.memory_stats(device)
    try:
        allocated, reserved = int(stats["allocated_bytes.all.peak"]), int(stats["reserved_bytes.all.peak"])
    except KeyError as missing:
        raise ConfigError(
            f"compare: the statistics have no {missing}; pass torch.cuda.memory_stats() as it is"
        ) from None
    if not allocated or not reserved:
        raise ConfigError("compare: nothing has been allocated on this device yet; compare after the first steps")
    within = _lies(allocated, estimate.allocated_range) and _lies(reserved, estimate.reserved_range)
    return Comparison(
        batch_size=estimate.batch_size,
        predicted_allocated_bytes=estimate.allocated_bytes,
        measured_allocated_bytes=allocated,
        allocated_error=estimate.allocated_bytes / allocated - 1,
        predicted_reserved_bytes=estimate.reserved_bytes,
        measured_reserved_bytes=reserved,
        reserved_error=estimate.reserved_bytes / reserved - 1,
        is_within_range=within,
        retries=int(stats.get("num_alloc_retries", 0)),
    )


def _lies(value: int, between: tuple[int, int]) -> bool:
    return between[0] <= value <= between[1]
