"""Time on so many cores: those who compute share them, those who wait do not."""

from __future__ import annotations

import pytest

from penstock.planner.simulate.cores import Activity, Compute, Cores, Until, Wait


def run(cores: Cores, *activities: Activity) -> None:
    for activity in activities:
        cores.begin(activity)
    cores.run(lambda: False)


def doing(*steps: Wait | Compute | Until) -> Activity:
    yield from steps


@pytest.mark.parametrize(
    ("count", "works", "seconds"),
    [(1, [1.0], 1.0), (1, [1.0, 1.0], 2.0), (2, [1.0, 1.0], 1.0), (2, [1.0] * 4, 2.0), (1.5, [1.0, 1.0, 1.0], 2.0),
     (2, [3.0, 1.0], 3.0), (1, [3.0, 1.0], 4.0)],
)  # fmt: skip
def test_activities_that_compute_share_the_cores_evenly(count: float, works: list[float], seconds: float) -> None:
    cores = Cores(count)
    run(cores, *(doing(Compute(work)) for work in works))
    assert cores.now_s == pytest.approx(seconds)


def test_activities_that_wait_take_no_core() -> None:
    cores = Cores(1)
    run(cores, *(doing(Wait(1.0)) for _ in range(10)), doing(Compute(1.0)))
    assert cores.now_s == pytest.approx(1.0)


def test_a_later_activity_slows_down_the_earlier_ones() -> None:
    cores, ended = Cores(1), []

    def first() -> Activity:
        yield Compute(2.0)
        ended.append(("first", cores.now_s))

    def second() -> Activity:
        yield Wait(1.0)
        yield Compute(0.5)
        ended.append(("second", cores.now_s))

    run(cores, first(), second())
    assert ended == [("second", pytest.approx(2.0)), ("first", pytest.approx(2.5))]


def test_conditions_are_checked_after_every_step_and_resume_one_activity_at_a_time() -> None:
    cores, stock, taken = Cores(1), [], []

    def maker() -> Activity:
        for number in range(3):
            yield Compute(1.0)
            stock.append(number)

    def taker(name: str) -> Activity:
        while True:
            yield Until(lambda: bool(stock))
            taken.append((name, stock.pop(), cores.now_s))

    cores.begin(taker("a"))
    cores.begin(taker("b"))
    cores.begin(maker())
    cores.run(lambda: False)
    assert [(number, second) for _, number, second in taken] == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_a_condition_that_can_never_be_true_ends_the_run() -> None:
    cores = Cores(1)
    run(cores, doing(Until(lambda: False)), doing(Compute(1.0)))
    assert cores.now_s == 1.0
