"""A tuning: first a profile is measured for the simulation, then settings are tried on a live loader.

In:  a dataset, ``TuneSettings``.
Out: ``Tuned``.
Runs in: trainer (here, the command line).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from penstock.errors import ConfigError
from penstock.formatting import rate
from penstock.lab.live_loader import LiveLoader
from penstock.lab.profile import profile
from penstock.loader.rules import LoaderRules
from penstock.meter import headroom_bytes, limits
from penstock.planner.profile import Profile
from penstock.planner.search import (
    Expected,
    SearchEnd,
    SearchSpace,
    Setting,
    Trial,
    mean_rates,
    next_move,
    stop,
    worker_limit,
)
from penstock.planner.simulate.penstock_pipeline import simulate_held
from penstock.planner.simulate.pipeline import Load
from penstock.planner.wording import REPEATED
from penstock.units import format_bytes, parse_size

_PROFILE_SHARE, _MOST_PROFILE_S = 0.15, 9.0
_TRIALS = 16
"""The largest usual number of measurements in a search; the time is divided among this many measurements."""
_LONGEST_TRIAL_S = 4.0


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """The settings of the search."""

    target: str
    """The name of the dataset."""
    batch_size: int
    memory: str | int | float
    """The memory budget of the loader."""
    step_time: float
    """The seconds that a pretended training step takes."""
    seconds: float
    """The seconds that the whole tuning may take."""
    most_workers: int | None = None
    """The most workers to try; None to derive this number from the cores and the samples."""
    now: tuple[int, int | None] | None = None
    """The user's present number of workers and prefetch factor, which are measured as well."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The result of a tuning."""

    trials: tuple[Trial, ...]
    reasons: tuple[str, ...]
    """The reason for each trial."""
    expected: dict[Setting, Expected]
    """The prediction for each setting that was tried."""
    done: SearchEnd
    budget_bytes: int
    elapsed_s: float
    cores: float
    profile: Profile

    @property
    def rates(self) -> dict[Setting, float]:
        return mean_rates(self.trials)

    @property
    def winner(self) -> Setting | None:
        return self.done.winner

    def memory_bytes(self, setting: Setting) -> int:
        return max(trial.memory_bytes for trial in self.trials if trial.setting == setting)

    def verdict(self) -> str:
        winner = self.winner
        if winner is None:
            return f"No setting could be tried: {self.done.why}. Lower --batch-size, or raise --memory."
        rates = self.rates
        slowest = min(rates.values())
        repeated = f" {REPEATED}" if self.profile.is_repeated else ""
        gain = (
            f", {rates[winner] / slowest:.2g} times as many as the slowest setting"
            if rates[winner] > 1.05 * slowest
            else ""
        )
        return (
            f"Best: {winner}: {rate(rates[winner])} samples/s{gain}, in "
            f"{format_bytes(self.memory_bytes(winner))} of {format_bytes(self.budget_bytes)}. "
            f"Stopped because {self.done.why}.{repeated}"
        )

    def model_words(self) -> str:
        """A sentence that says how far the predictions were off the measurements."""
        rates = self.rates
        if not rates:
            return ""
        speed = [self.expected[at].samples_per_s / rate - 1 for at, rate in rates.items() if rate]
        memory = [self.expected[at].memory_bytes / max(1, self.memory_bytes(at)) - 1 for at in rates]
        return (
            f"The prediction was off by {min(speed):+.0%} to {max(speed):+.0%} in speed and {min(memory):+.0%} to "
            f"{max(memory):+.0%} in memory."
        )

    def as_json(self) -> dict[str, Any]:
        winner = self.winner
        return {
            "trials": [
                {**asdict(trial), "setting": trial.setting._asdict(), "why": why,
                 "expected": asdict(self.expected[trial.setting])}
                for trial, why in zip(self.trials, self.reasons, strict=True)
            ],
            "winner": None if winner is None else {
                **winner._asdict(), "samples_per_s": self.rates[winner], "memory_bytes": self.memory_bytes(winner),
            },
            "why": self.done.why,
            "verdict": self.verdict(),
            "model": self.model_words(),
            "budget_bytes": self.budget_bytes,
            "elapsed_s": self.elapsed_s,
            "cores": self.cores,
            "samples": {"length": self.profile.length, "bytes": self.profile.sample_bytes,
                        "wait_s": self.profile.wait_s, "cpu_s": self.profile.cpu_s},
        }  # fmt: skip


