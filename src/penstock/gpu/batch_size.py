"""The largest batch that fits a GPU with room to spare.

In:  functions that make a model and a batch, a memory limit, a margin, perhaps the batch size training is to see.
Out: ``BatchSize``: found from the estimate, run for a few steps where a GPU exists, with the reason in words.
Runs in: trainer, command line. With or without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from penstock.environment import ENVIRONMENT
from penstock.errors import ConfigError
from penstock.gpu import real_steps
from penstock.gpu.allocator.alloc_conf import AllocatorSettings
from penstock.gpu.calibration import needs_gpu, trial_of
from penstock.gpu.card import Card, card
from penstock.gpu.correction import Correction, Trial, correct
from penstock.gpu.estimates import Estimate, Profile
from penstock.gpu.largest import Largest, find_largest
from penstock.gpu.optimizers import MakeOptimizer
from penstock.gpu.real_steps import Measure
from penstock.gpu.trace.training import MakeBatch, MakeModel, Step, Training
from penstock.gpu.what_ifs import WhatIf, what_if_of
from penstock.units import format_bytes, parse_bytes

MARGIN = 0.1
"""Left free: the least of what teams leave, 10 to 20%, and twice what an estimate may be off."""
MOST = 65_536
"""A larger batch is not looked for unless it is asked for."""
MOST_TRIALS = 3
_NEAR = 1.03
"""A trial that leaves less than this to gain is the last."""
_FAR = 1.1
"""The last trial stays this far below the line at most: 15% more must not fit."""
_OVER = (1.05, 2.0, 4.0)
"""What ran out of memory at a limit is taken to need so many times the limit: the first time, the second, the third."""


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """What was found."""

    batch_size: int
    """Samples in one batch on the GPU; 0: not even one fits."""
    accumulation_steps: int
    """Batches whose gradients are summed, so that training sees the effective batch."""
    largest_batch_size: int
    """What would fit; ``batch_size`` is less where the effective batch divides better."""
    estimate: Estimate
    """For ``batch_size``; for 1 if nothing fits. Corrected by the trials."""
    memory_bytes: int
    """What of the device the training may take, CUDA's own included."""
    margin: float
    """Share of it that is left free."""
    trials: tuple[Trial, ...]
    """Real steps, in the order in which they were run; empty without a GPU."""
    is_verified: bool
    """Whether ``batch_size``, or a larger one, was run and stayed within the margin."""
    reason: str
    would_fit: tuple[WhatIf, ...] = ()
    """If nothing fits: single changes with which one sample would."""


def find_batch_size(
    make_model: MakeModel,
    make_batch: MakeBatch,
    memory: object = None,
    margin: float = MARGIN,
    effective_batch: int | None = None,
    optimizer: str | MakeOptimizer = "adamw",
    precision: str = "fp32",
    checkpointing: bool = False,
    *,
    most: int = MOST,
    verify: bool | None = None,
    step: Step | None = None,
    capability: tuple[int, int] | None = None,
    environment: Mapping[str, str] = ENVIRONMENT,
) -> BatchSize:
    """The largest batch size that leaves ``margin`` of the memory free. Training arguments as for ``estimate``.

    ``memory`` such as "20GB" is what the device has, or what the training may take of it; without it, what is free on
    the GPU here. ``effective_batch`` is what the optimizer should see in one step: the answer then is the batch and
    the accumulation that make it. ``verify``: run at most 3 batch sizes for a few steps and correct the estimate by
    them; without it, wherever there is a GPU.
    """
    _check(margin, effective_batch, most, step)
    if verify:
        needs_gpu("verify=True")
    training = Training(
        make_model=make_model, make_batch=make_batch, optimizer=optimizer, precision=precision,
        checkpointing=checkpointing, step=step,
    ).checked()  # fmt: skip
    runs = torch.cuda.is_available() if verify is None else verify
    asked = None if memory is None else parse_bytes(memory, name="memory")
    device = card(capability, asked, environment)
    settings = AllocatorSettings.from_environment(environment)
    room = _room(asked, device, settings, is_here=runs)
    finder = Finder(
        training, device, settings, memory_bytes=room, margin=margin, most=most,
        measure=real_steps.measure if runs else None,
    )  # fmt: skip
    return finder.find(effective_batch)


