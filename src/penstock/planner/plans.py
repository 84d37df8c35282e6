"""Plans: settings with their predicted memory, their predicted speed and the reason for choosing them.

In:  a profile, the facts of the machine, the loader's rules, a batch size, a budget, the length of a step.
Out: ``PlanTable``: the plans safe, balanced, fast, extreme and bigger batch; one of them is recommended.
Runs in: anywhere; pure: the same facts give the same plans.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from penstock.errors import ConfigError
from penstock.planner import wording
from penstock.planner.choices import Tried, choose, larger_batch, largest_fitting, try_all
from penstock.planner.profile import Profile
from penstock.planner.simulate.pipeline import Load
from penstock.planner.simulate.rules import Rules
from penstock.planner.simulate.torch_pipeline import simulate_torch
from penstock.units import MIB, format_bytes, parse_size

NAMES = ("safe", "balanced", "fast", "extreme", "bigger batch")
"""The names of the plans in every table, in this order."""
CALM, TIGHT = 0.65, 0.76
"""Shares of the free memory. A plan that takes less than the first share has a low risk; above the second share the
risk is high."""
_MEASURED, _STATED = 0.1, 0.35
"""The errors to expect, as shares, of a prediction from measurements here and of a prediction from stated figures."""
_TORCHS = 0.2
"""The least error to expect of a prediction about torch's loader, because torch's loader has no memory limit."""
_ALIKE = 0.985
"""A plan that reaches this share of another plan's speed counts as equally fast, and the plan that takes less memory is
then better."""
_SLACK = 1.5
"""The limit of a plan, as a multiple of the predicted memory: workers would wait whenever they reach a tighter
limit."""
_USUAL_PREFETCH = 2
"""torch's default; with a smaller prefetch factor torch's workers wait until their next batch is requested."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """A predicted figure and its expected range."""

    low: float
    expected: float
    high: float

    @classmethod
    def around(cls, expected: float, share: float) -> Range:
        return cls(low=expected * max(0.0, 1 - share), expected=expected, high=expected * (1 + share))


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The resources of the machine that this training may use."""

    cores: float
    """The number of cores that one rank may use, with CPU quotas taken into account."""
    available_bytes: int
    """The memory that is now free for all ranks together, in the container if there is one."""
    gpu_bytes: int | None = None
    """The memory of a rank's GPU; None if there is no GPU or its memory is unknown."""
    ranks: int = 1
    """The number of training processes on this machine; all figures of a plan are for one process."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings, and the memory and speed predicted for them."""

    name: str
    workers: int
    """The number of workers of one rank."""
    workers_on_node: int
    """The number of workers of all ranks on the machine."""
    depth: int
    """The number of batches ahead in penstock's loader."""
    prefetch_factor: int
    """torch's prefetch factor, which also limits penstock's loader."""
    batch_size: int
    memory: Range
    """The host memory that penstock's loader takes, in bytes."""
    torch_memory: Range
    """The host memory that torch's DataLoader takes with the same workers and prefetch factor."""
    samples_per_s: Range
    speed: float
    """The samples per second, as a share of the fastest plan's."""
    wait: float | None
    """The share of its time that the training loop waits for data; None if the length of a training step is unknown."""
    first_batch_s: float
    in_flight: int
    """The largest number of samples that are loaded or being loaded at the same time."""
    pin_memory: bool
    persistent_workers: bool
    budget_bytes: int
    """The value for ``memory=``: a little more than the upper estimate, or the budget if the budget is smaller."""
    fits: bool
    """Whether the upper estimate is within the budget."""
    risk: str
    """low, medium or high, depending on the share of the free memory that the plan may take."""
    suits: str
    pros: tuple[str, ...]
    cons: tuple[str, ...]
    reason: str

    def arguments(self) -> dict[str, Any]:
        """Arguments of ``penstock.DataLoader``; torch's DataLoader has all of these arguments except ``memory``."""
        return {
            "batch_size": self.batch_size,
            "num_workers": self.workers,
            "prefetch_factor": self.prefetch_factor,
            "persistent_workers": self.persistent_workers,
            "pin_memory": self.pin_memory,
            "memory": f"{max(1, self.budget_bytes // MIB)}MiB",
        }


