"""GPU memory of a training, before it runs.

In:  functions that make a model and a batch, batch sizes, optimizer, precision, checkpointing, a card.
Out: one ``Estimate`` per batch size; ``Estimator``, which makes them for every batch size; ``EstimateComparison``.
Runs in: trainer, command line. Works with or without a GPU, and allocates nothing on it.
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
"""Names in ``Estimate.components``, in the order in which they are shown."""

_ALLOCATED_MARGIN, _RESERVED_MARGIN = 0.02, 0.05
"""The error that an estimate without guesses may have."""
_MOST_MODULES = 10


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How a component grows with the batch: fixed + per sample × batch size, a line through two batch sizes."""

    fixed_bytes: int
    per_sample_bytes: float

    @property
    def grows(self) -> bool:
        """Whether one more sample changes it by at least one block of the allocator."""
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
    """Peak of the bytes in tensors: ``torch.cuda.max_memory_allocated()``."""
    reserved_bytes: int
    """Peak of the bytes that torch takes from the device: ``torch.cuda.max_memory_reserved()``."""
    device_bytes: int
    """What nvidia-smi would show: reserved bytes, and those of CUDA itself."""
    components: dict[str, int]
    """Name -> bytes at the peak of allocated bytes; they add up to ``device_bytes``."""
    peak_phase: str
    """The phase of that peak: "forward", "backward" or "optimizer"."""
    allocated_range: tuple[int, int]
    """Least and most that ``allocated_bytes`` should be."""
    reserved_range: tuple[int, int]
    """Least and most that ``reserved_bytes`` should be."""
    growth: dict[str, Growth] = field(default_factory=dict)
    """Component -> how it grows with the batch; empty if steps of different batch sizes have different events."""
    modules: dict[str, int] = field(default_factory=dict)
    """The modules with the largest activations -> their bytes."""
    device_memory_bytes: int | None = None
    """Memory of the device; None: not given."""
    fits: bool | None = None
    """Whether the training fits into ``device_memory_bytes``; None: not given. The allocator may have to release cached
    memory for it."""
    assumptions: tuple[str, ...] = ()
    """The answers assumed where the model asked for values of its tensors."""
    correction: Correction | None = None
    """The correction by real steps; None: no steps were run."""
    uncalibrated: Estimate | None = None
    """The estimate before the correction."""

    def explain(self) -> str:
        """The estimate in a few lines, for people."""
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
    """Predicted and measured bytes. Errors are shares of the measured bytes, positive if the prediction is too high."""

    batch_size: int
    predicted_allocated_bytes: int
    measured_allocated_bytes: int
    allocated_error: float
    predicted_reserved_bytes: int
    measured_reserved_bytes: int
    reserved_error: float
    is_within_range: bool
    """Whether both measured figures lie in the estimate's ranges."""
    retries: int
    """How many requests needed cached memory to be released first; above 0, the device was nearly full."""

    def __str__(self) -> str:
        return (
            f"GPU memory at batch size {self.batch_size}: "
            f"allocated {format_bytes(self.measured_allocated_bytes)} "
            f"(predicted {format_bytes(self.predicted_allocated_bytes)}, {self.allocated_error:+.1%}), "
            f"reserved {format_bytes(self.measured_reserved_bytes)} "
            f"(predicted {format_bytes(self.predicted_reserved_bytes)}, {self.reserved_error:+.1%})"
        )


class Estimator:
    """Estimates a training at any batch size, from one trace of it."""

    def __init__(
        self, setup: TrainingSetup, device: Card, settings: AllocatorSettings, *, batch_sizes: Sequence[int] = (1,),
        finds_growth: bool = True,
    ) -> None:  # fmt: skip
        """Trace the smallest and the largest of ``batch_sizes``. For others, sizes of allocations are interpolated.

        ``finds_growth``: with a single batch size, trace a larger one too, to see what grows.
        """
        self.setup, self._card, self._settings = setup.checked(), device, settings
        self.correction: Correction | None = None
        """From real steps; applied to every estimate that is made after it is set."""
        low, high = min(batch_sizes), max(batch_sizes)
        self._scripts: dict[int, Script] = {}
        self.assumptions: tuple[str, ...] = ()
        self._main = self._trace(low, high if high > low else 2 * low if finds_growth else None)
        self._growth = self._fit()

    @property
    def is_regular(self) -> bool:
        """Whether one trace is enough for all batch sizes; if not, each size is traced."""
        return self._main.is_regular

    @property
    def context_bytes(self) -> int:
        """Memory of the device that CUDA itself takes."""
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
            # The sizes that were guesses are now measured.
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
        """A line for every component, through the two batch sizes that were traced."""
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
    """The GPU memory that the training would take, for every batch size, in order.

    ``make_model()`` returns the model, ``make_batch(n)`` a tensor, a tuple (passed as arguments) or a mapping (passed
    as keyword arguments) of n samples; the loss is the output's ``.loss``, or the output. ``precision``: fp32; bf16 or
    fp16 for autocast around float32 weights; bf16-true or fp16-true for everything in that type. ``step(model, batch,
    optimizer)`` replaces the usual step: zero gradients, forward, backward, optimizer. With ``device_memory`` such as
    "20GB" every estimate says whether it fits. ``capability`` is the compute capability of a card that is not in this
    machine. ``PYTORCH_ALLOC_CONF`` and ``CUBLAS_WORKSPACE_CONFIG`` are read from ``environment``. ``calibrate=True``
    runs a few real steps at two small batch sizes on this machine's GPU and corrects the estimates by them; the
    estimate of tracing alone stays in ``uncalibrated``.
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
    """Compare with the peaks since the start, or since ``torch.cuda.reset_peak_memory_stats()``.

    ``stats``: what ``torch.cuda.memory_stats()`` returned; without it, they are read from the device.
    """
    if stats is None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "compare: there is no GPU here; pass stats=torch.cuda.memory_stats() from a machine with one"
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
    """``ConfigError`` unless they are whole numbers of 1 or more."""
    if isinstance(batch_sizes, (str, bytes)) or not isinstance(batch_sizes, Sequence) or not batch_sizes:
        raise ConfigError(f"batch_sizes={batch_sizes!r} is not a list of batch sizes; write [8, 16, 24]")
    for size in batch_sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"batch size {size!r} is not a whole number of 1 or more")


def _corrected_line(name: str, line: Growth, by: Correction) -> Growth:
    """The component's line, corrected like the component."""
    if name == "workspaces":
        return replace(line, fixed_bytes=line.fixed_bytes + round(by.fixed_bytes))
    if name == "activations":
        return replace(line, per_sample_bytes=line.per_sample_bytes + by.per_sample_bytes)
    return line


def _widened(low: int, high: int, margin: float) -> tuple[int, int]:
    return int(low * (1 - margin)), int(high * (1 + margin))
