"""The largest batch that fits a GPU with room to spare.

In:  functions that make a model and a batch, a memory limit, a margin, and optionally the effective batch of a step.
Out: ``BatchSize``: a batch size that is found from the estimate and run for a few steps if there is a GPU, with the
     reason in words.
Runs in: trainer, command line. With or without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from penstock.environment import ENVIRONMENT
from penstock.errors import ConfigError
from penstock.gpu import real_steps
from penstock.gpu.allocator.alloc_conf import AllocatorSettings
from penstock.gpu.calibration import BatchTrial, Correction, correct, needs_gpu, trial_of
from penstock.gpu.card import Card, card
from penstock.gpu.estimates import Estimate, Estimator
from penstock.gpu.optimizers import MakeOptimizer
from penstock.gpu.real_steps import Measure
from penstock.gpu.training import MakeBatch, MakeModel, StepFunction, TrainingSetup
from penstock.gpu.what_ifs import WhatIf, what_if_of
from penstock.units import format_bytes, parse_bytes

MARGIN = 0.1
"""The share of memory that is left free: teams leave 10 to 20%, and 10% is twice the error that an estimate may
have."""
MOST = 65_536
"""The largest batch size that the search tries if ``most=`` is not given."""
MOST_TRIALS = 3
_NEAR = 1.03
"""The trials end at a verified size if the next size to try is larger by at most this factor."""
_FAR = 1.1
"""The last trial stays below the limit by at most this factor, so that a batch that is 15% larger does not fit."""
_OVER = (1.05, 2.0, 4.0)
"""The first, second and third trial that ran out of memory count as these multiples of the limit."""
_BELOW = 3
"""The number of smaller sizes that must fit too: the last batch of an epoch is smaller, and a smaller batch may reserve
more bytes."""
_ABOVE = 4
"""The number of larger sizes that are checked after the binary search."""


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """The result of the search."""

    batch_size: int
    """The number of samples in one batch on the GPU; 0 if not even one sample fits."""
    accumulation_steps: int
    """The number of batches whose gradients are summed in one step; together these batches are the effective batch."""
    largest_batch_size: int
    """The largest batch size that fits; ``batch_size`` is smaller if a smaller size divides the effective batch
    evenly."""
    estimate: Estimate
    """The estimate for ``batch_size``, or for one sample if nothing fits; the trials have corrected it."""
    memory_bytes: int
    """The memory of the device that the training may take, including the memory of CUDA itself."""
    margin: float
    """The share of ``memory_bytes`` that is left free."""
    trials: tuple[BatchTrial, ...]
    """The trials that were run, in order; empty without a GPU."""
    is_verified: bool
    """Whether ``batch_size`` or a larger size was run and left the margin free."""
    reason: str
    would_fit: tuple[WhatIf, ...] = ()
    """The single changes with which one sample fits; empty if a sample fits without a change."""


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
    step: StepFunction | None = None,
    capability: tuple[int, int] | None = None,
    environment: Mapping[str, str] = ENVIRONMENT,
) -> BatchSize:
    """The largest batch size that leaves ``margin`` of the memory free. The arguments about the training are those of
    ``estimate``.

    ``memory``, such as "20GB", is the memory of the device, or the part of that memory that the training may take; the
    default is the free memory of this machine's GPU. ``effective_batch`` is the number of samples in one step of the
    optimizer: if it is given, the result has the batch size and the accumulation for this number. ``verify`` means that
    at most 3 batch sizes are run for a few steps and correct the estimate; by default they are run if there is a GPU.
    """
    _check(margin, effective_batch, most, step)
    if verify:
        needs_gpu("verify=True")
    setup = TrainingSetup(
        make_model=make_model, make_batch=make_batch, optimizer=optimizer, precision=precision,
        checkpointing=checkpointing, step=step,
    ).checked()  # fmt: skip
    runs = torch.cuda.is_available() if verify is None else verify
    asked = None if memory is None else parse_bytes(memory, name="memory")
    device = card(capability, asked, environment)
    settings = AllocatorSettings.from_environment(environment)
    room = _room(asked, device, settings, is_here=runs)
    finder = BatchSizeFinder(
        setup, device, settings, memory_bytes=room, margin=margin, most=most,
        measure=real_steps.measure if runs else None,
    )  # fmt: skip
    return finder.find(effective_batch)


class BatchSizeFinder:
    """The search for the batch size of one training on one GPU."""

    def __init__(
        self, setup: TrainingSetup, device: Card, settings: AllocatorSettings, *, memory_bytes: int, margin: float,
        most: int = MOST, measure: Measure | None = None,
    ) -> None:  # fmt: skip
        """``measure`` runs real steps; with None the search only estimates."""
        self._setup, self._card, self._settings = setup, device, settings
        self._memory_bytes, self._margin, self._most, self._measure = memory_bytes, margin, most, measure
        self._limit_bytes = memory_bytes - device.context_bytes
        self._line_bytes = int(memory_bytes * (1 - margin)) - device.context_bytes

    def find(self, effective_batch: int | None = None) -> BatchSize:
        """Find the batch size. If the effective batch does not fit, it is divided into several batches."""
        if effective_batch is None:
            return self._largest(self._setup, self._most, self._measure)
        most = min(self._most, effective_batch)
        # Only a few trials may run, so the estimate alone decides whether the effective batch is divided.
        found = self._largest(self._setup, most, None)
        if found.batch_size == effective_batch and self._measure is not None:
            found = self._largest(self._setup, most, self._measure)
        if found.batch_size in (0, effective_batch):
            return found
        # Gradients stay allocated between the batches of a step, so fewer samples fit. Two batches are enough to show
        # this.
        found = self._largest(replace(self._setup, accumulation=2), most, self._measure, found.trials)
        return found if not found.batch_size else self._divided(found, effective_batch)

    def _largest(
        self, setup: TrainingSetup, most: int, measure: Measure | None, seen: tuple[BatchTrial, ...] = ()
    ) -> BatchSize:
        """The largest batch size up to ``most``. ``seen`` holds the trials that have already been run."""

        def estimator_for(low: int, high: int) -> Estimator:
            return Estimator(setup, self._card, self._settings, batch_sizes=[low, high])

        size, estimator = find_largest(estimator_for, self._line_bytes, most)
        if not size:
            return self._nothing_fits(estimator.at(1), seen)
        verified, trials = 0, seen
        if measure is not None:
            size, verified, trials = self._tried(estimator, size, most, measure, seen)
            if not size:
                return self._nothing_fits(estimator.at(1), trials)
        return BatchSize(
            batch_size=size,
            accumulation_steps=1,
            largest_batch_size=size,
            estimate=estimator.at(size, device_memory_bytes=self._memory_bytes),
            memory_bytes=self._memory_bytes,
            margin=self._margin,
            trials=trials,
            is_verified=verified == size,
            reason=self._reason(estimator.at(size), trials, verified == size, size == most),
        )

    def _tried(
        self, estimator: Estimator, size: int, most: int, measure: Measure, seen: tuple[BatchTrial, ...]
    ) -> tuple[int, int, tuple[BatchTrial, ...]]:
        """The batch size that the trials lead to, the largest size that ran and left the margin free, and the
        trials."""
        trials = list(seen)
        verified, ceiling = 0, most
        if trials:
            estimator.correction = self._correction(trials)
            size = LargestSearch(estimator, self._line_bytes, ceiling).find() or 1
        while size and len(trials) < MOST_TRIALS:
            trial = trial_of(estimator.at(size), measure(estimator.setup, size, self._limit_bytes))
            trials.append(trial)
            estimator.correction = self._correction(trials)
            if trial.fits and trial.reserved_bytes <= self._line_bytes:
                verified = max(verified, size)
            else:
                ceiling = min(ceiling, size - 1)
            line_bytes = self._line_bytes
            if len(trials) == MOST_TRIALS - 1 and not verified:
                # The last trial has to fit, although the estimate may be wrong by as much as in the trial before.
                line_bytes = int(line_bytes / min(max(_NEAR, trial.reserved_bytes / line_bytes), _FAR))
            # A batch of one is run before the search says that nothing fits, because the estimate may be wrong.
            size = LargestSearch(estimator, line_bytes, ceiling).find() or -(-ceiling // 2)
            if verified and size <= max(verified * _NEAR, verified + 1):
                break
        # A size that ran is preferred to a larger size that is only estimated.
        return verified or size, verified, tuple(trials)

    def _correction(self, trials: list[BatchTrial]) -> Correction:
        """The correction from the trials that fit; if no trial fits, from the last trial."""
        ran = [trial for trial in trials if trial.fits]
        if ran:
            return correct(ran)
        # If memory runs out, the only known fact is that more than the limit was needed.
        last, over = trials[-1], _OVER[min(len(trials), len(_OVER)) - 1]
        reserved = int(max(self._limit_bytes, last.estimated_reserved_bytes) * over)
        share = last.estimated_allocated_bytes / max(1, last.estimated_reserved_bytes)
        return correct([replace(last, reserved_bytes=reserved, allocated_bytes=int(reserved * share))])

    def _divided(self, found: BatchSize, effective_batch: int) -> BatchSize:
        largest = found.batch_size
        steps = -(-effective_batch // largest)
        while effective_batch % steps and effective_batch // steps > largest // 2:
            steps += 1
        words = f"{steps} batches of {effective_batch // steps} make an effective batch of {effective_batch}"
        if effective_batch % steps:
            steps = -(-effective_batch // largest)
            words = (
                f"{effective_batch} does not divide evenly into batches of about {largest}: {steps} batches of "
                f"{-(-effective_batch // steps)} or {effective_batch // steps} samples make it up (torch.tensor_split)"
            )
        size = -(-effective_batch // steps)
        estimate = found.estimate
        if size != largest:
            estimator = Estimator(
                replace(self._setup, accumulation=2), self._card, self._settings, batch_sizes=[size, largest]
            )
            estimator.correction = estimate.correction
            estimate = estimator.at(size, device_memory_bytes=self._memory_bytes)
        return replace(
            found, batch_size=size, accumulation_steps=steps, estimate=estimate, reason=f"{found.reason}; {words}"
        )

    def _reason(self, estimate: Estimate, trials: tuple[BatchTrial, ...], is_verified: bool, is_most: bool) -> str:
        words = (
            f"{estimate.batch_size} samples reserve {format_bytes(estimate.reserved_bytes)} and CUDA takes "
            f"{format_bytes(self._card.context_bytes)}: {estimate.device_bytes / self._memory_bytes:.0%} of "
            f"{format_bytes(self._memory_bytes)}, of which {self._margin:.0%} must stay free"
        )
        if is_most:
            words += "; no larger batch was requested"
        if not trials:
            return f"{words}; the size is estimated, not run"
        return f"{words}; trials: {_ran(trials)}" + ("" if is_verified else "; the chosen size itself was not run")

    def _nothing_fits(self, estimate: Estimate, trials: tuple[BatchTrial, ...]) -> BatchSize:
        choices = [
            choice
            for choice in what_if_of(self._setup, 1, self._card, self._settings)
            if choice.estimate.reserved_bytes <= self._line_bytes
        ]
        help_words = (
            "it would fit with " + ", or ".join(choice.name for choice in choices)
            if choices
            else "no single change of checkpointing, precision or optimizer makes it fit"
        )
        takes = f"it takes {format_bytes(estimate.device_bytes)} of the device"
        if trials:
            takes = f"{takes} by the estimate (trials: {_ran(trials)})"
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
                f"not even one sample fits: {takes}, but "
                f"{format_bytes(self._memory_bytes)} less {self._margin:.0%} are "
                f"{format_bytes(int(self._memory_bytes * (1 - self._margin)))}; {help_words}"
            ),
            would_fit=tuple(choices),
        )


class LargestSearch:
    """Searches for the largest batch size whose estimated reserved bytes stay under ``line_bytes``. Each batch size is
    simulated at most once."""

    def __init__(self, estimator: Estimator, line_bytes: int, most: int) -> None:
        self._estimator, self._line_bytes, self._most = estimator, line_bytes, most
        self._known: dict[int, bool] = {}

    def find(self) -> int:
        """Double the size, then do a binary search, then check the sizes around its result: a size that does not fit
        may lie between sizes that fit."""
        low, high = 0, 1
        while high <= self._most and self._is_under(high):
            low, high = high, high * 2
        high = min(high, self._most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._is_under(middle) else (low, middle)
        around = range(min(low + _ABOVE, self._most), 0, -1)
        return next((size for size in around if self._holds(size)), 0)

    def _holds(self, size: int) -> bool:
        return all(self._is_under(below) for below in range(size, max(0, size - _BELOW - 1), -1))

    def _is_under(self, size: int) -> bool:
        if size not in self._known:
            self._known[size] = self._estimator.at(size).reserved_bytes <= self._line_bytes
        return self._known[size]


def find_largest(estimator_for: Callable[[int, int], Estimator], line_bytes: int, most: int) -> tuple[int, Estimator]:
    """The largest size, which is 0 if not even one sample fits, and the estimator that found it.

    ``estimator_for(low, high)`` traces two batch sizes. The scratch memory of kernels may differ between sizes, so
    sizes near the result are traced in a second pass.
    """
    low, high = min(2, most), min(4, most)
    estimator = estimator_for(low, high)
    found = LargestSearch(estimator, line_bytes, most).find()
    if found <= 2 * high or not estimator.is_regular:
        return found, estimator
    nearer = estimator_for(max(1, found // 2), found)
    return LargestSearch(nearer, line_bytes, most).find(), nearer


def _ran(trials: tuple[BatchTrial, ...]) -> str:
    return ", ".join(
        f"{one.batch_size} reserved {format_bytes(one.reserved_bytes)}"
        if one.fits
        else f"{one.batch_size} ran out of memory"
        for one in trials
    )


def _room(asked: int | None, device: Card, settings: AllocatorSettings, *, is_here: bool) -> int:
    """The memory of the device that the training may take, including the memory of CUDA itself."""
    if is_here:
        here = real_steps.allowed_bytes() + device.context_bytes
        return here if asked is None else min(asked, here)
    memory_bytes = asked or device.memory_bytes
    if memory_bytes is None:
        raise ConfigError('find_batch_size: there is no GPU here; give the memory of a GPU, such as memory="20GB"')
    return int((memory_bytes - device.context_bytes) * settings.memory_fraction) + device.context_bytes


def _check(margin: float, effective_batch: int | None, most: int, step: StepFunction | None) -> None:
    if not 0 <= margin < 1:
        raise ConfigError(f"margin={margin} is not a share of memory to leave free; write 0.1 for 10%")
    for name, value in (("effective_batch", effective_batch), ("most", most)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name}={value!r} is not a whole number of 1 or more")
    if effective_batch is not None and step is not None:
        raise ConfigError(
            "effective_batch= works only with the usual step; a function given as step= has to accumulate gradients "
            "itself"
        )
