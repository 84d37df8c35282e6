"""Prediction against measurement: the figures of a plan or a budget, the figures of the run, and the error.

In:  an ``Account``; plans, from the run's facts or from ``penstock plan --json``.
Out: ``Compared`` rows.
Runs in: command line; pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.errors import DataError
from penstock.formatting import one_line
from penstock.monitor.runs.format import TriedSettings
from penstock.planner.feeding import FED
from penstock.report.account import Account

HOW_TO_GET_ONE = (
    "No plan was made for this run. penstock plan TARGET --json > plan.json makes one before a training; "
    "penstock report RUN --plan plan.json then compares it with the measurements."
)
_SHORTEST_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A plan's figures for a loader. Memory and speed are (low, expected, high)."""

    source: str
    workers: int
    depth: int | None
    batch_size: int
    memory_bytes: tuple[float, float, float]
    samples_per_s: tuple[float, float, float]
    wait_fraction: float | None
    """None if the plan was made without the length of a training step, to load as fast as possible."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One figure, predicted and measured."""

    loader: str
    what: str
    unit: Literal["bytes", "samples/s", "share"]
    predicted: float
    low: float | None
    high: float | None
    measured: float
    is_bound: bool = False
    """Whether the prediction is an upper limit and not an expected value."""
    remark: str = ""

    @property
    def error(self) -> float | None:
        """How far the prediction is off: 0.1 means 10% too high; for shares it is the difference. None: not
        comparable."""
        if self.is_bound or self.remark.startswith("not comparable"):
            return None
        if self.unit == "share":
            return self.predicted - self.measured
        return self.predicted / self.measured - 1 if self.measured else None

    @property
    def holds(self) -> bool | None:
        """Whether the measured value is within the predicted range; None: not comparable."""
        if self.is_bound:
            return self.measured <= self.predicted
        if self.error is None or self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high


def compare(account: Account, plans: Sequence[Prediction] = ()) -> tuple[Compared, ...]:
    """For each loader its budget, and the plan whose settings are most like those of the loader."""
    rows: list[Compared] = []
    for number in range(len(account.loaders)):
        name = account.name_of(number)
        own = _read(account.loaders[number].get("prediction"), 'num_workers="auto"')
        chosen = _closest(account, number, [*([own] if own is not None else []), *plans])
        if chosen is not None:
            rows += _against(account, number, *chosen)
        budget, peak = account.last(f"loader.{number}.budget_bytes"), account.loader_peak_bytes(number)
        if budget and peak:
            rows.append(
                Compared(
                    loader=name, what="memory, at most (its budget)", unit="bytes", predicted=budget, low=None,
                    high=None, measured=peak, is_bound=True,
                )
            )  # fmt: skip
    return tuple(rows)


def has_plan(rows: Sequence[Compared]) -> bool:
    return any(not row.is_bound for row in rows)


def read_plans(answer: Any, source: str) -> tuple[Prediction, ...]:
    """Plans from the output of ``penstock plan --json``. Raises DataError."""
    plans = answer.get("plans") if isinstance(answer, dict) else None
    if not isinstance(plans, list) or not plans:
        raise DataError(f"{source} contains no plans; write it with penstock plan TARGET --json")
    # The recommended plan comes first: if several plans fit a run equally well, the user probably used that one.
    first = answer.get("recommended")
    ordered = sorted(plans, key=lambda plan: not (isinstance(plan, dict) and plan.get("name") == first))
    found = []
    for plan in ordered:
        name = one_line(str(plan.get("name", "")), 40) if isinstance(plan, dict) else ""
        read = _read(plan, f"{source}, the {name} plan")
        if read is None:
            raise DataError(f"{source} has a plan without workers, batch_size, memory and samples_per_s ({name!r})")
        found.append(read)
    return tuple(found)


# -- inside ---------------------------------------------------------------------------------


def _read(plan: Any, source: str) -> Prediction | None:
    """The plan; None if there is no plan or if it has no figures."""
    try:
        wait = plan.get("wait")
        return Prediction(
            source=source,
            workers=int(plan["workers"]),
            depth=None if plan.get("depth") is None else int(plan["depth"]),
            batch_size=int(plan["batch_size"]),
            memory_bytes=_range(plan["memory"]),
            samples_per_s=_range(plan["samples_per_s"]),
            wait_fraction=None if wait is None else _finite(wait),
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None


def _range(found: Mapping[str, Any]) -> tuple[float, float, float]:
    return _finite(found["low"]), _finite(found["expected"]), _finite(found["high"])


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} is not finite")
    return number


def _closest(account: Account, number: int, plans: Sequence[Prediction]) -> tuple[Prediction, TriedSettings] | None:
    """The plan and the tried settings that are most alike; of several pairs, the pair whose settings were in force
    longest."""
    tried = [each for each in account.summary.tried if each.loader == number and each.samples]
    pairs = [(plan, each) for each in sorted(tried, key=lambda each: -each.active_s) for plan in plans]
    return min(pairs, key=lambda pair: _distance(*pair), default=None)


def _distance(plan: Prediction, tried: TriedSettings) -> float:
    settings = tried.configuration
    workers, batch_size = settings.get("workers"), settings.get("batch_size")
    apart = abs(plan.workers - workers) if isinstance(workers, int) else 100
    return apart + 1000 * (batch_size != plan.batch_size)


def _against(account: Account, number: int, plan: Prediction, tried: TriedSettings) -> Iterator[Compared]:
    settings, name = tried.configuration, account.name_of(number)
    remark = _difference(plan, settings)
    if not remark and tried.active_s < _SHORTEST_S:
        remark = f"not comparable: data was read for only {tried.active_s:.0f} s"
    peak = account.loader_peak_bytes(number)
    source = f" ({plan.source})"
    if peak:
        low, expected, high = plan.memory_bytes
        yield Compared(
            loader=name, what=f"memory of the loader{source}", unit="bytes", predicted=expected, low=low, high=high,
            measured=peak, remark=remark,
        )  # fmt: skip
    low, expected, high = plan.samples_per_s
    waited = tried.wait_fraction
    pace = remark
    if not pace and plan.wait_fraction is None and waited is not None and waited < FED:
        pace = (
            f"not comparable: the loop waited {waited:.1%} of the time, so the training step set the pace, not loading"
        )
    yield Compared(
        loader=name, what=f"samples/s{source}", unit="samples/s", predicted=expected, low=low, high=high,
        measured=tried.samples_per_s or 0.0, remark=pace,
    )  # fmt: skip
    if plan.wait_fraction is not None and waited is not None:
        yield Compared(
            loader=name, what=f"waiting{source}", unit="share", predicted=plan.wait_fraction, low=None, high=None,
            measured=waited, remark=remark,
        )  # fmt: skip


def _difference(plan: Prediction, settings: Mapping[str, Any]) -> str:
    wanted = {"workers": plan.workers, "batch_size": plan.batch_size}
    other = [f"{value} {key}" for key, value in wanted.items() if settings.get(key) != value]
    had = [f"{settings.get(key)}" for key, value in wanted.items() if settings.get(key) != value]
    if not other:
        return ""
    return f"not comparable: planned for {' and '.join(other)}, run with {' and '.join(had)}".replace("_", " ")
