"""GPU memory of a training, before it runs.

In:  functions that make a model and a batch, batch sizes, optimizer, precision, checkpointing, a card.
Out: one ``Estimate`` per batch size; ``Profile``, which knows them for every batch size.
Runs in: trainer, command line. With or without a GPU; nothing is allocated on one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.environment import ENVIRONMENT
from penstock.errors import ConfigError
from penstock.gpu import real_steps
from penstock.gpu.allocator.alloc_conf import AllocatorSettings
from penstock.gpu.allocator.replay import Peak, play
from penstock.gpu.calibration import calibrate as calibrated
from penstock.gpu.calibration import needs_gpu
from penstock.gpu.card import Card, card
from penstock.gpu.correction import Correction
from penstock.gpu.optimizers import MakeOptimizer
from penstock.gpu.trace.script import Script, script_of
from penstock.gpu.trace.training import MakeBatch, MakeModel, Step, Training
from penstock.units import format_bytes, parse_bytes

OVERHEAD, CONTEXT = "allocator_overhead", "cuda_context"
COMPONENTS = (
    "parameters", "gradients", "optimizer_state", "inputs", "activations", "temporaries", "workspaces",
    OVERHEAD, CONTEXT,
)  # fmt: skip
"""Names in ``Estimate.components``, in the order in which they are shown."""

_ALLOCATED_MARGIN, _RESERVED_MARGIN = 0.02, 0.05
"""How far an uncalibrated estimate may be off where nothing in it is a guess."""
_MOST_MODULES = 10


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How a figure grows with the batch: fixed + per sample × batch size, through two batch sizes."""

    fixed_bytes: int
    per_sample_bytes: float

    @property
    def grows(self) -> bool:
        """Whether a sample more changes it by anything to speak of."""
        return abs(self.per_sample_bytes) >= 512

    def __str__(self) -> str:
        if not self.grows:
            return format_bytes(self.fixed_bytes)
        return f"{format_bytes(self.fixed_bytes)} + {format_bytes(self.per_sample_bytes)} × batch"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a training takes with one batch size."""

    batch_size: int
    allocated_bytes: int
    """Most that tensors take at once: ``torch.cuda.max_memory_allocated()``."""
    reserved_bytes: int
    """Most that torch takes from the device: ``torch.cuda.max_memory_reserved()``."""
    device_bytes: int
    """What nvidia-smi would show: reserved, and CUDA's own."""
    components: dict[str, int]
    """Name -> bytes at the moment when most is allocated; they add up to ``device_bytes``."""
    peak_phase: str
    """When that is: "forward", "backward" or "optimizer"."""
    allocated_range: tuple[int, int]
    """Between what and what ``allocated_bytes`` should lie."""
    reserved_range: tuple[int, int]
    """The same for ``reserved_bytes``."""
    growth: dict[str, Growth] = field(default_factory=dict)
    """Component -> how it grows with the batch; empty if steps of different batch sizes are not alike."""
    modules: dict[str, int] = field(default_factory=dict)
    """The modules whose activations take most, with their bytes."""
    device_memory_bytes: int | None = None
    """What the device has; None: not asked."""
    fits: bool | None = None
    """Whether it does; None: not asked. The allocator may have to give back cached memory for it."""
    assumptions: tuple[str, ...] = ()
    """What was taken for granted where the model looked into its tensors."""
    correction: Correction | None = None
    """What real steps changed in it; None: nothing was run."""
    uncalibrated: Estimate | None = None
    """The estimate before that."""

    def explain(self) -> str:
        """The estimate in a few lines, for people."""
        low, high = self.reserved_range
        lines = [
            f"batch size {self.batch_size}: {format_bytes(self.allocated_bytes)} allocated, "
            f"{format_bytes(self.reserved_bytes)} reserved ({format_bytes(low)} to {format_bytes(high)}), "
            f"{format_bytes(self.device_bytes)} on the device; most in the {self.peak_phase} pass"
        ]
        for name in COMPONENTS:
            count = self.components.get(name, 0)
            if count:
                fit = f"   {self.growth[name]}" if name in self.growth else ""
                lines.append(f"  {name.replace('_', ' '):<20}{format_bytes(count):>10}{fit}")
        return "\n".join(lines)


