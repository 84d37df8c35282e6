"""Estimates of the GPU memory of a training before the training runs.

In:  functions that make a model and a batch, batch sizes, optimizer, precision, checkpointing, a card.
Out: one ``Estimate`` per batch size; ``Estimator``, which makes estimates for any batch size; ``EstimateComparison``.
Runs in: trainer, command line. Works with or without a GPU, and allocates nothing on the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from penstock.environment import ENVIRONMENT
from penstock.errors import ConfigError
from penstock.gpu import real_steps
from penstock.gpu.allocator.alloc_conf import AllocatorSettings
from penstock.gpu.allocator.simulation import Peak, simulate
from penstock.gpu.calibration import Correction, needs_gpu
from penstock.gpu.calibration import calibrate as calibration_of
from penstock.gpu.card import Card, card
from penstock.gpu.optimizers import MakeOptimizer
from penstock.gpu.trace.trace import Script, script_of
from penstock.gpu.trace.traced_steps import trace_steps
from penstock.gpu.training import MakeBatch, MakeModel, StepFunction, TrainingSetup
from penstock.units import format_bytes, parse_bytes

OVERHEAD, CONTEXT = "allocator_overhead", "cuda_context"
COMPONENTS = (
    "parameters", "gradients", "optimizer_state", "inputs", "activations", "temporaries", "workspaces",
    OVERHEAD, CONTEXT,
)  # fmt: skip
"""The names in ``Estimate.components``, in the order in which they are shown."""

_ALLOCATED_MARGIN, _RESERVED_MARGIN = 0.02, 0.05
"""The largest expected errors of allocated and of reserved bytes, as shares, for an estimate without guesses."""
_MOST_MODULES = 10


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How a component grows with the batch: a fixed part plus bytes per sample, which is a line through two batch
    sizes."""

    fixed_bytes: int
    per_sample_bytes: float

    @property
    def grows(self) -> bool:
        """Whether one more sample changes the component by at least one block of the allocator."""
        return abs(self.per_sample_bytes) >= 512

    def __str__(self) -> str:
        if not self.grows:
            return format_bytes(self.fixed_bytes)
        return f"{format_bytes(self.fixed_bytes)} {self._signed} × batch"

    @property
    def change(self) -> str:
        """What one more sample changes, in words."""
        return f"{self._signed} per sample" if self.grows else "no"

    @property
    def _signed(self) -> str:
        return f"{'-' if self.per_sample_bytes < 0 else '+'} {format_bytes(abs(self.per_sample_bytes))}"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The GPU memory that a training takes with one batch size."""

    batch_size: int
    allocated_bytes: int
    """The peak of the bytes in tensors: ``torch.cuda.max_memory_allocated()``."""
    reserved_bytes: int
    """The peak of the bytes that torch takes from the device: ``torch.cuda.max_memory_reserved()``."""
    device_bytes: int
    """The bytes that nvidia-smi would show: the reserved bytes plus the memory of CUDA itself."""
    components: dict[str, int]
    """Component -> bytes at the peak of allocated bytes. All components add up to ``device_bytes``."""
    peak_phase: str
    """The phase in which allocated bytes reach their peak: "forward", "backward" or "optimizer"."""
    allocated_range: tuple[int, int]
    """The least and the largest value to expect for ``allocated_bytes``."""
    reserved_range: tuple[int, int]
    """The least and the largest value to expect for ``reserved_bytes``."""
    growth: dict[str, Growth] = field(default_factory=dict)
    """Component -> its growth with the batch; empty if steps of different batch sizes have different events."""
    modules: dict[str, int] = field(default_factory=dict)
    """Module -> the bytes of its activations, for the modules with the largest activations."""
    device_memory_bytes: int | None = None
    """The memory of the device; None if not given."""
    fits: bool | None = None
    """Whether the training fits into ``device_memory_bytes``, possibly after the allocator releases cached memory; None
    if the memory of the device is not given."""
    assumptions: tuple[str, ...] = ()
    """The answers that were assumed when the model asked for values of its tensors."""
    correction: Correction | None = None
    """The correction by real steps; None if no steps were run."""
    uncalibrated: Estimate | None = None
    """The estimate before the correction; None if no steps were run."""

    def explain(self) -> str:
        """A few lines of text for people that describe the estimate."""
        low, high = self.reserved_range
        lines = [
            f"batch size {self.batch_size}: {format_bytes(self.allocated_bytes)} allocated, "
            f"{format_bytes(self.reserved_bytes)} reserved ({format_bytes(low)} to {format_bytes(high)}), "
            f"{format_bytes(self.device_bytes)} on the device; peak in the {self.peak_phase} pass"
        ]
        for name in COMPONENTS:
            count = self.components.get(name, 0)
            if count:
                fit = f"   {self.growth[name]}" if name in self.growth else ""
                lines.append(f"  {name.replace('_', ' '):<20}{format_bytes(count):>10}{fit}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class EstimateComparison:
    """A comparison of predicted and measured bytes. Errors are shares of the measured bytes and are positive if the
    prediction is too high."""

    batch_size: int
    predicted_allocated_bytes: int
    measured_allocated_bytes: int
    allocated_error: float
    predicted_reserved_bytes: int
    measured_reserved_bytes: int
    reserved_error: float
    is_within_range: bool
    """Whether both measured figures lie in the ranges of the estimate."""
    retries: int
    """The number of requests for which torch first had to release cached memory. Above 0, the device was nearly
    full."""

    def __str__(self) -> str:
        return (
            f"GPU memory at batch size {self.batch_size}: "
            f"allocated {format_bytes(self.measured_allocated_bytes)} "
            f"(predicted {format_bytes(self.predicted_allocated_bytes)}, {self.allocated_error:+.1%}), "
            f"reserved {format_bytes(self.measured_reserved_bytes)} "
            f"(predicted {format_bytes(self.predicted_reserved_bytes)}, {self.reserved_error:+.1%})"
        )


class Estimator:
    """Estimates the memory of a training at any batch size from one trace of the training."""

    def __init__(
        self, setup: TrainingSetup, device: Card, settings: AllocatorSettings, *, batch_sizes: Sequence[int] = (1,),
        finds_growth: bool = True,
    ) -> None:  # fmt: skip
        """Trace the smallest and the largest of ``batch_sizes``. For other batch sizes the sizes of allocations are
        interpolated.

        ``finds_growth`` means that, if only one batch size is given, a larger one is traced too, to see which
        components grow.
        """
        self.setup, self._card, self._settings = setup.checked(), device, settings
        self.correction: Correction | None = None
        """The correction from real steps, which is applied to every estimate that is made after it is set."""
        low, high = min(batch_sizes), max(batch_sizes)
        self._scripts: dict[int, Script] = {}
        self.assumptions: tuple[str, ...] = ()
        self._main = self._trace(low, high if high > low else 2 * low if finds_growth else None)
        self._growth = self._fit()

    @property
    def is_regular(self) -> bool:
        """Whether one trace is enough for all batch sizes; if not, each batch size is traced."""
        return self._main.is_regular

    @property
    def context_bytes(self) -> int:
        """The memory of the device that CUDA itself takes."""
        return self._card.context_bytes

    def at(self, batch_size: int, *, device_memory_bytes: int | None = None) -> Estimate:
        """The estimate for a batch size."""
        script = self._script(batch_size)
        peak = simulate(script, batch_size, self._settings)
        allocated_range, reserved_range = self._ranges(script, batch_size, peak)
        traced = Estimate(
            batch_size=batch_size,
            allocated_bytes=peak.allocated_bytes,
            reserved_bytes=peak.reserved_bytes,
            device_bytes=peak.reserved_bytes + self._card.context_bytes,
            components=self._components(peak),
            peak_phase=peak.phase,
            allocated_range=allocated_range,
            reserved_range=reserved_range,
            growth=self._growth,
            modules=dict(sorted(peak.modules.items(), key=lambda item: -item[1])[:_MOST_MODULES]),
            device_memory_bytes=device_memory_bytes,
            fits=self._fits(script, batch_size, device_memory_bytes, 0),
            assumptions=self.assumptions,
        )
        return traced if self.correction is None else self._corrected(traced, script, self.correction)

    def _fits(self, script: Script, batch_size: int, device_memory_bytes: int | None, more_bytes: int) -> bool | None:
        if device_memory_bytes is None:
            return None
        limit = int((device_memory_bytes - self._card.context_bytes) * self._settings.memory_fraction) - more_bytes
        return limit > 0 and simulate(script, batch_size, self._settings, limit_bytes=limit).full is None

    def _corrected(self, traced: Estimate, script: Script, by: Correction) -> Estimate:
        size = traced.batch_size
        allocated = by.allocated(size, traced.allocated_bytes)
        reserved = by.reserved(size, traced.allocated_bytes, traced.reserved_bytes)
        components = dict(traced.components)
        components["workspaces"] = max(0, components["workspaces"] + round(by.fixed_bytes))
        components["activations"] = max(0, components["activations"] + round(by.per_sample_bytes * size))
        components[OVERHEAD] = 0
        components[OVERHEAD] = reserved + self._card.context_bytes - sum(components.values())
        return replace(
            traced,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            device_bytes=reserved + self._card.context_bytes,
            components=components,
            # The sizes that were guesses have now been measured.
            allocated_range=_widened(allocated, allocated, _ALLOCATED_MARGIN),
            reserved_range=_widened(reserved, reserved, _RESERVED_MARGIN),
            fits=self._fits(script, size, traced.device_memory_bytes, reserved - traced.reserved_bytes),
            growth={name: _corrected_line(name, line, by) for name, line in traced.growth.items()},
            correction=by,
            uncalibrated=traced,
        )

    def _trace(self, batch_size: int, other: int | None) -> Script:
        sizes = [batch_size, batch_size] + ([other] if other is not None else [])
        trace, assumptions = trace_steps(self.setup, sizes, self._card)
        self.assumptions = assumptions
        return script_of(trace)

    def _script(self, batch_size: int) -> Script:
        if self._main.is_regular or batch_size == self._main.batch_size:
            return self._main
        if batch_size not in self._scripts:
            self._scripts[batch_size] = self._trace(batch_size, None)
        return self._scripts[batch_size]

    def _components(self, peak: Peak) -> dict[str, int]:
        found = {name: peak.parts.get(name, 0) for name in COMPONENTS}
        found[OVERHEAD] = peak.reserved_bytes - sum(peak.parts.values())
        found[CONTEXT] = self._card.context_bytes
        return found

    def _fit(self) -> dict[str, Growth]:
        """For every component, a line through its bytes at the two batch sizes that were traced."""
        low, high = self._main.batch_size, self._main.other_batch_size
        if high is None:
            return {}
        one, two = (self._components(simulate(self._main, size, self._settings)) for size in (low, high))
        found = {}
        for name in COMPONENTS:
            slope = (two[name] - one[name]) / (high - low)
            found[name] = Growth(fixed_bytes=round(one[name] - slope * low), per_sample_bytes=slope)
        return found

    def _ranges(self, script: Script, batch_size: int, peak: Peak) -> tuple[tuple[int, int], tuple[int, int]]:
        peaks = [peak]
        if script.trace.uncertain:
            peaks += [simulate(script, batch_size, self._settings, guess_factor=factor) for factor in (0.0, 2.0)]
        allocated = [one.allocated_bytes for one in peaks]
        reserved = [one.reserved_bytes for one in peaks]
        return (
            _widened(min(allocated), max(allocated), _ALLOCATED_MARGIN),
            _widened(min(reserved), max(reserved), _RESERVED_MARGIN),
        )


def estimate(
    make_model: MakeModel,
    make_batch: MakeBatch,
    batch_sizes: Sequence[int] = (8,),
    optimizer: str | MakeOptimizer = "adamw",
    precision: str = "fp32",
    checkpointing: bool = False,
    device_memory: object = None,
    *,
    accumulation: int = 1,
    step: StepFunction | None = None,
    capability: tuple[int, int] | None = None,
    environment: Mapping[str, str] = ENVIRONMENT,
    calibrate: bool = False,
) -> list[Estimate]:
    """Estimate the GPU memory that the training would take with each of the batch sizes, in order.

    ``make_model()`` returns the model. ``make_batch(n)`` returns n samples as a tensor, as a tuple (passed as
    arguments) or as a mapping (passed as keyword arguments). The loss is the output's ``.loss``, or the output itself.
    ``precision`` is fp32; bf16 or fp16 for autocast around float32 weights; bf16-true or fp16-true for everything in
    this type. ``step(model, batch, optimizer)`` replaces the usual step, which zeroes gradients and runs the forward
    pass, the backward pass and the optimizer. With ``device_memory``, such as "20GB", every estimate says whether the
    training fits. ``capability`` is the compute capability of a card that is not in this machine.
    ``PYTORCH_ALLOC_CONF`` and ``CUBLAS_WORKSPACE_CONFIG`` are read from ``environment``. ``calibrate=True`` runs a few
    real steps at two small batch sizes on this machine's GPU and corrects the estimates; the estimate from tracing
    alone stays in ``uncalibrated``.
    """
    if calibrate:
        needs_gpu("calibrate=True")
    setup = TrainingSetup(
        make_model=make_model, make_batch=make_batch, optimizer=optimizer, precision=precision,
        checkpointing=checkpointing, accumulation=accumulation, step=step,
    )  # fmt: skip
    check_batch_sizes(batch_sizes)
    memory = None if device_memory is None else parse_bytes(device_memory, name="device_memory")
    settings = AllocatorSettings.from_environment(environment)
    estimator = Estimator(setup, card(capability, memory, environment), settings, batch_sizes=batch_sizes)
    if calibrate:
        estimator.correction = calibration_of(estimator, max(batch_sizes), real_steps.measure)
    return [estimator.at(size, device_memory_bytes=memory) for size in batch_sizes]


def compare(
    estimate: Estimate, stats: Mapping[str, Any] | None = None, *, device: torch.device | int | str | None = None
) -> EstimateComparison:
    """Compare an estimate with the peaks since the start, or since ``torch.cuda.reset_peak_memory_stats()``.

    ``stats`` is the result of ``torch.cuda.memory_stats()``; without it the statistics are read from the device.
    """
    if stats is None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "compare: there is no GPU here; pass stats=torch.cuda.memory_stats() from a machine with a GPU"
            )
        stats = torch.cuda.memory_stats(device)

    def within(value: int, between: tuple[int, int]) -> bool:
        return between[0] <= value <= between[1]

    try:
        allocated, reserved = int(stats["allocated_bytes.all.peak"]), int(stats["reserved_bytes.all.peak"])
    except KeyError as missing:
        raise ConfigError(
            f"compare: the statistics have no {missing}; pass the whole result of torch.cuda.memory_stats()"
        ) from None
    if not allocated or not reserved:
        raise ConfigError("compare: nothing has been allocated on this device yet; compare after the first steps")
    is_within_range = within(allocated, estimate.allocated_range) and within(reserved, estimate.reserved_range)
    return EstimateComparison(
        batch_size=estimate.batch_size,
        predicted_allocated_bytes=estimate.allocated_bytes,
        measured_allocated_bytes=allocated,
        allocated_error=estimate.allocated_bytes / allocated - 1,
        predicted_reserved_bytes=estimate.reserved_bytes,
        measured_reserved_bytes=reserved,
        reserved_error=estimate.reserved_bytes / reserved - 1,
        is_within_range=is_within_range,
        retries=int(stats.get("num_alloc_retries", 0)),
    )


def check_batch_sizes(batch_sizes: Sequence[int]) -> None:
    """Raises ConfigError unless all batch sizes are whole numbers of 1 or more."""
    if isinstance(batch_sizes, (str, bytes)) or not isinstance(batch_sizes, Sequence) or not batch_sizes:
        raise ConfigError(f"batch_sizes={batch_sizes!r} is not a list of batch sizes; write [8, 16, 24]")
    for size in batch_sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"batch size {size!r} is not a whole number of 1 or more")


def _corrected_line(name: str, line: Growth, by: Correction) -> Growth:
    """The line of a component after the correction that its bytes get."""
    if name == "workspaces":
        return replace(line, fixed_bytes=line.fixed_bytes + round(by.fixed_bytes))
    if name == "activations":
        return replace(line, per_sample_bytes=line.per_sample_bytes + by.per_sample_bytes)
    return line


def _widened(low: int, high: int, margin: float) -> tuple[int, int]:
    return int(low * (1 - margin)), int(high * (1 + margin))
