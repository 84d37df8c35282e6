"""The search for the best setting: given what was measured so far, what to try next, or stop and why.

In:  ``Trial``s in the order they were made, the ``Space`` to look in.
Out: ``Try`` or ``Done``.
Runs in: anywhere; pure: the next move follows from the trials alone.

It climbs from the safe side: few workers first, more until two steps in a row gain nothing, then a look between the
rungs, then more batches ahead in the same manner. What came close to the best is measured once more. The winner is what
takes least of those that are as fast as any.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.units import format_bytes

LEAST_NOISE = 0.03
"""Two measurements of the same setting differ by so much, however long they were."""
_FLAT_STEPS = 2
_MOST_REVISITS = 4
_FED = 0.03
"""A training loop that waits less than this share of its time needs nothing faster."""
_RUNGS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


class Setting(NamedTuple):
    workers: int
    depth: int
    """Batches ahead, in all."""

    def __str__(self) -> str:
        return f"{self.workers} worker{'s' * (self.workers != 1)}, {self.depth} ahead"


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the model says of a setting."""

    samples_per_s: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One measurement of one setting."""

    setting: Setting
    samples_per_s: float
    noise: float
    """Standard error of that, as a share of it."""
    memory_bytes: int
    """The most that batches and workers took."""
    is_over: bool = False
    """It went over the budget and was left at once."""
    wait_fraction: float | None = None
    """Share of the training loop's time spent waiting; None without a step."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Where to look."""

    most_workers: int
    budget_bytes: int
    usual_depth: Callable[[int], int]
    """Workers -> the least batches ahead that keep them busy."""
    expected: Callable[[Setting], Expected]
    most_depth: int = 12
    also: tuple[Setting, ...] = field(default=())
    """Settings somebody wants to see measured, once the climb is over."""


@dataclass(frozen=True, kw_only=True)
class Try:
    setting: Setting
    why: str


@dataclass(frozen=True, kw_only=True)
class Done:
    winner: Setting | None
    """None: nothing could be tried within the budget."""
    why: str


def worker_limit(cores: float, wait_s: float, cpu_s: float) -> int:
    """How many workers are worth trying: one for each core, more where samples wait more than they compute."""
    whole = max(1, int(cores))
    return max(1, min(4 * whole, math.ceil(whole * (1 + wait_s / max(cpu_s, 1e-4)))))


def next_move(trials: Sequence[Trial], space: Space) -> Try | Done:
    seen = _Seen(trials)
    climb = _climb(seen, _worker_rungs(space), space)
    if isinstance(climb, Try):
        return climb
    if seen.best is None:
        return Done(winner=None, why=climb)
    if not seen.is_fed:
        step = _between(seen, space) or _deeper(seen, space)
        if step is not None:
            return step
    for setting in space.also:
        if not seen.has(setting) and _fits(setting, space):
            return Try(setting=setting, why="yours now")
    again = _revisit(seen)
    return again if again is not None else Done(winner=seen.winner, why=climb)


def stop(trials: Sequence[Trial], why: str) -> Done:
    """The best there is when something else ends the search."""
    return Done(winner=_Seen(trials).winner, why=why)


def mean_rates(trials: Iterable[Trial]) -> dict[Setting, float]:
    """Setting -> samples per second over all its trials, those that went over the budget left out."""
    return _Seen(tuple(trials)).rates


