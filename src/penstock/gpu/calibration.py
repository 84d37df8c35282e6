"""Estimates corrected by two or three real steps at small batches.

In:  a profile, the largest batch size asked for, something that runs real steps.
Out: a ``Correction``.
Runs in: trainer, command line, where there is a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.errors import ConfigError
from penstock.gpu.correction import Correction, Trial, correct
from penstock.gpu.real_steps import Measure, Measured

if TYPE_CHECKING:
    from penstock.gpu.estimates import Estimate, Profile

_SHARES = (8, 4)
"""Of the largest batch size asked for: an eighth and a quarter are run."""


def calibrate(profile: Profile, largest: int, measure: Measure) -> Correction:
    """Run small batches and compare. ``ConfigError`` if not even the smallest fits."""
    trials = []
    for size in small_batches(profile, largest):
        measured = measure(profile.training, size, None)
        if not measured.fits:
            break
        trials.append(trial_of(profile.at(size), measured))
    if not trials:
        raise ConfigError(
            f"calibrate: not even batch size {small_batches(profile, largest)[0]} fits this GPU as it is now; free it, "
            f"or leave calibrate out"
        )
    return correct(trials)


def small_batches(profile: Profile, largest: int) -> list[int]:
    """Two sizes, small, but with their peak where the largest has its: in an optimizer's peak no activation shows."""
    phase = profile.at(largest).peak_phase
    found = sorted({max(1, largest // share) for share in _SHARES})
    while found[0] * 2 <= largest // 2 and profile.at(found[0]).peak_phase != phase:
        found = [size * 2 for size in found]
    if len(found) == 1:
        found.append(found[0] + 1)
    return [size for size in found if size <= max(largest, 2)]


def trial_of(estimate: Estimate, measured: Measured) -> Trial:
    """What tracing said beside what was measured."""
    traced = estimate.uncalibrated or estimate
    return Trial(
        batch_size=measured.batch_size,
        fits=measured.fits,
        reserved_bytes=measured.reserved_bytes,
        allocated_bytes=measured.allocated_bytes,
        estimated_reserved_bytes=traced.reserved_bytes,
        estimated_allocated_bytes=traced.allocated_bytes,
        step_s=measured.step_s,
    )


def needs_gpu(what: str) -> None:
    """``ConfigError`` without a GPU that torch can use."""
    if not torch.cuda.is_available():
        raise ConfigError(
            f"{what} runs real steps, and torch {torch.__version__} finds no GPU here; leave it out: the estimate "
            f"then carries its range"
        )
