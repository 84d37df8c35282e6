"""The loader's own constants in one place, so that tests can force every path.

In:  nothing.
Out: ``Tuning``.
Runs in: trainer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How work is cut and how far ahead it runs, where the user said nothing."""

    task_s: float = 0.005
    """A batch that takes less is fetched by one worker; longer ones are cut into tasks of about this length."""
    queue_s: float = 0.006
    """Short tasks are queued on their worker up to this much work ahead, so that it never waits for the trainer."""
    patient_s: float = 0.020
    """Tasks at least this long are never queued behind another: a slow sample must not hold them up."""
    idle_release_s: float = 10.0
    """A loader nobody asked for this long gives its memory back."""
    rest_s: float = 1.0
    """The same after the end of an epoch: time enough to begin the next."""
    auto_memory: float = 0.5
    """Share of the available memory that memory="auto" takes."""
    split_always: bool = False
    """Cut every batch into single stretches, however short it is."""
    max_slots: int | None = None
    """Never have more batches than this in the arena, filled, ready or lent; None leaves it to the budget."""
