"""How far ahead the loader runs, as it follows what happens."""

from __future__ import annotations

import pytest

from penstock.loader.engine.ahead import Ahead
from penstock.loader.engine.estimates import Pace
from penstock.loader.rules import LoaderRules

MS, MIB = 1e-3, 1 << 20


def ahead(*, least: int = 2, most: int = 20) -> Ahead:
    made = Ahead(LoaderRules())
    made.bound(least, most)
    return made


def test_depth_stays_the_least_while_the_loop_finds_a_batch_ready_or_workers_are_busy() -> None:
    fed, starved = ahead(), ahead()
    for _ in range(100):
        fed.note_idle(3.0)
        fed.note_taken(1)
        starved.note_taken(0)
        starved.note_wait(2.0)
    assert fed.depth == starved.depth == 2


def test_depth_grows_by_what_idle_workers_could_have_made_of_the_batches_the_loop_waited_for() -> None:
    bursty = ahead()
    bursty.note_idle(12.0)
    for _ in range(7):
        bursty.note_taken(0)
        bursty.note_wait(1.0)
    assert 2 + 4 <= bursty.depth <= 2 + 7
    rushed = ahead()
    rushed.note_idle(1.5)
    for _ in range(7):
        rushed.note_taken(0)
        rushed.note_wait(1.0)
    assert rushed.depth == 3, "no more than workers could have made"


def test_short_waits_beside_idle_workers_are_jitter_and_forgotten() -> None:
    loop = ahead()
    for _ in range(1000):
        loop.note_idle(0.25)
        loop.note_taken(1)
        loop.note_wait(0.02)
    assert loop.depth == 2


def test_depth_never_passes_what_memory_is_worth_and_follows_it_down() -> None:
    loop = ahead(most=5)
    while loop.may_grow:
        loop.grow()
    assert loop.depth == 5
    assert loop.bound(2, 3) == 3
    assert loop.bound(4, 3) == 4, "the least comes first"


@pytest.mark.parametrize(("ready", "shrinks_to"), [(0, 16), (1, 16), (2, 15), (16, 14)])
def test_depth_shrinks_slowly_by_what_was_ready_for_nothing(ready: int, shrinks_to: int) -> None:
    loop = ahead()
    loop.grow(14)
    for _ in range(63):
        loop.note_taken(ready)
    assert loop.depth == 16
    loop.note_taken(ready)
    assert loop.depth == shrinks_to


def test_one_batch_that_was_needed_keeps_the_depth() -> None:
    loop = ahead()
    loop.grow(14)
    for number in range(2000):
        loop.note_taken(0 if number % 60 == 0 else 16)
    assert loop.depth == 16


def test_depth_that_is_no_longer_needed_comes_back_to_the_least() -> None:
    loop = ahead()
    loop.grow(18)
    for _ in range(5000):
        loop.note_taken(loop.depth)
    assert loop.depth == 2


@pytest.mark.parametrize(
    ("batch_bytes", "per_worker", "most"),
    [
        (1 * MIB, 0, 100),  # an eighth of the memory
        (84 * MIB, 0, 1),  # dear: no further than workers need
        (1, 0, 256),  # no more than segments
        (1 * MIB, 2, 16),  # as torch
        (0, 2, 16),
    ],
)
def test_the_most_ahead_is_a_share_of_the_bytes(batch_bytes: int, per_worker: int, most: int) -> None:
    assert LoaderRules().most_ahead(batch_bytes, 800 * MIB, 8, per_worker=per_worker) == most


@pytest.mark.parametrize(
    ("most", "depth"),
    [(0, 9), (12, 12), (100, 16)],  # two per worker if they are cheap, as many as are cheap, or one more than workers
)
def test_workers_that_build_whole_batches_have_a_next_one_where_bytes_are_cheap(most: int, depth: int) -> None:
    assert LoaderRules().depth(20 * MS, 8, 8, rows=8, most=most) == depth


@pytest.mark.parametrize(
    ("task_s", "absence_s", "queued"),
    [
        (20 * MS, 0.0, 1),
        (20 * MS, 1 * MS, 1),  # less than an eighth of a task
        (20 * MS, 5 * MS, 2),
        (20 * MS, 40 * MS, 3),
        (1 * MS, 2 * MS, 7),  # short tasks are queued anyway
        (1 * MS, 10 * MS, 11),
        (1 * MS, 10.0, 24),
    ],
)
def test_workers_have_work_for_as_long_as_the_trainer_is_absent(task_s: float, absence_s: float, queued: int) -> None:
    assert LoaderRules().tasks_queued(task_s, 1, absence_s=absence_s) == queued


@pytest.mark.parametrize("most", [0, 100])
def test_batches_for_the_trainers_absence_are_ahead_only_where_bytes_are_cheap(most: int) -> None:
    rules = LoaderRules()
    usual = rules.depth(20 * MS, 8, 4, rows=1)
    assert (rules.depth(20 * MS, 8, 4, rows=1, absence_s=40 * MS, most=most) > usual) is (most > 0)


def test_an_absence_counts_if_the_loop_then_has_to_wait_and_is_forgotten_slowly() -> None:
    pace = Pace(LoaderRules(), splits=True)
    for _ in range(20):
        pace.note_answer(1.0)
        pace.note_asked(waits=False)
    assert pace.absence_s == 0.0, "a loop that is slower than its workers needs none of this"
    for _ in range(6):
        pace.note_answer(0.002)
        pace.note_answer(0.04)
        pace.note_asked(waits=True)
    assert pace.absence_s == pytest.approx(0.04, rel=0.05)
    for _ in range(10):
        pace.note_asked(waits=False)
    assert 0.03 < pace.absence_s < 0.04