@dataclass(frozen=True, kw_only=True)
class Least:
    """The settings that work with the least memory."""

    memory_bytes: int
    """The smallest budget that is enough for any settings at this batch size."""
    workers: int
    depth: int
    speed: float
    """The speed of these settings, as a share of the fastest plan's samples per second."""
    batch_size: int | None = None
    """The largest batch size that fits the given budget; None if no batch fits, or if the present batch size does."""


@dataclass(frozen=True, kw_only=True)
class PlanTable:
    """All plans of one dataset on one machine."""

    profile: Profile
    facts: Facts
    budget_bytes: int
    """The memory that one rank's loader may take."""
    step_s: float | None
    plans: tuple[Plan, ...]
    recommended: Plan
    """The recommended plan, which takes the least memory of the fastest plans within the budget."""
    least: Least
    """The settings that work with the least memory, for when no plan fits the budget."""
    notes: tuple[str, ...] = field(default=())
    """Further facts that matter to the user."""

    def __getitem__(self, name: str) -> Plan:
        """The plan called ``name``."""
        for plan in self.plans:
            if plan.name == name:
                return plan
        raise KeyError(f"{name}; there are {', '.join(plan.name for plan in self.plans)}")

    def explain(self) -> str:
        """Several lines of text: the recommended plan and the reasons for it."""
        return "\n".join((f"Recommended: {self.recommended.name}.", *wording.describe(self.recommended), *self.notes))

    def to_yaml(self, plan: Plan | None = None) -> str:
        """The settings of ``plan``, or of the recommended plan, as YAML. torch's settings have torch's own keys, so
        that they can be used without penstock; penstock's settings are in a section of their own."""
        plan = self.recommended if plan is None else plan
        memory, theirs = plan.memory, plan.torch_memory
        lines = [
            f"# {' '.join(self.profile.name.split())}: the {plan.name} plan, for one rank of {self.facts.ranks}.",
            f"# Host memory: {format_bytes(memory.expected)} ({format_bytes(memory.low)} to "
            f"{format_bytes(memory.high)}) with penstock, {format_bytes(theirs.expected)} with torch's DataLoader.",
        ]
        arguments = plan.arguments()
        ours = {"memory": arguments.pop("memory")}
        lines += [f"{key}: {_yaml(value)}" for key, value in arguments.items()]
        lines += ["penstock:", *(f"  {key}: {value}" for key, value in ours.items())]
        return "\n".join(lines) + "\n"

    def as_json(self) -> dict[str, Any]:
        """The whole table except the single samples of the profile, which only the profile's own file holds."""
        seen = self.profile.as_json()
        figures = ("sample_bytes", "largest_bytes", "spread", "wait_s", "cpu_s")
        profile = {**seen, "samples": len(seen["samples"]), **{name: getattr(self.profile, name) for name in figures}}
        return {**asdict(replace(self, profile=_BARE)), "profile": profile, "recommended": self.recommended.name}


def make_plans(
    profile: Profile,
    facts: Facts,
    batch_size: int,
    *,
    rules: Rules,
    budget_bytes: int,
    step_s: float | None = None,
    most_workers: int | None = None,
) -> PlanTable:
    """All plans, and which one is recommended. ``budget_bytes`` and ``step_s`` are for one rank; ``most_workers`` is
    the largest number of workers that a plan may have."""
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} is a batch without samples; give at least 1")
    if profile.is_repeated:
        # A second worker would deliver the same samples again.
        most_workers = 1
    given = _Given(profile=profile, facts=facts, budget_bytes=budget_bytes, step_s=step_s)
    room_bytes = facts.available_bytes // facts.ranks
    load = Load(profile=profile, rules=rules, cores=facts.cores, batch_size=batch_size, workers=1, step_s=step_s or 0.0)
    tried = try_all(load, room_bytes=room_bytes, most_workers=most_workers)
    within = [each for each in tried if given.fits(each)]
    chosen = choose(tried, within, alike=_ALIKE)
    wider = try_all(larger_batch(load), room_bytes=room_bytes, most_workers=most_workers)
    chosen["bigger batch"] = choose(wider, [each for each in wider if given.fits(each)], alike=_ALIKE)["fast"]
    best = max(each.outcome.samples_per_s for each in chosen.values())
    plans = {name: given.plan(name, chosen[name], best) for name in NAMES}
    recommended = _recommended([plans[name] for name in NAMES if name != "bigger batch"])
    table = PlanTable(
        profile=profile, facts=facts, budget_bytes=budget_bytes, step_s=step_s, plans=tuple(plans.values()),
        recommended=recommended, least=given.least(tried, best, load if not within else None),
    )  # fmt: skip
    return replace(table, notes=wording.notes(table))


