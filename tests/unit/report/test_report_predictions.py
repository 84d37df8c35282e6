"""Prediction against measurement: the plan that fits the run, how far off it was, and when that cannot be said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.errors import DataError
from penstock.report.predictions import Compared, compare, has_plan, read_plans
from support.run_accounts import MIB, account_of, tried


def plan(**given: Any) -> dict[str, Any]:
    return {
        "name": "balanced", "workers": 4, "depth": 2, "batch_size": 32, "wait": 0.02,
        "memory": {"low": 600.0 * MIB, "expected": 770.0 * MIB, "high": 900.0 * MIB},
        "samples_per_s": {"low": 500.0, "expected": 576.0, "high": 620.0}, **given,
    }  # fmt: skip


def rows_of(answer: Any, **given: Any) -> dict[str, Compared]:
    rows = compare(account_of(**given), read_plans(answer, "plan.json"))
    return {row.unit if not row.is_bound else "bound": row for row in rows}


def test_the_plan_of_the_same_settings_is_compared_with_the_run() -> None:
    plans = [plan(name="fast", workers=8), plan()]
    rows = rows_of({"plans": plans, "recommended": "fast"})
    assert "plan.json, the balanced plan" in rows["bytes"].what
    assert rows["bytes"].measured == 700 * MIB and rows["bytes"].error == pytest.approx(0.1)
    assert rows["bytes"].holds is True
    assert rows["samples/s"].error == pytest.approx(-0.1) and rows["samples/s"].holds is False
    assert rows["share"].error == pytest.approx(0.01)


def test_of_plans_that_fit_equally_the_recommended_one_is_used() -> None:
    rows = rows_of({"plans": [plan(name="safe"), plan(name="balanced")], "recommended": "balanced"})
    assert "the balanced plan" in rows["bytes"].what


def test_settings_that_were_in_force_longest_are_compared() -> None:
    both = [tried(speed=300.0, active_s=20.0, ended_s=20.0), tried(speed=500.0, active_s=80.0)]
    assert rows_of({"plans": [plan()]}, all_tried=both)["samples/s"].measured == 500.0


@pytest.mark.parametrize(
    ("given", "run", "words"),
    [
        ({"workers": 8}, {}, "planned for 8 workers, run with 4"),
        ({"batch_size": 64}, {}, "planned for 64 batch size, run with 32"),
        ({}, {"all_tried": [tried(active_s=4.0)]}, "read for only 4 s"),
        ({"wait": None}, {}, "the training step set the pace, not loading"),
    ],
)
def test_what_cannot_be_compared_says_why_and_has_no_error(
    given: dict[str, Any], run: dict[str, Any], words: str
) -> None:
    row = rows_of({"plans": [plan(**given)]}, **run)["samples/s"]
    assert words in row.remark and row.error is None and row.holds is None


def test_a_budget_is_a_prediction_that_is_always_there() -> None:
    (row,) = compare(account_of())
    assert row.is_bound and row.holds is True and row.error is None and not has_plan([row])
    broken = account_of(figures=lambda second: {"loader.0.budget_bytes": 500.0 * MIB})
    assert compare(broken)[0].holds is False


def test_a_prediction_in_the_facts_of_the_run_is_used() -> None:
    rows = compare(account_of(loader={"prediction": plan()}))
    assert has_plan(rows) and 'num_workers="auto"' in rows[0].what


@pytest.mark.parametrize(
    "answer",
    [
        None, [], {}, {"plans": []}, {"plans": ["x"]}, {"plans": [{"name": "safe"}]}, {"plans": [plan(workers="many")]},
        {"plans": [plan(memory={"low": 1})]}, {"plans": [plan(memory={"low": 1, "expected": float("inf"), "high": 2})]},
    ],
)  # fmt: skip
def test_a_file_without_a_plan_is_refused_with_the_command_that_makes_one(answer: Any) -> None:
    with pytest.raises(DataError, match="plan"):
        read_plans(answer, "plan.json")


def test_the_output_of_penstock_plan_is_read() -> None:
    from penstock.loader.rules import LoaderRules
    from penstock.planner.plans import Facts, make_plans
    from penstock.planner.profile import OURS_USUAL, Profile, SeenSample

    samples = tuple(SeenSample(size_bytes=1 << 20, wait_s=0.01, cpu_s=0.001) for _ in range(20))
    profile = Profile(name="Frames", length=1000, samples=samples, ours=OURS_USUAL)
    table = make_plans(
        profile, Facts(cores=4, available_bytes=8 << 30), 32, rules=LoaderRules(), budget_bytes=4 << 30, step_s=0.1
    )
    read = read_plans(json.loads(json.dumps(table.as_json())), "plan.json")
    assert len(read) == len(table.plans)
    assert read[0].workers == table.recommended.workers
    assert read[0].memory_bytes[1] == table.recommended.memory.expected
    assert read[0].wait_fraction is not None
