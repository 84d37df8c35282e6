"""What a traced training allocated and freed, in order.

In:  the recorder's calls.
Out: ``Trace``: one number per event, one row per allocation.
Runs in: trainer, command line. Needs no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.gpu.trace.reductions import Reduction

PARAMETERS, GRADIENTS, OPTIMIZER_STATE = "parameters", "gradients", "optimizer_state"
INPUTS, ACTIVATIONS, TEMPORARIES, WORKSPACES = "inputs", "activations", "temporaries", "workspaces"

FORWARD, BACKWARD, OPTIMIZER, SETUP = "forward", "backward", "optimizer", "setup"


@dataclass(kw_only=True)
class Step:
    """One training step's stretch of events."""

    batch_size: int
    first: int
    """Index of its first event."""
    end: int = 0
    """Index after its last event."""


@dataclass(kw_only=True)
class Trace:
    """Allocations by id, from 1; events by time: an id when it is allocated, minus the id when it is freed."""

    sizes: list[int] = field(default_factory=lambda: [0])
    """Bytes asked for."""
    kinds: list[str] = field(default_factory=lambda: [""])
    """What it is: one of the names above."""
    phases: list[str] = field(default_factory=lambda: [""])
    """When it was allocated."""
    makers: list[str] = field(default_factory=lambda: [""])
    """The operation it came from."""
    modules: list[str] = field(default_factory=lambda: [""])
    """The module whose forward was running, by its path in the model; "" outside."""
    uncertain: set[int] = field(default_factory=set)
    """Ids whose size is a guess: workspaces that a library chooses at run time."""
    staying: set[int] = field(default_factory=set)
    """Ids that a library takes at its first call and keeps: the first step has them alone."""
    reductions: dict[int, Reduction] = field(default_factory=dict)
    """Ids that are partial sums -> of what: their size does not grow evenly."""
    events: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    """The steps; what comes before the first is the model's way onto the device."""

    def allocate(self, size_bytes: int, kind: str, phase: str, maker: str, module: str) -> int:
        """One more allocation; its id."""
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
        self.steps.append(Step(batch_size=batch_size, first=len(self.events)))

    def end_step(self) -> None:
        self.steps[-1].end = len(self.events)
