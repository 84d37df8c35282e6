"""Estimates are corrected by a few real steps at small batch sizes.

In:  an estimator, the largest requested batch size, a function that runs real steps.
Out: ``Correction``: bytes to add to the estimate for any batch size.
Runs in: trainer, command line, if there is a GPU.

The estimate counts allocated bytes in the allocator's units of 512, so even small batches show the bytes that it
misses, and a line through the differences gives the correction for other batch sizes. The fixed part of the line is
added to workspaces, because the memory of libraries does not grow with the batch; the part per sample is added to
activations. Reserved bytes come in segments of up to 20 MiB, and a line through two small batches would multiply the
rounding of segments for large batches. Reserved bytes beyond the allocated bytes are therefore corrected by a share of
the allocated bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from penstock.errors import ConfigError
from penstock.gpu.real_steps import Measure, RealSteps

if TYPE_CHECKING:
    from penstock.gpu.estimates import Estimate, Estimator

_SHARES = (8, 4)
"""An eighth and a quarter of the largest requested batch size are run."""


@dataclass(frozen=True, kw_only=True)
class BatchTrial(RealSteps):
    """The measurement of one batch size that was run, with the estimate for this batch size."""

    estimated_reserved_bytes: int
    """Estimated by tracing alone."""
    estimated_allocated_bytes: int
    """Estimated by tracing alone."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A correction: the measured bytes minus the estimated bytes."""

    fixed_bytes: float = 0.0
    """Allocated bytes to add at any batch size; they count as workspaces."""
    per_sample_bytes: float = 0.0
    """Allocated bytes to add for each sample; they count as activations."""
    overhead_share: float = 0.0
    """The correction of the reserved bytes beyond the allocated bytes, as a share of the allocated bytes."""
    trials: tuple[BatchTrial, ...] = ()
    """The trials from which the correction is computed."""

    def allocated(self, batch_size: int, estimated_bytes: int) -> int:
        """The allocated bytes after the correction."""
        return max(0, round(estimated_bytes + self.fixed_bytes + self.per_sample_bytes * batch_size))

    def reserved(self, batch_size: int, allocated_bytes: int, reserved_bytes: int) -> int:
        """The reserved bytes after the correction, from the allocated and the reserved bytes of the estimate."""
        corrected = self.allocated(batch_size, allocated_bytes)
        beyond = reserved_bytes - allocated_bytes + self.overhead_share * corrected
        return corrected + max(0, round(beyond))


def calibrate(estimator: Estimator, largest: int, measure: Measure) -> Correction:
    """Run small batches and compare them with the estimate. Raises ConfigError if not even the smallest batch fits."""
    sizes, trials = small_batches(estimator, largest), []
    for size in sizes:
        measured = measure(estimator.setup, size, None)
        if not measured.fits:
            break
        trials.append(trial_of(estimator.at(size), measured))
    if not trials:
        raise ConfigError(
            f"calibrate: not even batch size {sizes[0]} fits into the GPU memory that is free now; free memory, or "
            f"leave calibrate out"
        )
    return correct(trials)


def small_batches(estimator: Estimator, largest: int) -> list[int]:
    """Two small batch sizes whose peak is in the same phase as the peak of the largest size: a peak in the optimizer's
    step does not show activations."""
    phase = estimator.at(largest).peak_phase
    found = sorted({max(1, largest // share) for share in _SHARES})
    while found[0] * 2 <= largest // 2 and estimator.at(found[0]).peak_phase != phase:
        found = [size * 2 for size in found]
    if len(found) == 1:
        found.append(found[0] + 1)
    return [size for size in found if size <= max(largest, 2)]


def trial_of(estimate: Estimate, measured: RealSteps) -> BatchTrial:
    """The measurement together with the estimate from tracing alone."""
    traced = estimate.uncalibrated or estimate
    return BatchTrial(
        **vars(measured),
        estimated_reserved_bytes=traced.reserved_bytes,
        estimated_allocated_bytes=traced.allocated_bytes,
    )


def correct(trials: Sequence[BatchTrial]) -> Correction:
    """The correction that follows from these trials."""
    fixed, per_sample = _line([(one.batch_size, one.allocated_bytes - one.estimated_allocated_bytes) for one in trials])
    beyond = sum(
        (one.reserved_bytes - one.allocated_bytes) - (one.estimated_reserved_bytes - one.estimated_allocated_bytes)
        for one in trials
    )
    allocated = sum(one.allocated_bytes for one in trials)
    return Correction(
        fixed_bytes=fixed,
        per_sample_bytes=per_sample,
        overhead_share=beyond / allocated if allocated else 0.0,
        trials=tuple(trials),
    )


def needs_gpu(argument: str) -> None:
    """Raises ConfigError if there is no GPU that torch can use."""
    if not torch.cuda.is_available():
        raise ConfigError(
            f"{argument} runs real steps, but torch {torch.__version__} finds no GPU here; without {argument} the "
            f"estimate has a range"
        )


def _line(points: list[tuple[int, int]]) -> tuple[float, float]:
    """The fixed part and the slope of a line, found by least squares.

    A single point does not show which part is wrong. To be safe, missing bytes are then added for every sample, but
    surplus bytes are subtracted only once.
    """
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
