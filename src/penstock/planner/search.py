"""The search for the best setting: the trials so far decide what to try next, or why to stop.

In:  ``Trial``s in the order in which they were made, the ``SearchSpace``.
Out: ``Try`` or ``SearchEnd``.
Runs in: anywhere; pure, because the next move follows from the trials alone.

The search starts with few workers and adds workers until two steps in a row gain nothing. It then tries numbers of
workers between the steps, and then adds batches ahead until two steps in a row gain nothing. Settings close to the best
are measured once more. The winner takes the least memory of all settings that are as fast as the fastest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.units import format_bytes

LEAST_NOISE = 0.03
"""Two measurements of the same setting differ by this share, however long the measurements take."""
_FLAT_STEPS = 2
_MOST_REVISITS = 4
_FED = 0.03
"""A training loop that waits for less than this share of its time does not become faster with faster loading."""
_RUNGS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


class Setting(NamedTuple):
    workers: int
    depth: int
    """The number of batches ahead of the training loop, in total."""

    def __str__(self) -> str:
        return f"{self.workers} worker{'s' * (self.workers != 1)}, {self.depth} ahead"


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The figures that the simulation predicts for a setting."""

    samples_per_s: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One measurement of one setting."""

    setting: Setting
    samples_per_s: float
    noise: float
    """The standard error of the rate, as a share of the rate."""
    memory_bytes: int
    """The most memory that batches and workers took together."""
    is_over: bool = False
    """Whether the trial exceeded the budget, and was therefore ended at once."""
    wait_fraction: float | None = None
    """The share of the training loop's time spent waiting; None without a training step."""


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The settings to search, and their limits."""

    most_workers: int
    budget_bytes: int
    usual_depth: Callable[[int], int]
    """Number of workers -> the fewest batches ahead that keep that many workers busy."""
    expected: Callable[[Setting], Expected]
    most_depth: int = 12
    also: tuple[Setting, ...] = field(default=())
    """Settings that the user wants measured after the search for the best number of workers."""

    def fits(self, setting: Setting) -> bool:
        return self.expected(setting).memory_bytes <= self.budget_bytes

    def usual(self, workers: int) -> Setting:
        """The setting with ``workers`` workers and the fewest batches ahead that keep them busy."""
        return Setting(workers, min(self.most_depth, self.usual_depth(workers)))

    def rungs(self) -> list[Setting]:
        """The settings that the climb tries in turn, each with more workers than the one before."""
        rungs = [
            self.usual(count)
            for count in sorted({*(rung for rung in _RUNGS if rung < self.most_workers), self.most_workers})
        ]
        # If two batches ahead do not fit, one batch ahead may still fit.
        return rungs if self.fits(rungs[0]) else [Setting(1, 1), *rungs[1:]]


@dataclass(frozen=True, kw_only=True)
class Try:
    setting: Setting
    why: str


@dataclass(frozen=True, kw_only=True)
class SearchEnd:
    winner: Setting | None
    """The best setting; None if no setting could be tried within the budget."""
    why: str


def worker_limit(cores: float, wait_s: float, cpu_s: float) -> int:
    """The largest number of workers worth trying: one for each core, and more if samples wait longer than they
    compute."""
    whole = max(1, int(cores))
    return max(1, min(4 * whole, math.ceil(whole * (1 + wait_s / max(cpu_s, 1e-4)))))


def next_move(trials: Sequence[Trial], space: SearchSpace) -> Try | SearchEnd:
    measured = _Trials(trials)
    climb = _climb(measured, space.rungs(), space)
    if isinstance(climb, Try):
        return climb
    if measured.best is None:
        return SearchEnd(winner=None, why=climb)
    if not measured.is_fed:
        step = _between(measured, measured.best, space) or _deeper(measured, space)
        if step is not None:
            return step
    for setting in space.also:
        if setting not in measured.trials and space.fits(setting):
            return Try(setting=setting, why="your present setting")
    return _revisit(measured, measured.best) or SearchEnd(winner=measured.winner, why=climb)


def stop(trials: Sequence[Trial], why: str) -> SearchEnd:
    """The end of the search with the best setting so far, for a caller that ends the search early."""
    return SearchEnd(winner=_Trials(trials).winner, why=why)


def mean_rates(trials: Iterable[Trial]) -> dict[Setting, float]:
    """Setting -> the mean samples per second of all its trials; settings that exceeded the budget are left out."""
    return _Trials(tuple(trials)).rates


class _Trials:
    """The trials, grouped by their setting."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self.trials: dict[Setting, list[Trial]] = {}
        for trial in trials:
            self.trials.setdefault(trial.setting, []).append(trial)
        within = {at: found for at, found in self.trials.items() if not any(trial.is_over for trial in found)}
        self.rates = {at: statistics.fmean(trial.samples_per_s for trial in found) for at, found in within.items()}
        self.best = max(self.rates, key=lambda at: (self.rates[at], -at.workers, -at.depth), default=None)

    def memory_bytes(self, setting: Setting) -> int:
        return max(trial.memory_bytes for trial in self.trials[setting])

    def noise(self, one: Setting, other: Setting) -> float:
        """The standard error of the difference between two settings. It uses all trials, because trials that disagree
        show the noise better than a single trial does."""
        return max(LEAST_NOISE, math.hypot(*(self._noise_of(at) for at in (one, other))))

    def _noise_of(self, setting: Setting) -> float:
        rates = [trial.samples_per_s for trial in self.trials[setting]]
        apart = statistics.stdev(rates) / len(rates) ** 0.5 / self.rates[setting] if len(rates) > 1 else 0.0
        return max(apart, statistics.fmean(trial.noise for trial in self.trials[setting]) / len(rates) ** 0.5)

    @property
    def is_fed(self) -> bool:
        """Whether the training loop hardly waits for data with the best setting."""
        return self.best is not None and _is_fed(self.trials[self.best][-1])

    @property
    def winner(self) -> Setting | None:
        best = self.best
        if best is None:
            return None
        alike = [at for at in self.rates if self.rates[at] >= self.rates[best] * (1 - self.noise(at, best))]
        return min(alike, key=lambda at: (self.memory_bytes(at), at.workers, at.depth))


