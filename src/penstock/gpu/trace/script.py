"""A traced training as a script that can be played for any batch size and any number of steps.

In:  a trace of two steps with one batch size and, where it worked, a third with another.
Out: ``Script``: events of setup, first and later steps; every allocation's size as a function of the batch size.
Runs in: trainer, command line; pure.

Later steps are all like the second: the first creates the optimizer's state. What one step leaves to the next to free
(gradients, the batch, the loss) is matched by the order in which it was made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from penstock.gpu.trace.reductions import Reduction, between
from penstock.gpu.trace.trace import ACTIVATIONS, BACKWARD, FORWARD, OPTIMIZER, TEMPORARIES, Step, Trace


@dataclass(frozen=True, kw_only=True)
class Script:
    """What is allocated when, for whatever batch size."""

    trace: Trace
    setup: list[int]
    first: list[int]
    later: list[int]
    heirs: dict[int, int]
    """What the second step frees for the first -> what a third frees for the second in its place."""
    batch_size: int
    """Of the first two steps."""
    other_batch_size: int | None = None
    """Of the step they were compared with; None: sizes are known for ``batch_size`` only."""
    other_sizes: dict[int, int] = field(default_factory=dict)
    """Bytes at the other batch size, of what differs there."""
    other_sums: dict[int, Reduction] = field(default_factory=dict)
    """What is summed at the other batch size, by the id of the partial sums."""

    @property
    def is_regular(self) -> bool:
        """Whether sizes are known for every batch size."""
        return self.other_batch_size is not None

    def sizes(self, batch_size: int) -> list[int]:
        """Bytes of every allocation."""
        sizes = list(self.trace.sizes)
        if self.other_batch_size is None or batch_size == self.batch_size:
            return sizes
        span = self.other_batch_size - self.batch_size
        for number, other in self.other_sizes.items():
            mine = sizes[number]
            slope = (other - mine) / span
            if not mine or not other or mine - slope * self.batch_size >= -0.5:
                sizes[number] = max(0, round(mine + slope * (batch_size - self.batch_size)))
            else:  # a line would have been negative at no sample: it grows faster than the batch
                power = math.log(other / mine) / math.log(self.other_batch_size / self.batch_size)
                sizes[number] = round(mine * (batch_size / self.batch_size) ** power)
        share = (batch_size - self.batch_size) / span
        for number, other in self.other_sums.items():
            sizes[number] = between(self.trace.reductions[number], other, share).scratch_bytes
        return sizes


def script_of(trace: Trace) -> Script:
    """The script behind a trace of two steps or three."""
    first, later = trace.steps[0], trace.steps[1]
    _tell_temporaries(trace)
    heirs = _heirs(trace, first, later)
    script = Script(
        trace=trace,
        setup=trace.events[: first.first],
        first=trace.events[first.first : first.end],
        later=trace.events[later.first : later.end],
        heirs=heirs,
        batch_size=first.batch_size,
    )
    if len(trace.steps) < 3:
        return script
    twins = _matched(trace, script, trace.steps[2])
    if twins is None:
        return script
    sizes, sums = trace.sizes, trace.reductions
    return Script(
        trace=trace,
        setup=script.setup,
        first=script.first,
        later=script.later,
        heirs=heirs,
        batch_size=script.batch_size,
        other_batch_size=trace.steps[2].batch_size,
        other_sizes={mine: sizes[other] for mine, other in twins.items() if sizes[other] != sizes[mine]},
        other_sums={mine: sums[other] for mine, other in twins.items() if mine in sums and other in sums},
    )


def _tell_temporaries(trace: Trace) -> None:
    """What a forward pass freed before its backward pass began was no activation."""
    turn, phase, born = 0, FORWARD, {}
    for event in trace.events:
        if event > 0:
            now = trace.phases[event]
            if now == BACKWARD and phase != BACKWARD:
                turn += 1
            phase = now
            born[event] = turn
        elif trace.kinds[-event] == ACTIVATIONS and trace.phases[-event] == FORWARD and born[-event] == turn:
            trace.kinds[-event] = TEMPORARIES


def _heirs(trace: Trace, first: Step, later: Step) -> dict[int, int]:
    """What each leaves to the step after it, matched in order."""
    made_first = {event for event in trace.events[first.first : first.end] if event > 0}
    freed_later = {-event for event in trace.events[later.first : later.end] if event < 0}
    made_later = {event for event in trace.events[later.first : later.end] if event > 0}
    left = sorted(made_later - freed_later)
    inherited = sorted(made_first & freed_later)
    by_kind: dict[tuple[str, str, str], list[int]] = {}
    for number in left:
        by_kind.setdefault(_face(trace, number), []).append(number)
    for numbers in by_kind.values():
        numbers.reverse()
    return {number: by_kind[face].pop() for number in inherited if by_kind.get(face := _face(trace, number))}


def _face(trace: Trace, number: int) -> tuple[str, str, str]:
    return trace.kinds[number], trace.phases[number], trace.makers[number]


def _matched(trace: Trace, script: Script, other: Step) -> dict[int, int] | None:
    """What each allocation is at the other batch size; None if the steps are not alike, event by event."""
    twins: dict[int, int] = {}
    events = trace.events[other.first : other.end]
    if len(events) != len(script.later):
        return None
    for mine, theirs in zip(script.later, events, strict=True):
        if (mine > 0) != (theirs > 0):
            return None
        if mine > 0:
            if trace.makers[mine] != trace.makers[theirs]:
                return None
            twins[mine] = theirs
        elif twins.get(-mine, script.heirs.get(-mine)) not in (-theirs, None):
            return None
    early = [event for event in script.first if event > 0 and trace.phases[event] != OPTIMIZER]
    steady = [event for event in script.later if event > 0 and trace.phases[event] != OPTIMIZER]
    early = [event for event in early if event not in trace.staying]
    if [trace.sizes[event] for event in early] != [trace.sizes[event] for event in steady]:
        return None
    return twins | {mine: twins[steadily] for mine, steadily in zip(early, steady, strict=True)}