class _Seen:
    """Trials by setting."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self.trials: dict[Setting, list[Trial]] = {}
        for trial in trials:
            self.trials.setdefault(trial.setting, []).append(trial)
        good = {at: found for at, found in self.trials.items() if not any(trial.is_over for trial in found)}
        self.rates = {at: statistics.fmean(trial.samples_per_s for trial in found) for at, found in good.items()}
        self.best = max(self.rates, key=lambda at: (self.rates[at], -at.workers, -at.depth), default=None)

    def has(self, setting: Setting) -> bool:
        return setting in self.trials

    def first_rate(self, setting: Setting) -> float:
        """What a climb goes by: a later look must not send it off again."""
        return self.trials[setting][0].samples_per_s

    def is_over(self, setting: Setting) -> bool:
        return setting not in self.rates

    def memory_bytes(self, setting: Setting) -> int:
        return max(trial.memory_bytes for trial in self.trials[setting])

    def first_noise(self, one: Setting, other: Setting) -> float:
        return max(LEAST_NOISE, math.hypot(*(self.trials[at][0].noise for at in (one, other))))

    def noise(self, one: Setting, other: Setting) -> float:
        """With all trials counted: two looks that disagree say more about noise than each of them does."""
        return max(LEAST_NOISE, math.hypot(*(self._doubt(at) for at in (one, other))))

    def _doubt(self, setting: Setting) -> float:
        rates = [trial.samples_per_s for trial in self.trials[setting]]
        apart = statistics.stdev(rates) / len(rates) ** 0.5 / self.rates[setting] if len(rates) > 1 else 0.0
        return max(apart, statistics.fmean(trial.noise for trial in self.trials[setting]) / len(rates) ** 0.5)

    @property
    def is_fed(self) -> bool:
        if self.best is None:
            return False
        waited = self.trials[self.best][-1].wait_fraction
        return waited is not None and waited < _FED

    @property
    def winner(self) -> Setting | None:
        best = self.best
        if best is None:
            return None
        alike = [at for at in self.rates if self.rates[at] >= self.rates[best] * (1 - self.noise(at, best))]
        return min(alike, key=lambda at: (self.memory_bytes(at), at.workers, at.depth))


def _worker_rungs(space: Space) -> list[Setting]:
    counts = sorted({*(rung for rung in _RUNGS if rung < space.most_workers), space.most_workers})
    rungs = [Setting(count, min(space.most_depth, space.usual_depth(count))) for count in counts]
    # A batch too large for two of them ahead can still be loaded one at a time.
    return rungs if _fits(rungs[0], space) else [Setting(1, 1), *rungs[1:]]


def _climb(seen: _Seen, rungs: Sequence[Setting], space: Space, why: str = "more workers") -> Try | str:
    """The next rung, to be tried for ``why``, or why there is none."""
    flat, top = 0, None
    for rung in rungs:
        if not seen.has(rung):
            if not _fits(rung, space):
                needs = format_bytes(space.expected(rung).memory_bytes)
                return f"{rung} would take {needs}, and the budget is {format_bytes(space.budget_bytes)}"
            return Try(setting=rung, why="safe side" if top is None else why)
        if seen.is_over(rung):
            took = format_bytes(seen.memory_bytes(rung))
            return f"{rung} took {took}, over the budget of {format_bytes(space.budget_bytes)}"
        if top is not None and seen.first_rate(rung) <= seen.first_rate(top) * (1 + seen.first_noise(rung, top)):
            flat += 1
        else:
            flat, top = 0, rung
        waited = seen.trials[rung][0].wait_fraction
        if waited is not None and waited < _FED:
            return (
                f"the training loop waits for data {waited:.1%} of its time with {rung}: faster loading gains nothing"
            )
        if flat == _FLAT_STEPS:
            return f"two steps beyond {top} gained nothing"
    return f"{rungs[-1]} are the most that make sense on this machine"


def _between(seen: _Seen, space: Space) -> Try | None:
    """Halfway from the best rung to its neighbours, where they are more than one worker apart."""
    best = seen.best
    assert best is not None
    # The rung that would not fit is a neighbour as well.
    counts = [at.workers for at in _worker_rungs(space)]
    if best.workers not in counts:
        return None
    place = counts.index(best.workers)
    for near in counts[max(0, place - 1) : place + 2]:
        middle = (near + best.workers) // 2
        setting = Setting(middle, min(space.most_depth, space.usual_depth(middle)))
        if middle not in counts and not seen.has(setting) and _fits(setting, space):
            return Try(setting=setting, why=f"between {min(near, best.workers)} and {max(near, best.workers)}")
    return None


def _deeper(seen: _Seen, space: Space) -> Try | None:
    """More batches ahead, with as many workers as were best."""
    # By the climb's own trials: a deeper one that was best must not start a climb of its own.
    shallow = {
        at: rate for at, rate in seen.rates.items() if at.depth == min(space.most_depth, space.usual_depth(at.workers))
    }
    if not shallow:
        return None
    workers, usual = max(shallow, key=lambda at: (shallow[at], -at.workers))
    depths = sorted({usual, *(min(space.most_depth, depth) for depth in (usual + 1, usual + 2, 2 * usual, 3 * usual))})
    step = _climb(seen, [Setting(workers, depth) for depth in depths], space, "more ahead")
    return step if isinstance(step, Try) else None


def _revisit(seen: _Seen) -> Try | None:
    """What was measured once and came close to the best, the closest first."""
    best = seen.best
    if best is None or sum(len(found) - 1 for found in seen.trials.values()) >= _MOST_REVISITS:
        return None
    near = [
        at
        for at in seen.rates
        if len(seen.trials[at]) == 1 and seen.rates[at] >= seen.rates[best] * (1 - 2 * seen.noise(at, best))
    ]
    if not near or seen.rates.keys() == {best}:
        return None
    closest = max(near, key=lambda at: seen.rates[at])
    return Try(setting=closest, why="again: near the best" if closest != best else "again: the best")


def _fits(setting: Setting, space: Space) -> bool:
    return space.expected(setting).memory_bytes <= space.budget_bytes
