"""Chooses the settings to simulate, and the simulated settings that become plans.

In:  a ``Load``: the dataset, the workers and the cores to simulate.
Out: simulated settings (``Tried``); for each plan's name, the settings that are chosen.
Runs in: anywhere; pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from penstock.planner.profile import Profile
from penstock.planner.simulate.penstock_pipeline import batches_within, simulate_held, simulate_penstock, slots_within
from penstock.planner.simulate.pipeline import Load, Simulation

_STEPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 112, 128)
"""Numbers of workers that differ enough to be worth simulating."""
_MOST_WORKERS_A_CORE, _MOST_WORKERS = 4, 64
_HARDLY = 0.1
"""A sample is bound by the processor if its waiting takes less than this share of its computing time."""
_GAIN = 1.005
"""The smallest factor of speed by which more workers must be faster to count as a gain."""
_PATIENCE = 3
"""The search ends after this many numbers of workers in a row bring no gain."""
_SAFE, _BALANCED, _EXTREME = 0.6, 0.85, 0.998
"""The share of the highest speed that each plan must reach with the least memory."""
_LARGER_BATCH = 1.5


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Settings with the result of their simulation."""

    load: Load
    depth: int
    """Batches ahead."""
    is_own: bool
    """Whether the loader chooses this depth itself; if not, ``memory=`` limits the loader to this depth."""
    outcome: Simulation

    @property
    def in_flight(self) -> int:
        """The largest number of samples that are loaded or being loaded at the same time."""
        return (self.depth + 1) * self.load.batch_size


def try_all(load: Load, *, room_bytes: int, most_workers: int | None = None) -> list[Tried]:
    """Simulate every promising number of workers, with the depth that the loader itself chooses and with smaller
    depths.

    Larger depths are left out: the loader chooses the depth that keeps its workers busy, and ``memory=`` can only lower
    it.
    """
    found: list[Tried] = []
    best, since = 0.0, 0
    for workers in worker_counts(load.profile, load.cores, most_workers):
        here = replace(load, workers=workers)
        room = batches_within(here, room_bytes)
        usual = here.depth_within(room)
        depths = {
            max(1, min(depth, slots_within(here, depth, room) - 1))
            for depth in (1, 2, (usual + 2) // 2, usual)
            if depth <= usual
        }
        own = max(depths)
        tried = [_try(here, depth, room if depth == own else None) for depth in sorted(depths)]
        found += tried
        fastest = _fastest(tried)
        since = 0 if fastest >= _GAIN * best else since + 1
        best = max(best, fastest)
        if since == _PATIENCE:
            break
    return found


def _try(load: Load, depth: int, room: int | None) -> Tried:
    """``room`` is the number of batches that fit; None means that the budget limits the loader to ``depth``."""
    outcome = simulate_held(load, depth) if room is None else simulate_penstock(load, None, room)
    return Tried(load=load, depth=depth, is_own=room is not None, outcome=outcome)


def worker_counts(profile: Profile, cores: float, most: int | None = None) -> list[int]:
    """The numbers of workers worth simulating: up to the number of cores, and more only if samples were measured to
    wait."""
    whole = max(1, int(cores))
    if most is None:
        busy_s = profile.cpu_s + profile.ours.sample_s + profile.ours.batch_s / 8
        waits = profile.wait_s / max(busy_s, 1e-6) if profile.is_measured else 0.0
        # Two more workers per core are tried than keep a core busy on average, because sometimes several workers wait
        # at the same time.
        most = whole if waits < _HARDLY else min(_MOST_WORKERS_A_CORE * whole, int(whole * (2 + waits)))
        most = min(most, max(whole, _MOST_WORKERS))
    return sorted({*(step for step in _STEPS if step <= most), max(1, most)})


def choose(tried: list[Tried], within: list[Tried], *, alike: float) -> dict[str, Tried]:
    """The settings for each plan's name. ``within`` holds the settings that fit the budget; the fast plan is one of
    them."""
    own = [each for each in tried if each.is_own]
    best = _fastest(own)
    allowed = within or tried
    # A depth below the loader's own choice leaves workers idle, so settings with a smaller depth count only if memory
    # allows no larger one. If these settings always counted, a simulation could show them as faster, and "fast" could
    # take less memory than "safe".
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
    """Of the settings that reach this rate, the settings that take the least memory."""
    fast = [each for each in tried if each.outcome.samples_per_s >= samples_per_s]
    return min(fast, key=lambda each: (each.outcome.growth_bytes, each.load.workers))


def larger_batch(load: Load) -> Load:
    """The same load with 1.5 times as many samples in a batch, and a training step that takes at most 1.5 times as
    long."""
    larger = max(load.batch_size + 1, round(load.batch_size * _LARGER_BATCH))
    return replace(load, batch_size=larger, step_s=load.step_s * larger / load.batch_size)


def largest_fitting(load: Load, fits: Callable[[Tried], bool]) -> int | None:
    """The largest smaller batch size that fits with one worker and one batch ahead; None if not even a batch of one
    fits."""
    fitting, too_many = 0, load.batch_size
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        here = replace(load, batch_size=middle, workers=1, step_s=load.step_s * middle / load.batch_size)
        if fits(_try(here, 1, None)):
            fitting = middle
        else:
            too_many = middle
    return fitting or None
