"""Plans: settings, with their predicted memory and speed and the reason for them.

In:  a profile, what the machine has, the loader's rules, a batch size, a budget, the length of a step.
Out: ``PlanTable``: safe, balanced, fast, extreme, and a larger batch instead of more loading; one recommended.
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
"""In every table, in this order."""
CALM, TIGHT = 0.65, 0.76
"""Shares of the free memory: below the first the risk of a plan is low, above the second it is high."""
_MEASURED, _STATED = 0.1, 0.35
"""How far off a prediction may be if it is based on measurements here, or on stated figures."""
_TORCHS = 0.2
"""The least error to expect of a prediction about torch's loader, because that loader has no memory limit."""
_ALIKE = 0.985
"""Speeds closer than this count as the same: of two such plans the one that takes less memory is better."""
_SLACK = 1.5
"""A limit that is sometimes reached makes workers wait, so it is set to this many times the predicted memory."""
_USUAL_PREFETCH = 2
"""torch's own; with less, its workers wait for their next batch to be requested."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """A figure and its expected range."""

    low: float
    expected: float
    high: float

    @classmethod
    def around(cls, expected: float, share: float) -> Range:
        return cls(low=expected * max(0.0, 1 - share), expected=expected, high=expected * (1 + share))


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The part of the machine that this training may use."""

    cores: float
    """Cores one rank may use, quotas counted."""
    available_bytes: int
    """Memory that is free now for all ranks together, in the container if there is one."""
    gpu_bytes: int | None = None
    """Memory of a rank's GPU; None: none, or not known."""
    ranks: int = 1
    """Processes that train on this machine; all figures of a plan are for one of them."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings, and the memory and speed predicted for them."""

    name: str
    workers: int
    """Of one rank."""
    workers_on_node: int
    """Of all ranks of the machine."""
    depth: int
    """Batches ahead in penstock's loader."""
    prefetch_factor: int
    """torch's prefetch factor, which limits penstock's loader too."""
    batch_size: int
    memory: Range
    """Host memory the loader takes, in bytes."""
    torch_memory: Range
    """Host memory that torch's DataLoader takes with the same workers and prefetch factor."""
    samples_per_s: Range
    speed: float
    """Share of the fastest plan's samples per second."""
    wait: float | None
    """Share of the training loop's time spent waiting for data; None where the length of a step is unknown."""
    first_batch_s: float
    in_flight: int
    """Samples that are loaded or being loaded at the fullest."""
    pin_memory: bool
    persistent_workers: bool
    budget_bytes: int
    """The value for ``memory=``: a little more than the upper estimate, or the budget if that is less."""
    fits: bool
    """Whether the upper estimate is within the budget."""
    risk: str
    """low, medium or high, by the share of the free memory that it may take."""
    suits: str
    pros: tuple[str, ...]
    cons: tuple[str, ...]
    reason: str

    def arguments(self) -> dict[str, Any]:
        """Of ``penstock.DataLoader``; without ``memory`` also of torch's."""
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
    """The smallest settings that work."""

    memory_bytes: int
    """The smallest budget that some settings fit, at this batch size."""
    workers: int
    depth: int
    speed: float
    """Speed of those settings, as a share of the fastest plan's samples per second."""
    batch_size: int | None = None
    """The largest batch that the given budget has room for; None: there is none, or the batch fits as it is."""


@dataclass(frozen=True, kw_only=True)
class PlanTable:
    """All plans of one dataset on one machine."""

    profile: Profile
    facts: Facts
    budget_bytes: int
    """Memory that one rank's loader may take."""
    step_s: float | None
    plans: tuple[Plan, ...]
    recommended: Plan
    """Of the fastest plans within the budget, the one that takes the least memory."""
    least: Least
    """The least settings that work, where nothing fits the budget."""
    notes: tuple[str, ...] = field(default=())
    """Further facts that matter to the user."""

    def __getitem__(self, name: str) -> Plan:
        """The plan of that name."""
        for plan in self.plans:
            if plan.name == name:
                return plan
        raise KeyError(f"{name}; there are {', '.join(plan.name for plan in self.plans)}")

    def explain(self) -> str:
        """The recommended plan and why, in words, a line each."""
        return "\n".join((f"Recommended: {self.recommended.name}.", *wording.describe(self.recommended), *self.notes))

    def to_yaml(self, plan: Plan | None = None) -> str:
        """Settings of ``plan``, or of the recommended one: under torch's own keys, usable without penstock, and
        penstock's."""
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
        """Everything except the profile's single samples, which only its own file holds."""
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
    """All plans, and the recommended one. ``budget_bytes`` and ``step_s`` are one rank's; ``most_workers``: the most
    that a plan may have."""
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} has no sample in it; give at least 1")
    if profile.is_repeated:
        # Another worker would deliver the same samples again.
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
    """The budget of one rank's loader: a size in bytes applies to each rank, a share is divided among the ranks."""
    size = parse_size(memory)
    if size.fixed_bytes is not None:
        return size.fixed_bytes
    return max(1, size.resolve(available_bytes, auto_fraction=rules.auto_memory_share) // ranks)


def _recommended(plans: list[Plan]) -> Plan:
    """``plans``: all but the larger batch, which would change the training."""
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
        """How far off a prediction may be; it is less certain if samples differ in size, because only a few are in
        flight."""
        known = _MEASURED if self.profile.is_measured and self.profile.has_runs else _STATED
        return known + self.profile.spread / each.in_flight**0.5

    def memory(self, each: Tried) -> Range:
        return Range.around(each.outcome.growth_bytes, self.doubt(each))

    def fits(self, each: Tried) -> bool:
        """Whether the upper estimate is within the budget."""
        return self.memory(each).high <= self.budget_bytes

    def least(self, tried: list[Tried], best: float, load: Load | None) -> Least:
        """``load``: find a smaller batch for it; None: a smaller batch is not needed."""
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
