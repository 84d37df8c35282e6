"""A user's own settings, for comparison with a table of plans: the figures that the user states and the predicted
figures.

In:  settings with the figures that the user states for them, a ``PlanTable``.
Out: the memory and the speed of torch's DataLoader with each of these settings.
Runs in: anywhere; pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import ConfigError
from penstock.planner.plans import PlanTable
from penstock.planner.simulate.pipeline import Load
from penstock.planner.simulate.rules import Rules
from penstock.planner.simulate.torch_pipeline import simulate_torch
from penstock.units import parse_bytes

_KEYS = ("workers", "prefetch_factor", "batch_size", "memory", "speed")


@dataclass(frozen=True, kw_only=True)
class Stated:
    """Settings of torch's DataLoader, and the figures that the user states for them."""

    name: str
    """The name of the settings; a plan of the same name is compared with them."""
    workers: int
    prefetch_factor: int
    batch_size: int | None = None
    """The batch size; None if it is the table's own."""
    memory_bytes: int | None = None
    """The stated memory; None if no memory is stated."""
    speed: float | None = None
    """The stated speed, as a share of the fastest stated settings; None if no speed is stated."""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """The prediction for stated settings in torch's DataLoader."""

    stated: Stated
    memory_bytes: int
    speed: float
    """The predicted speed, as a share of the table's fastest plan."""


def read_stated(given: Any, where: str) -> tuple[Stated, ...]:
    """Read stated settings, ``name -> {workers, prefetch_factor, memory, speed}``, which a profile's file may hold."""
    if not isinstance(given, Mapping) or not all(isinstance(each, Mapping) for each in given.values()):
        raise ConfigError(
            f"{where}: the key beside must have a section for each name, with keys from {', '.join(_KEYS)}"
        )
    return tuple(_stated(str(name), dict(each), where) for name, each in given.items())


def _stated(name: str, given: dict[str, Any], where: str) -> Stated:
    unknown = sorted(set(given) - set(_KEYS))
    if unknown:
        raise ConfigError(f"{where}: beside.{name} has {', '.join(unknown)}; its keys are {', '.join(_KEYS)}")
    counts = {key: given[key] for key in ("workers", "prefetch_factor", "batch_size") if key in given}
    for key in ("workers", "prefetch_factor"):
        counts.setdefault(key, 2 if key == "prefetch_factor" else None)
    for key, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < (key != "workers"):
            raise ConfigError(f"{where}: beside.{name} has {key}={count!r}, which is not a whole number")
    speed = given.get("speed")
    if speed is not None and (isinstance(speed, bool) or not isinstance(speed, (int, float))):
        raise ConfigError(f"{where}: beside.{name} has speed={speed!r}; write a share such as 0.85")
    memory = given.get("memory")
    memory_bytes = None if memory is None else parse_bytes(memory, name=f"{where}: beside.{name}: memory")
    return Stated(name=name, memory_bytes=memory_bytes, speed=speed, **counts)


def put_beside(table: PlanTable, stated: tuple[Stated, ...], rules: Rules) -> tuple[Beside, ...]:
    """The memory and the speed of torch's DataLoader with each of the stated settings, on the table's machine."""
    batch_size = table.recommended.batch_size
    fastest = max(plan.samples_per_s.expected for plan in table.plans)
    found = []
    for each in stated:
        rows = each.batch_size or batch_size
        load = Load(
            profile=table.profile, rules=rules, cores=table.facts.cores, batch_size=rows, workers=each.workers,
            step_s=(table.step_s or 0.0) * rows / batch_size,
        )  # fmt: skip
        outcome = simulate_torch(load, each.prefetch_factor)
        # A sample that every worker delivers counts only once.
        times = max(1, each.workers) if table.profile.is_repeated else 1
        found.append(
            Beside(
                stated=replace(each, batch_size=rows),
                memory_bytes=outcome.growth_bytes,
                speed=outcome.samples_per_s / times / fastest,
            )
        )
    return tuple(found)
