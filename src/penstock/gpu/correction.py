"""What real steps say about an estimate, carried over to other batch sizes.

In:  trials: estimated and measured bytes at a few batch sizes.
Out: ``Correction``: bytes to add at any batch size.
Runs in: trainer, command line; pure.

Allocated bytes are exact to the allocator's 512, so even small batches show what an estimate misses: the line through
the differences is followed to other batch sizes. Its fixed part goes to workspaces (libraries' own memory does not grow
with the batch), its part per sample to activations. Reserved bytes come in segments of up to 20 MiB; a line through
those of two small batches would carry that grain to large ones, many times over. What the allocator keeps beyond the
allocated bytes is therefore corrected by a share of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One batch size, estimated and run."""

    batch_size: int
    fits: bool
    """False: memory ran out, and what was measured is only what there was until then."""
    reserved_bytes: int
    """Measured."""
    allocated_bytes: int
    """Measured."""
    estimated_reserved_bytes: int
    """What tracing alone said."""
    estimated_allocated_bytes: int
    step_s: float | None = None
    """Time of a step; None if it was not reached."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Measured less estimated."""

    fixed_bytes: float = 0.0
    """Allocated bytes, whatever the batch size; counted as workspaces."""
    per_sample_bytes: float = 0.0
    """Allocated bytes for every sample; counted as activations."""
    overhead_share: float = 0.0
    """What torch reserves beyond the allocated bytes, as a share of these."""
    trials: tuple[Trial, ...] = ()
    """What it was learnt from."""

    def allocated(self, batch_size: int, estimated_bytes: int) -> int:
        """Allocated bytes, corrected."""
        return max(0, round(estimated_bytes + self.fixed_bytes + self.per_sample_bytes * batch_size))

    def reserved(self, batch_size: int, allocated_bytes: int, reserved_bytes: int) -> int:
        """Reserved bytes, corrected; given are the estimate's."""
        corrected = self.allocated(batch_size, allocated_bytes)
        kept = reserved_bytes - allocated_bytes + self.overhead_share * corrected
        return corrected + max(0, round(kept))


def correct(trials: Sequence[Trial]) -> Correction:
    """The correction that trials ask for."""
    line = _line([(one.batch_size, one.allocated_bytes - one.estimated_allocated_bytes) for one in trials])
    beyond = sum(
        (one.reserved_bytes - one.allocated_bytes) - (one.estimated_reserved_bytes - one.estimated_allocated_bytes)
        for one in trials
    )
    allocated = sum(one.allocated_bytes for one in trials)
    return Correction(
        fixed_bytes=line[0],
        per_sample_bytes=line[1],
        overhead_share=beyond / allocated if allocated else 0.0,
        trials=tuple(trials),
    )


def _line(points: list[tuple[int, int]]) -> tuple[float, float]:
    """Fixed part and slope by least squares. Of one point nobody knows which part is off: too little may be missing
    for every sample, too much is taken away once only."""
    if not points:
        return 0.0, 0.0
    sizes = {size for size, _ in points}
    mean = sum(difference for _, difference in points) / len(points)
    if len(sizes) == 1:
        return (0.0, mean / sizes.pop()) if mean > 0 else (mean, 0.0)
    middle = sum(size for size, _ in points) / len(points)
    spread = sum((size - middle) ** 2 for size, _ in points)
    slope = sum((size - middle) * (difference - mean) for size, difference in points) / spread
    return mean - slope * middle, slope