class Finder:
    """The search for one training on one card."""

    def __init__(
        self, training: Training, device: Card, settings: AllocatorSettings, *, memory_bytes: int, margin: float,
        most: int = MOST, measure: Measure | None = None,
    ) -> None:  # fmt: skip
        """``measure``: runs real steps; None: nothing is run."""
        self._training, self._card, self._settings = training, device, settings
        self._memory_bytes, self._margin, self._most, self._measure = memory_bytes, margin, most, measure
        self._limit_bytes = memory_bytes - device.context_bytes
        self._line_bytes = int(memory_bytes * (1 - margin)) - device.context_bytes

    def find(self, effective_batch: int | None = None) -> BatchSize:
        """The batch size; where the effective batch is larger than what fits, in pieces."""
        if effective_batch is None:
            return self._largest(self._training, self._most, self._measure)
        most = min(self._most, effective_batch)
        # Whether it comes in pieces is told by the estimate: trials are few.
        found = self._largest(self._training, most, None)
        if found.batch_size == effective_batch and self._measure is not None:
            found = self._largest(self._training, most, self._measure)
        if found.batch_size in (0, effective_batch):
            return found
        # Between the pieces gradients stay: less fits than without them. Two pieces show all of that.
        found = self._largest(replace(self._training, accumulation=2), most, self._measure, found.trials)
        return found if not found.batch_size else self._in_pieces(found, effective_batch)

    def _largest(
        self, training: Training, most: int, measure: Measure | None, seen: tuple[Trial, ...] = ()
    ) -> BatchSize:
        """``seen``: trials there have been already; they count."""
        size, profile = find_largest(
            lambda low, high: Profile(training, self._card, self._settings, batch_sizes=[low, high]),
            self._line_bytes,
            most,
        )
        if not size:
            return self._nothing_fits(profile.at(1), seen)
        verified, trials = 0, seen
        if measure is not None:
            size, verified, trials = self._tried(profile, size, most, measure, seen)
            if not size:
                return self._nothing_fits(profile.at(1), trials)
        return BatchSize(
            batch_size=size,
            accumulation_steps=1,
            largest_batch_size=size,
            estimate=profile.at(size, device_memory_bytes=self._memory_bytes),
            memory_bytes=self._memory_bytes,
            margin=self._margin,
            trials=trials,
            is_verified=verified == size,
            reason=self._reason(profile.at(size), trials, verified == size, size == most),
        )

    def _tried(
        self, profile: Profile, size: int, most: int, measure: Measure, seen: tuple[Trial, ...]
    ) -> tuple[int, int, tuple[Trial, ...]]:
        """The size after trials, the largest that ran within the margin, and the trials."""
        trials = list(seen)
        verified, ceiling = 0, most
        if trials:
            profile.correction = self._learnt(trials)
            size = Largest(profile, self._line_bytes, ceiling).find() or 1
        while size and len(trials) < MOST_TRIALS:
            trial = trial_of(profile.at(size), measure(profile.training, size, self._limit_bytes))
            trials.append(trial)
            profile.correction = self._learnt(trials)
            if trial.fits and trial.reserved_bytes <= self._line_bytes:
                verified = max(verified, size)
            else:
                ceiling = min(ceiling, size - 1)
            line_bytes = self._line_bytes
            if len(trials) == MOST_TRIALS - 1 and not verified:
                # The last trial has to fit: what was wrong by so much may be so again.
                line_bytes = int(line_bytes / min(max(_NEAR, trial.reserved_bytes / line_bytes), _FAR))
            # That nothing fits is true only of a batch of one that was run.
            size = Largest(profile, line_bytes, ceiling).find() or -(-ceiling // 2)
            if verified and size <= max(verified * _NEAR, verified + 1):
                break
        # What ran counts for more than what a larger one is only said to do.
        return verified or size, verified, tuple(trials)

    def _learnt(self, trials: list[Trial]) -> Correction:
        """From trials that ran to their end, or else from the last that did not."""
        ran = [trial for trial in trials if trial.fits]
        if ran:
            return correct(ran)
        # How much was missing is not known when memory runs out; that it was more than the limit, is.
        last, over = trials[-1], _OVER[min(len(trials), len(_OVER)) - 1]
        reserved = int(max(self._limit_bytes, last.estimated_reserved_bytes) * over)
        share = last.estimated_allocated_bytes / max(1, last.estimated_reserved_bytes)
        return correct([replace(last, reserved_bytes=reserved, allocated_bytes=int(reserved * share))])

    def _in_pieces(self, found: BatchSize, effective_batch: int) -> BatchSize:
        largest = found.batch_size
        steps = -(-effective_batch // largest)
        while effective_batch % steps and effective_batch // steps > largest // 2:
            steps += 1
        words = f"{steps} of {effective_batch // steps} make the {effective_batch} asked for"
        if effective_batch % steps:
            steps = -(-effective_batch // largest)
            words = (
                f"{effective_batch} does not divide into like parts near that size: {steps} batches of "
                f"{-(-effective_batch // steps)} or one less make it (torch.tensor_split)"
            )
        size = -(-effective_batch // steps)
        estimate = found.estimate
        if size != largest:
            training = replace(self._training, accumulation=2)
            profile = Profile(training, self._card, self._settings, batch_sizes=[size, largest])
            profile.correction = estimate.correction
            estimate = profile.at(size, device_memory_bytes=self._memory_bytes)
        return replace(
            found, batch_size=size, accumulation_steps=steps, estimate=estimate, reason=f"{found.reason}; {words}"
        )

    def _reason(self, estimate: Estimate, trials: tuple[Trial, ...], is_verified: bool, is_most: bool) -> str:
        words = (
            f"{estimate.batch_size} samples reserve {format_bytes(estimate.reserved_bytes)} and CUDA takes "
            f"{format_bytes(self._card.context_bytes)}: {estimate.device_bytes / self._memory_bytes:.0%} of "
            f"{format_bytes(self._memory_bytes)}, where {self._margin:.0%} is to stay free"
        )
        if is_most:
            words += "; no larger one was asked for"
        if not trials:
            return f"{words}; estimated, not run"
        return f"{words}; run: {_ran(trials)}" + ("" if is_verified else "; this size itself was not run")

    def _nothing_fits(self, estimate: Estimate, trials: tuple[Trial, ...]) -> BatchSize:
        choices = [
            choice
            for choice in what_if_of(self._training, 1, self._card, self._settings)
            if choice.estimate.reserved_bytes <= self._line_bytes
        ]
        help_words = (
            "it would with " + ", or ".join(choice.name for choice in choices)
            if choices
            else "no single change of checkpointing, precision or optimizer makes it fit"
        )
        takes = f"it takes {format_bytes(estimate.device_bytes)} of the device"
        if trials:
            takes = f"{takes} by the estimate (run: {_ran(trials)})"
        return BatchSize(
            batch_size=0,
            accumulation_steps=1,
            largest_batch_size=0,
            estimate=estimate,
            memory_bytes=self._memory_bytes,
            margin=self._margin,
            trials=trials,
            is_verified=bool(trials),
            reason=(
                f"not even one sample fits: {takes}, and "
                f"{format_bytes(self._memory_bytes)} less {self._margin:.0%} are "
                f"{format_bytes(int(self._memory_bytes * (1 - self._margin)))}; {help_words}"
            ),
            would_fit=tuple(choices),
        )


def _ran(trials: tuple[Trial, ...]) -> str:
    return ", ".join(
        f"{one.batch_size} reserved {format_bytes(one.reserved_bytes)}"
        if one.fits
        else f"{one.batch_size} ran out of memory"
        for one in trials
    )


def _room(asked: int | None, device: Card, settings: AllocatorSettings, *, is_here: bool) -> int:
    """What the training may take of the device, CUDA's own included."""
    if is_here:
        here = real_steps.allowed_bytes() + device.context_bytes
        return here if asked is None else min(asked, here)
    memory_bytes = asked or device.memory_bytes
    if memory_bytes is None:
        raise ConfigError('find_batch_size: there is no GPU here to ask; write memory="20GB" for one that has so much')
    return int((memory_bytes - device.context_bytes) * settings.memory_fraction) + device.context_bytes


def _check(margin: float, effective_batch: int | None, most: int, step: Step | None) -> None:
    if not 0 <= margin < 1:
        raise ConfigError(f"margin={margin} is no share to leave free; write 0.1 for 10%")
    for name, value in (("effective_batch", effective_batch), ("most", most)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name}={value!r} is not a whole number from 1 up")
    if effective_batch is not None and step is not None:
        raise ConfigError("effective_batch= divides the usual step; a step= of your own has to accumulate by itself")
