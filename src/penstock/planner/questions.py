"""A decision tree: a few questions that lead to the name of a plan.

In:  answers.
Out: the next question, or the name of the plan.
Runs in: anywhere; pure. ``plans`` chooses the plan that is recommended without questions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question, and what follows each of its answers."""

    text: str
    answers: Mapping[str, str]
    """Answer -> the key of the next question, or the name of a plan."""

    def leads_to(self, answer: str) -> str | None:
        """The key or name that follows ``answer``. The first letters of an answer are enough, in upper or lower case;
        None if they match no answer, or several."""
        given = answer.strip().lower()
        meant = [each for each in self.answers if given and each.startswith(given)]
        return self.answers[meant[0]] if len(meant) == 1 else None


FIRST = "stability"

QUESTIONS: Mapping[str, Question] = {
    "stability": Question(
        text="Does stability matter most to you, because the training runs unattended?",
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
        text="Which of the two has room for more work: the CPU (more loading) or the GPU (larger batches)?",
        answers={"cpu": "fast", "gpu": "bigger batch"},
    ),
    "limit": Question(
        text="Is this an experiment at the memory limit that you watch all the time, with no other program running?",
        answers={"yes": "extreme", "no": "balanced"},
    ),
}
"""Key -> question. Every series of answers ends at a plan."""
