"""The allocations and frees of a traced training, and the script that they make for any batch size.

In:  calls from the recorder: two steps with one batch size and, if the model accepts it, a third step with another.
Out: ``Trace``, with one number per event and one row per allocation. ``Script``, with the events of the setup, of the
     first step and of later steps, and the size of every allocation as a function of the batch size.
Runs in: trainer, command line. Needs no GPU.

All later steps are like the second step; only the first step creates the optimizer's state. Some allocations of one
step (gradients, the batch, the loss) are freed in the next step and are matched by the order in which they were made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from penstock.gpu.trace.reductions import Reduction, between

PARAMETERS, GRADIENTS, OPTIMIZER_STATE = "parameters", "gradients", "optimizer_state"
INPUTS, ACTIVATIONS, TEMPORARIES, WORKSPACES = "inputs", "activations", "temporaries", "workspaces"

FORWARD, BACKWARD, OPTIMIZER, SETUP = "forward", "backward", "optimizer", "setup"


@dataclass(kw_only=True)
class TracedStep:
    """The events of one training step."""

    batch_size: int
    first: int
    """The index of the first event of the step."""
    end: int = 0
    """The index after the last event of the step."""


@dataclass(kw_only=True)
class Trace:
    """All allocations, with ids from 1, and all events in order of time. An event is the id of an allocation that is
    made, or minus the id of an allocation that is freed."""

    sizes: list[int] = field(default_factory=lambda: [0])
    """Bytes requested."""
    kinds: list[str] = field(default_factory=lambda: [""])
    """Id -> the kind of the allocation, which is one of the kinds above."""
    phases: list[str] = field(default_factory=lambda: [""])
    """Id -> the phase of the allocation, which is one of the phases above."""
    makers: list[str] = field(default_factory=lambda: [""])
    """Id -> the operation that made the allocation."""
    modules: list[str] = field(default_factory=lambda: [""])
    """Id -> the path of the module whose forward method was running; "" if no module was running."""
    uncertain: set[int] = field(default_factory=set)
    """The ids of allocations whose size is a guess, such as workspaces that a library chooses at run time."""
    kept_by_libraries: set[int] = field(default_factory=set)
    """The ids of allocations that a library makes at its first call and never frees; they occur only in the first
    step."""
    reductions: dict[int, Reduction] = field(default_factory=dict)
    """Id of partial sums -> the sum, from which their size is computed, because it does not grow linearly with the
    batch."""
    events: list[int] = field(default_factory=list)
    steps: list[TracedStep] = field(default_factory=list)
    """The steps. The events before the first step move the model to the device."""

    def allocate(self, size_bytes: int, kind: str, phase: str, maker: str, module: str) -> int:
        """Record an allocation, and return its id."""
        number = len(self.sizes)
        self.sizes.append(size_bytes)
        self.kinds.append(kind)
        self.phases.append(phase)
        self.makers.append(maker)
        self.modules.append(module)
        self.events.append(number)
        return number

    def free(self, number: int) -> None:
        self.events.append(-number)

    def begin_step(self, batch_size: int) -> None:
        self.steps.append(TracedStep(batch_size=batch_size, first=len(self.events)))

    def end_step(self) -> None:
        self.steps[-1].end = len(self.events)


@dataclass(frozen=True, kw_only=True)
class Script:
    """The order in which allocations are made and freed, and the size of each allocation for any batch size."""

    trace: Trace
    setup: list[int]
    first: list[int]
    later: list[int]
    successors: dict[int, int]
    """Allocation of the first step that the second step frees -> allocation of the second step that a third step frees
    instead."""
    batch_size: int
    """The batch size of the first two steps."""
    other_batch_size: int | None = None
    """The batch size of the third step; None if sizes are known only for ``batch_size``."""
    other_sizes: dict[int, int] = field(default_factory=dict)
    """Id -> bytes at the other batch size, for allocations whose size differs."""
    other_sums: dict[int, Reduction] = field(default_factory=dict)
    """Id of partial sums -> their sum at the other batch size."""

    @property
    def is_regular(self) -> bool:
        """Whether sizes are known for every batch size."""
        return self.other_batch_size is not None

    def sizes(self, batch_size: int) -> list[int]:
        """The bytes of every allocation, by id."""
        sizes = list(self.trace.sizes)
        if self.other_batch_size is None or batch_size == self.batch_size:
            return sizes
        span = self.other_batch_size - self.batch_size
        for number, other in self.other_sizes.items():
            mine = sizes[number]
            slope = (other - mine) / span
            if not mine or not other or mine - slope * self.batch_size >= -0.5:
                sizes[number] = max(0, round(mine + slope * (batch_size - self.batch_size)))
            else:  # the size grows faster than the batch: a line would be negative at batch size 0
                power = math.log(other / mine) / math.log(self.other_batch_size / self.batch_size)
                sizes[number] = round(mine * (batch_size / self.batch_size) ** power)
        share = (batch_size - self.batch_size) / span
        for number, other in self.other_sums.items():
            sizes[number] = between(self.trace.reductions[number], other, share).scratch_bytes
        return sizes


def script_of(trace: Trace) -> Script:
    """The script of a trace with two or three steps."""
    first, later = trace.steps[0], trace.steps[1]
    _mark_temporaries(trace)
    script = Script(
        trace=trace,
        setup=trace.events[: first.first],
        first=trace.events[first.first : first.end],
        later=trace.events[later.first : later.end],
        successors=_successors(trace, first, later),
        batch_size=first.batch_size,
    )
    if len(trace.steps) < 3:
        return script
    counterparts = _matched(trace, script, trace.steps[2])
    if counterparts is None:
        return script
    sizes, sums = trace.sizes, trace.reductions
    return replace(
        script,
        other_batch_size=trace.steps[2].batch_size,
        other_sizes={mine: sizes[other] for mine, other in counterparts.items() if sizes[other] != sizes[mine]},
        other_sums={mine: sums[other] for mine, other in counterparts.items() if mine in sums and other in sums},
    )


def _mark_temporaries(trace: Trace) -> None:
    """Mark each allocation that is freed before the backward pass begins as a temporary one, not as an activation."""
    forward, phase, born = 0, FORWARD, {}
    for event in trace.events:
        if event > 0:
            now = trace.phases[event]
            if now == BACKWARD and phase != BACKWARD:
                forward += 1
            phase = now
            born[event] = forward
        elif trace.kinds[-event] == ACTIVATIONS and trace.phases[-event] == FORWARD and born[-event] == forward:
            trace.kinds[-event] = TEMPORARIES


def _successors(trace: Trace, first: TracedStep, later: TracedStep) -> dict[int, int]:
    """Match, in order, the allocations that each step leaves for the next step to free."""
    made_first = {event for event in trace.events[first.first : first.end] if event > 0}
    freed_later = {-event for event in trace.events[later.first : later.end] if event < 0}
    made_later = {event for event in trace.events[later.first : later.end] if event > 0}
    left_over = sorted(made_later - freed_later)
    inherited = sorted(made_first & freed_later)
    by_kind: dict[tuple[str, str, str], list[int]] = {}
    for number in left_over:
        by_kind.setdefault(_label(trace, number), []).append(number)
    for numbers in by_kind.values():
        numbers.reverse()
    return {number: by_kind[label].pop() for number in inherited if by_kind.get(label := _label(trace, number))}


def _label(trace: Trace, number: int) -> tuple[str, str, str]:
    return trace.kinds[number], trace.phases[number], trace.makers[number]


def _matched(trace: Trace, script: Script, other: TracedStep) -> dict[int, int] | None:
    """Allocation -> the same allocation at the other batch size; None if the events of the two steps differ."""
    counterparts: dict[int, int] = {}
    events = trace.events[other.first : other.end]
    if len(events) != len(script.later):
        return None
    for mine, tsuccessors in zip(script.later, events, strict=True):
        if (mine > 0) != (tsuccessors > 0):
            return None
        if mine > 0:
            if trace.makers[mine] != trace.makers[tsuccessors]:
                return None
            counterparts[mine] = tsuccessors
        elif counterparts.get(-mine, script.successors.get(-mine)) not in (-tsuccessors, None):
            return None
    early = [event for event in script.first if event > 0 and trace.phases[event] != OPTIMIZER]
    steady = [event for event in script.later if event > 0 and trace.phases[event] != OPTIMIZER]
    early = [event for event in early if event not in trace.kept_by_libraries]
    if [trace.sizes[event] for event in early] != [trace.sizes[event] for event in steady]:
        return None
    return counterparts | {mine: counterparts[steadily] for mine, steadily in zip(early, steady, strict=True)}