class Profile:
    """What was learnt about a training by tracing it; estimates for any batch size come from it."""

    def __init__(
        self, training: Training, device: Card, settings: AllocatorSettings, *, batch_sizes: Sequence[int] = (1,)
    ) -> None:
        """Trace with the least and the largest of ``batch_sizes``; all others lie on the lines between."""
        self.training, self._card, self._settings = training.checked(), device, settings
        self.correction: Correction | None = None
        """What real steps say; every estimate made from then on follows it."""
        low, high = min(batch_sizes), max(batch_sizes)
        self._scripts: dict[int, Script] = {}
        self.assumptions: tuple[str, ...] = ()
        self._main = self._trace(low, high if high > low else 2 * low)
        self._growth = self._fit()

    @property
    def is_regular(self) -> bool:
        """Whether one trace serves all batch sizes; if not, each is traced."""
        return self._main.is_regular

    @property
    def context_bytes(self) -> int:
        """What CUDA itself takes of the device."""
        return self._card.context_bytes

    def at(self, batch_size: int, *, device_memory_bytes: int | None = None) -> Estimate:
        """The estimate for a batch size."""
        script = self._script(batch_size)
        peak = play(script, batch_size, self._settings)
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
        return limit > 0 and play(script, batch_size, self._settings, limit_bytes=limit).full is None

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
            # What was guessed has been measured by now.
            allocated_range=_widened(allocated, allocated, _ALLOCATED_MARGIN),
            reserved_range=_widened(reserved, reserved, _RESERVED_MARGIN),
            fits=self._fits(script, size, traced.device_memory_bytes, reserved - traced.reserved_bytes),
            growth={name: _moved(name, line, by) for name, line in traced.growth.items()},
            correction=by,
            uncalibrated=traced,
        )

    def _trace(self, batch_size: int, other: int | None) -> Script:
        sizes = [batch_size, batch_size] + ([other] if other is not None else [])
        trace, assumptions = self.training.trace(sizes, self._card)
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
        """The line of every component through the two batch sizes that were traced."""
        low, high = self._main.batch_size, self._main.other_batch_size
        if high is None:
            return {}
        one, two = (self._components(play(self._main, size, self._settings)) for size in (low, high))
        found = {}
        for name in COMPONENTS:
            slope = (two[name] - one[name]) / (high - low)
            found[name] = Growth(fixed_bytes=round(one[name] - slope * low), per_sample_bytes=slope)
        return found

    def _ranges(self, script: Script, batch_size: int, peak: Peak) -> tuple[tuple[int, int], tuple[int, int]]:
        peaks = [peak]
        if script.trace.uncertain:
            peaks += [play(script, batch_size, self._settings, guess_factor=factor) for factor in (0.0, 2.0)]
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
    step: Step | None = None,
    capability: tuple[int, int] | None = None,
    environment: Mapping[str, str] = ENVIRONMENT,
    calibrate: bool = False,
) -> list[Estimate]:
    """What the training would take on a GPU, for every batch size, in order.

    ``make_model()`` returns the model, ``make_batch(n)`` a tensor, a tuple (passed as arguments) or a mapping (passed
    as keyword arguments) of n samples; the loss is the output's ``.loss``, or the output. ``precision``: fp32; bf16 or
    fp16 for autocast around float32 weights; bf16-true or fp16-true for everything in that type. ``step(model, batch,
    optimizer)`` takes the place of the usual step: zero gradients, forward, backward, optimizer. ``device_memory``
    such as "20GB" makes every estimate say whether it fits. ``capability`` is the card's, for one that is not here.
    ``PYTORCH_ALLOC_CONF`` and ``CUBLAS_WORKSPACE_CONFIG`` are read from ``environment``. ``calibrate=True`` runs a few
    real steps at two small batch sizes on the GPU here and corrects the estimates by them; what tracing alone said
    stays in ``uncalibrated``.
    """
    if calibrate:
        needs_gpu("calibrate=True")
    profile, memory = _prepare(
        Training(
            make_model=make_model,
            make_batch=make_batch,
            optimizer=optimizer,
            precision=precision,
            checkpointing=checkpointing,
            accumulation=accumulation,
            step=step,
        ),
        batch_sizes,
        device_memory,
        capability,
        environment,
    )
    if calibrate:
        profile.correction = calibrated(profile, max(batch_sizes), real_steps.measure)
    return [profile.at(size, device_memory_bytes=memory) for size in batch_sizes]


def _prepare(
    training: Training,
    batch_sizes: Sequence[int],
    device_memory: object,
    capability: tuple[int, int] | None,
    environment: Mapping[str, str],
) -> tuple[Profile, int | None]:
    check_batch_sizes(batch_sizes)
    memory = None if device_memory is None else parse_bytes(device_memory, name="device_memory")
    settings = AllocatorSettings.from_environment(environment)
    return Profile(training, card(capability, memory, environment), settings, batch_sizes=batch_sizes), memory


def check_batch_sizes(batch_sizes: Sequence[int]) -> None:
    """``ConfigError`` unless they are whole numbers from 1 up."""
    if isinstance(batch_sizes, (str, bytes)) or not isinstance(batch_sizes, Sequence) or not batch_sizes:
        raise ConfigError(f"batch_sizes={batch_sizes!r} is not a list of batch sizes; write [8, 16, 24]")
    for size in batch_sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"batch size {size!r} is not a whole number from 1 up")


def _moved(name: str, line: Growth, by: Correction) -> Growth:
    """The line of a component, corrected as the component is."""
    if name == "workspaces":
        return replace(line, fixed_bytes=line.fixed_bytes + round(by.fixed_bytes))
    if name == "activations":
        return replace(line, per_sample_bytes=line.per_sample_bytes + by.per_sample_bytes)
    return line


def _widened(low: int, high: int, margin: float) -> tuple[int, int]:
    return int(low * (1 - margin)), int(high * (1 + margin))
