"""The decision tree is a table: every path ends at a plan, every plan has a path."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.planner.plans import NAMES
from penstock.planner.questions import FIRST, QUESTIONS


def paths(place: str = FIRST, seen: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    if place not in QUESTIONS:
        yield seen, place
        return
    assert len(seen) < len(QUESTIONS), "the questions go in circles"
    for answer, following in QUESTIONS[place].answers.items():
        yield from paths(following, (*seen, answer))


def test_every_path_ends_at_a_plan_and_every_plan_has_one() -> None:
    assert {plan for _, plan in paths()} == set(NAMES)


@pytest.mark.parametrize(
    ("answers", "plan"),
    [
        (("yes", "yes"), "safe"),
        (("yes", "no"), "balanced"),
        (("no", "yes", "cpu"), "fast"),
        (("no", "yes", "gpu"), "bigger batch"),
        (("no", "no", "yes"), "extreme"),
        (("no", "no", "no"), "balanced"),
    ],
)
def test_answers_lead_to_the_right_plan(answers: tuple[str, ...], plan: str) -> None:
    assert (answers, plan) in list(paths())


def test_an_answer_may_be_short_or_in_capitals_but_must_be_one_of_them() -> None:
    first = QUESTIONS[FIRST]
    assert first.leads_to(" Y\n") == first.leads_to("yes") == "shared"
    assert first.leads_to("N") == "speed"
    assert all(first.leads_to(given) is None for given in ("", "\n", "maybe", "yess"))
    assert QUESTIONS["parallelism"].leads_to("GPU") == "bigger batch"
