"""Simulates a script on the allocator, and finds the peaks and the allocations that they consist of.

In:  a script, a batch size, the allocator's settings, and optionally a limit.
Out: ``Peak``.
Runs in: trainer, command line; pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.gpu.allocator.alloc_conf import AllocatorSettings
from penstock.gpu.allocator.caching_allocator import Block, CachingAllocator, DeviceFull
from penstock.gpu.trace.trace import ACTIVATIONS, Script

STEPS = 3
"""The number of simulated steps. The first has no optimizer state yet, the second reaches most of the peaks, and the
third repeats the second."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The largest amount of memory that was taken."""

    allocated_bytes: int
    reserved_bytes: int
    phase: str
    """The phase of the step at the peak of allocated bytes."""
    parts: dict[str, int]
    """Kind -> bytes at the peak of allocated bytes."""
    modules: dict[str, int]
    """Module -> bytes of its activations at the peak of allocated bytes."""
    retries: int
    """The number of requests for which cached memory had to be released first."""
    full: DeviceFull | None = None
    """The error if the limit was not enough; the figures are then the peaks up to the refused request."""


def simulate(
    script: Script,
    batch_size: int,
    settings: AllocatorSettings,
    *,
    limit_bytes: int | None = None,
    guess_factor: float = 1.0,
) -> Peak:
    """The peaks of three steps. ``guess_factor`` scales the sizes that are guesses."""
    return _Simulation(script, batch_size, settings, limit_bytes, guess_factor).run()


class _Simulation:
    def __init__(
        self, script: Script, batch_size: int, settings: AllocatorSettings, limit_bytes: int | None, guess_factor: float
    ) -> None:
        self._script = script
        self._sizes = script.sizes(batch_size)
        for number in script.trace.uncertain:
            self._sizes[number] = round(self._sizes[number] * guess_factor)
        self._allocator = CachingAllocator(settings, limit_bytes=limit_bytes)
        self._held: dict[int, Block] = {}
        self._peak_bytes = 0
        self._peak_at = (0, 0)

    def run(self) -> Peak:
        script = self._script
        steps = [script.setup + script.first, *[script.later] * (STEPS - 1)]
        full = None
        try:
            for step, events in enumerate(steps):
                self._run_step(events, step)
        except DeviceFull as error:
            full = error
        live = self._live_at(steps, *self._peak_at)
        trace = script.trace
        parts: dict[str, int] = {}
        modules: dict[str, int] = {}
        for number in live:
            parts[trace.kinds[number]] = parts.get(trace.kinds[number], 0) + self._sizes[number]
            if trace.kinds[number] == ACTIVATIONS:
                modules[trace.modules[number]] = modules.get(trace.modules[number], 0) + self._sizes[number]
        last = steps[self._peak_at[0]][self._peak_at[1]] if any(steps) else 0
        return Peak(
            allocated_bytes=self._allocator.peak_allocated_bytes,
            reserved_bytes=self._allocator.peak_reserved_bytes,
            phase=trace.phases[abs(last)],
            parts=parts,
            modules=modules,
            retries=self._allocator.retries,
            full=full,
        )

    def _run_step(self, events: list[int], step: int) -> None:
        allocator, sizes = self._allocator, self._sizes
        successors = self._script.successors if step > 1 else {}
        before, now = self._held, {}
        for at, event in enumerate(events):
            if event > 0:
                if sizes[event]:
                    now[event] = allocator.allocate(sizes[event])
                    if allocator.allocated_bytes > self._peak_bytes:
                        self._peak_bytes = allocator.allocated_bytes
                        self._peak_at = (step, at)
                continue
            block = now.pop(-event, None) or before.pop(successors.get(-event, -event), None)
            if block is not None:
                allocator.free(block)
        # The second step frees allocations of the first step by their ids; all later steps use the ids of the second
        # step.
        self._held = {**before, **now} if step == 0 else {**{k: v for k, v in before.items() if k not in now}, **now}

    def _live_at(self, steps: list[list[int]], step: int, at: int) -> Iterable[int]:
        """The ids of the allocations that exist at event ``at`` of a step."""
        live: set[int] = set()
        for earlier, events in enumerate(steps[: step + 1]):
            successors = self._script.successors if earlier > 1 else {}
            fresh: set[int] = set()
            for event in events if earlier < step else events[: at + 1]:
                if event > 0:
                    fresh.add(event)
                elif -event in fresh:
                    fresh.discard(-event)
                else:
                    live.discard(successors.get(-event, -event))
            live |= fresh
        return live
