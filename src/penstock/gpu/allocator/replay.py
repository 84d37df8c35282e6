"""A script played through the allocator: the peaks, and what they are made of.

In:  a script, a batch size, the allocator's settings, perhaps a limit.
Out: ``Peak``.
Runs in: trainer, command line; pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.gpu.allocator.alloc_conf import AllocatorSettings
from penstock.gpu.allocator.caching_allocator import Block, CachingAllocator, DeviceFull
from penstock.gpu.trace.script import Script

STEPS = 3
"""Steps played: the first has no optimizer state yet, the second sets most of the peaks, the third settles."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most that was taken."""

    allocated_bytes: int
    reserved_bytes: int
    phase: str
    """Phase of the step in which most was allocated."""
    parts: dict[str, int]
    """Kind -> bytes, at that moment."""
    modules: dict[str, int]
    """Module -> bytes of its activations, at that moment."""
    retries: int
    """How often cached memory had to be given back to meet a request."""
    full: DeviceFull | None = None
    """Set if the limit was not enough; the figures are those up to there."""


def play(
    script: Script,
    batch_size: int,
    settings: AllocatorSettings,
    *,
    limit_bytes: int | None = None,
    guess_factor: float = 1.0,
) -> Peak:
    """``guess_factor`` scales what is not known but guessed."""
    return _Player(script, batch_size, settings, limit_bytes, guess_factor).run()


class _Player:
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
        stretches = [script.setup + script.first, *[script.later] * (STEPS - 1)]
        full = None
        try:
            for turn, events in enumerate(stretches):
                self._play(events, turn)
        except DeviceFull as error:
            full = error
        live = self._live_at(stretches, *self._peak_at)
        trace = script.trace
        parts: dict[str, int] = {}
        modules: dict[str, int] = {}
        for number in live:
            parts[trace.kinds[number]] = parts.get(trace.kinds[number], 0) + self._sizes[number]
            if trace.kinds[number] == "activations":
                modules[trace.modules[number]] = modules.get(trace.modules[number], 0) + self._sizes[number]
        last = stretches[self._peak_at[0]][self._peak_at[1]] if any(stretches) else 0
        return Peak(
            allocated_bytes=self._allocator.peak_allocated_bytes,
            reserved_bytes=self._allocator.peak_reserved_bytes,
            phase=trace.phases[abs(last)],
            parts=parts,
            modules=modules,
            retries=self._allocator.retries,
            full=full,
        )

    def _play(self, events: list[int], turn: int) -> None:
        allocator, sizes = self._allocator, self._sizes
        heirs = self._script.heirs if turn > 1 else {}
        before, now = self._held, {}
        for at, event in enumerate(events):
            if event > 0:
                if sizes[event]:
                    now[event] = allocator.allocate(sizes[event])
                    if allocator.allocated_bytes > self._peak_bytes:
                        self._peak_bytes = allocator.allocated_bytes
                        self._peak_at = (turn, at)
                continue
            block = now.pop(-event, None) or before.pop(heirs.get(-event, -event), None)
            if block is not None:
                allocator.free(block)
        # The second step frees the first's by their own names; from the third on the names are the second's.
        self._held = {**before, **now} if turn == 0 else {**{k: v for k, v in before.items() if k not in now}, **now}

    def _live_at(self, stretches: list[list[int]], turn: int, at: int) -> Iterable[int]:
        """Ids that were alive then; those of the first step stand for their heirs."""
        live: set[int] = set()
        for number, events in enumerate(stretches[: turn + 1]):
            heirs = self._script.heirs if number > 1 else {}
            fresh: set[int] = set()
            for event in events if number < turn else events[: at + 1]:
                if event > 0:
                    fresh.add(event)
                elif -event in fresh:
                    fresh.discard(-event)
                else:
                    live.discard(heirs.get(-event, -event))
            live |= fresh
        return live
