"""Simulates the time that activities take which compute and wait, on a machine with a number of cores.

In:  the steps of activities: a wait, a computation, or a pause until a condition is true.
Out: the time at which each step ends.
Runs in: anywhere; no clock is read.

Activities that compute share the cores evenly, and they slow each other down while there are more activities than
cores. Nothing is random: the same activities always take the same time.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator
from typing import NamedTuple


class Wait(NamedTuple):
    seconds: float


class Compute(NamedTuple):
    seconds: float
    """The processor time of one core."""


class Until(NamedTuple):
    is_so: Callable[[], bool]


Activity = Generator[Wait | Compute | Until, None, None]


class Cores:
    def __init__(self, count: float, *, crowding: float = 0.0) -> None:
        """``crowding`` is the share by which work takes longer while more activities compute than there are cores."""
        self._count = max(count, 0.01)
        self._crowding = crowding
        self.now_s = 0.0
        self._served_s = 0.0
        """The processor time that an activity which has computed since the beginning would have had."""
        self._waiting: list[tuple[float, int, Activity]] = []
        self._computing: list[tuple[float, int, Activity]] = []
        self._holding: list[tuple[Callable[[], bool], Activity]] = []
        self._numbers = itertools.count()

    def begin(self, activity: Activity) -> None:
        self._step(activity)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Let time pass until ``is_over`` returns True, or until nothing more can happen."""
        while not is_over():
            if self._resume_one():
                continue
            if not self._waiting and not self._computing:
                return
            self._pass_time()

    def _step(self, activity: Activity) -> None:
        step = next(activity, None)
        if isinstance(step, Wait):
            heapq.heappush(self._waiting, (self.now_s + step.seconds, next(self._numbers), activity))
        elif isinstance(step, Compute):
            heapq.heappush(self._computing, (self._served_s + step.seconds, next(self._numbers), activity))
        elif step is not None:
            self._holding.append((step.is_so, activity))

    def _resume_one(self) -> bool:
        """Resume the first activity whose condition is true. Returns False if all conditions are false."""
        # Only one activity is resumed, because it may take what the next activity was waiting for.
        for place, (is_so, activity) in enumerate(self._holding):
            if is_so():
                del self._holding[place]
                self._step(activity)
                return True
        return False

    def _pass_time(self) -> None:
        """Move the simulated time to the next moment at which a step ends."""
        share = self._share()
        computed_s = self.now_s + (self._computing[0][0] - self._served_s) / share if self._computing else float("inf")
        waited_s = self._waiting[0][0] if self._waiting else float("inf")
        if computed_s <= waited_s:
            served_s, _, activity = heapq.heappop(self._computing)
            self.now_s, self._served_s = computed_s, served_s
        else:
            self._served_s += (waited_s - self.now_s) * share
            self.now_s, _, activity = heapq.heappop(self._waiting)
        self._step(activity)

    def _share(self) -> float:
        """The share of a core that each computing activity gets."""
        if len(self._computing) <= self._count:
            return 1.0
        return self._count / len(self._computing) / (1 + self._crowding)
