"""What a training gives back next when memory is short. Pure.

In:  what each loader holds and could do without.
Out: one valve to turn, by a little; None once all are at 1.
Runs in: trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_PART = 4
"""A quarter at a time: one by one would take minutes from a depth of 64, half at once costs speed nobody asked for."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One loader that has valves."""

    number: int
    """Which of the run's loaders."""
    depth: int
    """Batches that may be ahead; 0: it has not been read yet, and holds nothing."""
    workers: int
    in_flight_bytes: float
    """Memory of its batches."""
    workers_private_bytes: float


@dataclass(frozen=True, kw_only=True)
class ReleaseStep:
    """One valve, turned down."""

    number: int
    """Of which loader."""
    valve: str
    """depth or workers."""
    to: int


def next_step(loaders: Sequence[Holding]) -> ReleaseStep | None:
    """Depth first, of who holds most; then workers. A loader without workers has nothing ahead to give."""
    loaders = [each for each in loaders if each.depth and each.workers]
    deep = [each for each in loaders if each.depth > 1]
    if deep:
        most = max(deep, key=lambda each: each.in_flight_bytes)
        return ReleaseStep(number=most.number, valve="depth", to=_less(most.depth))
    crowded = [each for each in loaders if each.workers > 1]
    if crowded:
        most = max(crowded, key=lambda each: each.workers_private_bytes)
        return ReleaseStep(number=most.number, valve="workers", to=_less(most.workers))
    return None


def _less(count: int) -> int:
    return count - max(1, count // _PART)