def tune(
    dataset: Any, collate_fn: Callable[[Any], Any] | None, settings: TuneSettings,
    *, on_progress: Callable[[str, float], None],
) -> Tuned:  # fmt: skip
    """Search for about ``settings.seconds``. ``on_progress`` gets the current step and the share of the work that is
    done. Raises DataError."""
    began_s = time.monotonic()
    profile_s = min(_MOST_PROFILE_S, _PROFILE_SHARE * settings.seconds)
    known = profile(
        dataset, settings.batch_size, collate_fn=collate_fn, name=settings.target, seconds=profile_s,
        on_progress=lambda what, done: on_progress(what, done * profile_s / settings.seconds),
    )  # fmt: skip
    cores = limits().cpu_usable
    budget_bytes = parse_size(settings.memory).resolve(headroom_bytes(), auto_fraction=LoaderRules().auto_memory_share)
    space = _space(settings, known, cores, budget_bytes)
    trials: list[Trial] = []
    reasons: list[str] = []
    doing = "starting workers"

    def on_batch() -> None:
        on_progress(doing, min(1.0, (time.monotonic() - began_s) / settings.seconds))

    trial_s = min(_LONGEST_TRIAL_S, settings.seconds * (1 - _PROFILE_SHARE) / _TRIALS)

    def batch_s(setting: Setting) -> float:
        return settings.batch_size / max(1e-9, _times(known, setting) * space.expected(setting).samples_per_s)

    def is_late(setting: Setting) -> bool:
        needs_s = max(trial_s, LiveLoader.needs_s(setting, batch_s(setting)))
        return time.monotonic() - began_s + needs_s > settings.seconds

    with LiveLoader(
        dataset, settings.batch_size, collate_fn=collate_fn, memory_bytes=budget_bytes, step_s=settings.step_time,
        trial_s=trial_s, on_batch=on_batch, is_repeated=known.is_repeated,
    ) as live:  # fmt: skip
        move = next_move(trials, space)
        if not isinstance(move, SearchEnd) and is_late(move.setting):
            raise ConfigError(_too_short(settings, move.setting, batch_s(move.setting), trial_s))
        while not isinstance(move, SearchEnd):
            doing = str(move.setting)
            on_batch()
            trials.append(live.measure(move.setting, batch_s=batch_s(move.setting)))
            reasons.append(move.why)
            move = next_move(trials, space)
            if not isinstance(move, SearchEnd) and is_late(move.setting):
                move = stop(trials, f"{settings.seconds:g} s have passed; raise --seconds to measure longer")
    return Tuned(
        trials=tuple(trials),
        reasons=tuple(reasons),
        expected={trial.setting: space.expected(trial.setting) for trial in trials},
        done=move,
        budget_bytes=budget_bytes,
        elapsed_s=time.monotonic() - began_s,
        cores=cores,
        profile=known,
    )


def _times(known: Profile, setting: Setting) -> int:
    """How many times each sample is delivered: once, or once by each worker if every worker reads the whole stream."""
    return setting.workers if known.is_repeated else 1


def _too_short(settings: TuneSettings, setting: Setting, batch_s: float, trial_s: float) -> str:
    needs_s = LiveLoader.needs_s(setting, batch_s)
    # The time for a whole search, of which only the first few measurements run with so few workers.
    whole_s = math.ceil((4 * needs_s + _TRIALS * trial_s) / (1 - _PROFILE_SHARE) / 10) * 10
    return (
        f"a batch of {settings.batch_size} takes about {rate(batch_s)} s with {setting}, so that one measurement "
        f"takes {rate(needs_s)} s, which is more than is left of {settings.seconds:g} s; "
        f"give --seconds {whole_s}, or lower --batch-size"
    )


def _space(settings: TuneSettings, known: Profile, cores: float, budget_bytes: int) -> SearchSpace:
    def load(workers: int) -> Load:
        return Load(
            profile=known, rules=LoaderRules(), cores=cores, batch_size=settings.batch_size, workers=workers,
            step_s=settings.step_time,
        )  # fmt: skip

    @cache
    def expected(setting: Setting) -> Expected:
        outcome = simulate_held(load(setting.workers), setting.depth)
        # The memory of the training process itself is left out, because it is not part of the budget.
        memory_bytes = outcome.batches_bytes + outcome.workers_bytes
        return Expected(samples_per_s=outcome.samples_per_s / _times(known, setting), memory_bytes=memory_bytes)

    def usual(workers: int) -> int:
        return load(workers).usual_depth

    also: tuple[Setting, ...] = ()
    if settings.now is not None and settings.now[0]:
        workers, prefetch = settings.now
        also = (Setting(workers, usual(workers) if prefetch is None else min(usual(workers), workers * prefetch)),)
    most = settings.most_workers
    if most is None:
        most = 1 if known.is_repeated else worker_limit(cores, known.wait_s, known.cpu_s + known.ours.sample_s)
    return SearchSpace(most_workers=most, budget_bytes=budget_bytes, usual_depth=usual, expected=expected, also=also)