def allowed_bytes(memory: str | int | float, available_bytes: int, ranks: int, rules: Rules) -> int:
    """The budget of one rank's loader. A size in bytes applies to each rank; a share is divided among the ranks."""
    size = parse_size(memory)
    if size.fixed_bytes is not None:
        return size.fixed_bytes
    return max(1, size.resolve(available_bytes, auto_fraction=rules.auto_memory_share) // ranks)


def _recommended(plans: list[Plan]) -> Plan:
    """Choose the recommended plan from ``plans``, which has all plans but "bigger batch": a larger batch would change
    the training."""
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        return min(plans, key=lambda plan: plan.memory.high)
    fastest = max(plan.samples_per_s.expected for plan in fitting)
    as_fast = [plan for plan in fitting if plan.samples_per_s.expected >= _ALIKE * fastest]
    return min(as_fast, key=lambda plan: plan.memory.high)


@dataclass(frozen=True, kw_only=True)
class _Given:
    """The facts that all plans of a table share."""

    profile: Profile
    facts: Facts
    budget_bytes: int
    step_s: float | None

    def doubt(self, each: Tried) -> float:
        """The error to expect of a prediction, as a share. A prediction is less certain if samples differ in size,
        because only a few samples are in flight."""
        known = _MEASURED if self.profile.is_measured and self.profile.has_runs else _STATED
        return known + self.profile.spread / each.in_flight**0.5

    def memory(self, each: Tried) -> Range:
        return Range.around(each.outcome.growth_bytes, self.doubt(each))

    def fits(self, each: Tried) -> bool:
        """Whether the upper estimate is within the budget."""
        return self.memory(each).high <= self.budget_bytes

    def least(self, tried: list[Tried], best: float, load: Load | None) -> Least:
        """The least settings that work. ``load`` is the load for which a smaller batch is found; None if the batch may
        stay."""
        leanest = min(tried, key=lambda each: self.memory(each).high)
        return Least(
            memory_bytes=math.ceil(self.memory(leanest).high),
            workers=leanest.load.workers,
            depth=leanest.depth,
            speed=leanest.outcome.samples_per_s / best,
            batch_size=None if load is None else largest_fitting(load, self.fits),
        )

    def plan(self, name: str, each: Tried, best: float) -> Plan:
        load, outcome = each.load, each.outcome
        doubt, memory = self.doubt(each), self.memory(each)
        prefetch = max(_USUAL_PREFETCH, -(-each.depth // load.workers))
        theirs = simulate_torch(load, prefetch)
        share = memory.high * self.facts.ranks / max(1, self.facts.available_bytes)
        risk = "low" if share < CALM else "medium" if share < TIGHT else "high"
        fits, speed = self.fits(each), outcome.samples_per_s / best
        suits, pros, cons = wording.words(name, risk, load, fits=fits, is_fastest=speed >= _ALIKE)
        return Plan(
            name=name,
            workers=load.workers,
            workers_on_node=load.workers * self.facts.ranks,
            depth=each.depth,
            prefetch_factor=prefetch,
            batch_size=load.batch_size,
            memory=memory,
            torch_memory=Range.around(theirs.growth_bytes, max(doubt, _TORCHS)),
            samples_per_s=Range.around(outcome.samples_per_s, doubt),
            speed=speed,
            wait=None if self.step_s is None else outcome.wait_fraction,
            first_batch_s=outcome.first_batch_s,
            in_flight=each.in_flight,
            pin_memory=self.facts.gpu_bytes is not None,
            persistent_workers=True,
            budget_bytes=int(min(memory.high * (_SLACK if each.is_own else 1.0), self.budget_bytes)),
            fits=fits,
            risk=risk,
            suits=suits,
            pros=pros,
            cons=cons,
            reason=wording.reason(each, best, self.step_s),
        )


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_BARE = Profile(name="", length=None, samples=())
