"""Which settings to try, and which of those tried a plan stands for.

In:  a ``Load``: what is loaded, on how many cores.
Out: ``Tried``: settings played through; one of them for each name.
Runs in: anywhere; pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from penstock.planner.profile import Profile
from penstock.planner.simulate.penstock_pipeline import play_held, play_ours, slots_within, usual_depth
from penstock.planner.simulate.pipeline import Load, Outcome

_STEPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 112, 128)
"""Numbers of workers worth telling apart."""
_MOST_WORKERS_A_CORE, _MOST_WORKERS = 4, 64
_HARDLY = 0.1
"""Waiting less than this share of the time it computes, a sample computes."""
_GAIN = 1.005
"""Less than this by more workers is none."""
_PATIENCE = 3
"""Numbers of workers tried in a row without a gain before the search ends."""
_SAFE, _BALANCED, _EXTREME = 0.6, 0.85, 0.998
"""Share of the fastest that a plan must reach, with the least memory."""
_LARGER_BATCH = 1.5


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Settings, and what came of them in thought."""

    load: Load
    depth: int
    """Batches ahead."""
    is_own: bool
    """Whether the loader would take that depth by itself; if not, ``memory=`` holds it to less."""
    outcome: Outcome

    @property
    def in_flight(self) -> int:
        """Samples that are loaded or being loaded at the fullest."""
        return (self.depth + 1) * self.load.batch_size


def try_all(load: Load, *, room_bytes: int, most_workers: int | None = None) -> list[Tried]:
    """Every number of workers worth trying, each with the loader's own depth and with less ahead.

    Not with more ahead: the loader takes as much as keeps its workers busy, and ``memory=`` only holds it to less.
    """
    found: list[Tried] = []
    best, since = 0.0, 0
    for workers in worker_counts(load.profile, load.cores, most_workers):
        here = replace(load, workers=workers)
        usual = usual_depth(load.profile, load.batch_size, workers)
        depths = {_depth_within(here, depth, room_bytes) for depth in (1, 2, (usual + 2) // 2, usual) if depth <= usual}
        own = max(depths)
        tried = [
            Tried(
                load=here,
                depth=depth,
                is_own=depth == own,
                outcome=play_ours(here, depth, room_bytes) if depth == own else play_held(here, depth),
            )
            for depth in sorted(depths)
        ]
        found += tried
        fastest = max(each.outcome.samples_per_s for each in tried)
        since = 0 if fastest >= _GAIN * best else since + 1
        best = max(best, fastest)
        if since == _PATIENCE:
            break
    return found


def _depth_within(load: Load, depth: int, room_bytes: int) -> int:
    return max(1, min(depth, slots_within(load, depth, room_bytes) - 1))


def worker_counts(profile: Profile, cores: float, most: int | None = None) -> list[int]:
    """Numbers of workers worth trying: up to the cores, and more only where samples were measured to wait."""
    whole = max(1, int(cores))
    if most is None:
        busy_s = profile.cpu_s + profile.ours.sample_s + profile.ours.batch_s / 8
        waits = profile.wait_s / max(busy_s, 1e-6) if profile.is_measured else 0.0
        # With just as many as would keep the cores busy, those who wait happen to wait together.
        most = whole if waits < _HARDLY else min(_MOST_WORKERS_A_CORE * whole, int(whole * (2 + waits)))
        most = min(most, max(whole, _MOST_WORKERS))
    return sorted({*(step for step in _STEPS if step <= most), max(1, most)})


def choose(tried: list[Tried], within: list[Tried], *, alike: float) -> dict[str, Tried]:
    """What each name stands for. ``within``: those that fit what was allowed; the fast one is of them."""
    own = [each for each in tried if each.is_own]
    best = _fastest(own)
    allowed = within or tried
    # Less ahead than the loader's own leaves workers idle: only where memory does not allow more.
    # Nor where less ahead is the faster in thought: then "fast" would take less than "safe" does.
    enough = alike * min(_fastest(allowed), best)
    calm = [each for each in allowed if each.is_own and each.outcome.samples_per_s >= enough]
    return {
        "safe": _least(own, _SAFE * best),
        "balanced": _least(own, _BALANCED * best),
        "fast": _least(calm or allowed, enough),
        "extreme": _least(own, _EXTREME * best),
    }


def _fastest(tried: Iterable[Tried]) -> float:
    return max(each.outcome.samples_per_s for each in tried)


def _least(tried: Iterable[Tried], samples_per_s: float) -> Tried:
    """The one that takes least of those that are so fast."""
    fast = [each for each in tried if each.outcome.samples_per_s >= samples_per_s]
    return min(fast, key=lambda each: (each.outcome.growth_bytes, each.load.workers))


def larger_batch(load: Load) -> Load:
    """Half as many samples again in a batch; a step takes longer by as much at most."""
    larger = max(load.batch_size + 1, round(load.batch_size * _LARGER_BATCH))
    return replace(load, batch_size=larger, step_s=load.step_s * larger / load.batch_size)


def largest_fitting(load: Load, fits: Callable[[Tried], bool]) -> int | None:
    """The most samples a smaller batch can have where one worker builds one batch ahead; None: not even one fits."""

    def does_fit(batch_size: int) -> bool:
        here = replace(load, batch_size=batch_size, workers=1, step_s=load.step_s * batch_size / load.batch_size)
        return fits(Tried(load=here, depth=1, is_own=False, outcome=play_held(here, 1)))

    fitting, too_many = 0, load.batch_size
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        fitting, too_many = (middle, too_many) if does_fit(middle) else (fitting, middle)
    return fitting or None
