"""The decision tree: a few questions that lead to a plan's name.

In:  answers.
Out: the next question, or the plan.
Runs in: anywhere; pure: a table. The plan that is recommended without questions is chosen in ``plans``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question, and where its answers lead."""

    text: str
    answers: Mapping[str, str]
    """Answer -> the next question's key, or a plan's name."""

    def leads_to(self, answer: str) -> str | None:
        """Where an answer leads; its first letters in any case are enough. None if they match none, or several."""
        given = answer.strip().lower()
        meant = [each for each in self.answers if given and each.startswith(given)]
        return self.answers[meant[0]] if len(meant) == 1 else None


FIRST = "stability"

QUESTIONS: Mapping[str, Question] = {
    "stability": Question(
        text="Does stability matter most, because the training runs unattended?",
        answers={"yes": "shared", "no": "speed"},
    ),
    "shared": Question(
        text="Is this a first try, or do other programs need this machine's memory too?",
        answers={"yes": "safe", "no": "balanced"},
    ),
    "speed": Question(
        text="Does speed matter most, and will you watch a monitor in a second terminal?",
        answers={"yes": "parallelism", "no": "limit"},
    ),
    "parallelism": Question(
        text="Which has room for more work: the CPU (more loading) or the GPU (larger batches)?",
        answers={"cpu": "fast", "gpu": "bigger batch"},
    ),
    "limit": Question(
        text="Is it an experiment at the memory limit that you watch all the time, with no other program running?",
        answers={"yes": "extreme", "no": "balanced"},
    ),
}
"""Key -> question. Every path ends at a plan."""