def _is_fed(trial: Trial) -> bool:
    return trial.wait_fraction is not None and trial.wait_fraction < _FED


def _gains(trial: Trial, top: Trial) -> bool:
    noise = max(LEAST_NOISE, math.hypot(trial.noise, top.noise))
    return trial.samples_per_s > top.samples_per_s * (1 + noise)


def _climb(measured: _Trials, rungs: Sequence[Setting], space: SearchSpace, why: str = "more workers") -> Try | str:
    """The next setting of the climb, to be tried because of ``why``; or the reason why the climb ends."""
    flat, top = 0, None
    for rung in rungs:
        if rung not in measured.trials:
            if not space.fits(rung):
                needs = format_bytes(space.expected(rung).memory_bytes)
                return f"{rung} would take {needs}, but the budget is {format_bytes(space.budget_bytes)}"
            return Try(setting=rung, why="safe start" if top is None else why)
        if rung not in measured.rates:
            took = format_bytes(measured.memory_bytes(rung))
            return f"{rung} took {took}, which is over the budget of {format_bytes(space.budget_bytes)}"
        # Only the first trial of a setting counts: a later trial of the same setting must not restart the climb.
        trial = measured.trials[rung][0]
        if top is not None and not _gains(trial, measured.trials[top][0]):
            flat += 1
        else:
            flat, top = 0, rung
        if _is_fed(trial):
            return (
                f"the training loop waits for data {trial.wait_fraction:.1%} of its time with {rung}: faster loading "
                "gains nothing"
            )
        if flat == _FLAT_STEPS:
            return f"two steps beyond {top} gained nothing"
    return f"{rungs[-1]} is the highest setting worth trying on this machine"


def _between(measured: _Trials, best: Setting, space: SearchSpace) -> Try | None:
    """A setting halfway between the best step of the climb and a neighbouring step, if these steps are more than one
    worker apart."""
    # A step of the climb that would not fit the budget is a neighbour as well.
    counts = [at.workers for at in space.rungs()]
    if best.workers not in counts:
        return None
    place = counts.index(best.workers)
    for near in counts[max(0, place - 1) : place + 2]:
        setting = space.usual((near + best.workers) // 2)
        if setting.workers not in counts and setting not in measured.trials and space.fits(setting):
            return Try(setting=setting, why=f"between {min(near, best.workers)} and {max(near, best.workers)}")
    return None


def _deeper(measured: _Trials, space: SearchSpace) -> Try | None:
    """The next setting with more batches ahead and the best number of workers."""
    # Only trials of the climb count: a deeper setting that was best must not start another climb.
    shallow = {at: rate for at, rate in measured.rates.items() if at == space.usual(at.workers)}
    if not shallow:
        return None
    workers, usual = max(shallow, key=lambda at: (shallow[at], -at.workers))
    depths = sorted({usual, *(min(space.most_depth, depth) for depth in (usual + 1, usual + 2, 2 * usual, 3 * usual))})
    step = _climb(measured, [Setting(workers, depth) for depth in depths], space, "more ahead")
    return step if isinstance(step, Try) else None


def _revisit(measured: _Trials, best: Setting) -> Try | None:
    """Of the settings that were measured once and are nearly as fast as the best, the fastest."""
    if sum(len(found) - 1 for found in measured.trials.values()) >= _MOST_REVISITS or len(measured.rates) == 1:
        return None
    near = [
        at
        for at in measured.rates
        if len(measured.trials[at]) == 1
        and measured.rates[at] >= measured.rates[best] * (1 - 2 * measured.noise(at, best))
    ]
    if not near:
        return None
    closest = max(near, key=lambda at: measured.rates[at])
    return Try(setting=closest, why="again: near the best" if closest != best else "again: the best")
