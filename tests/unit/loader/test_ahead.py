"""How far ahead the loader runs, as it follows what happens."""

from __future__ import annotations

import pytest

from penstock.loader.engine.ahead import Ahead
from penstock.loader.engine.estimates import Pace
from penstock.loader.rules import LoaderRules

MS, MIB = 1e-3, 1 << 20


def ahead(*, least: int = 2, most: int = 20, price: float = 1.0, grown: int = 0) -> Ahead:
    made = Ahead(LoaderRules())
    made.bound(least, most, price)
    made.note_idle(grown * price)
    made.note_wait(grown * price)
    return made


def test_depth_stays_the_least_while_the_loop_finds_a_batch_ready_or_workers_are_busy() -> None:
    fed, starved = ahead(), ahead()
    for _ in range(100):
        fed.note_idle(3.0)
        fed.note_taken(1.0, 1)
        starved.note_taken(1.0, 0)
        starved.note_wait(2.0)
    assert fed.depth == starved.depth == 2


@pytest.mark.parametrize(
    ("idle", "price", "depth"),
    [
        (12.0, 1.0, 9),  # one for each batch's time that the loop waited
        (1.5, 1.0, 3),  # no more than workers could have made
        (12.0, 3.0, 4),  # dear batches: only some of that is worth its pages
        (12.0, 0.25, 20),  # cheap ones: several for each that was missed
    ],
)
def test_depth_grows_by_what_idle_workers_could_have_made_and_the_loop_waited_for(
    idle: float, price: float, depth: int
) -> None:
    bursty = ahead(price=price)
    bursty.note_idle(idle)
    for _ in range(7):
        bursty.note_taken(0.01, 0)
        bursty.note_wait(1.0)
    assert bursty.depth == depth


def test_short_waits_beside_idle_workers_are_jitter_and_tolerated() -> None:
    loop = ahead()
    for _ in range(1000):
        loop.note_idle(0.25)
        loop.note_taken(1.25, 1)
        loop.note_wait(0.02)
    assert loop.depth == 2


def test_depth_never_passes_what_memory_is_worth_and_follows_it_down() -> None:
    loop = ahead(most=5, grown=10)
    assert loop.depth == 5 and not loop.may_grow
    assert loop.bound(2, 3, 1.0) == 3
    assert loop.bound(4, 3, 1.0) == 4, "the least comes first"


@pytest.mark.parametrize(("ready", "shrinks_to"), [(0, 16), (1, 16), (2, 15), (16, 14)])
def test_depth_shrinks_slowly_by_what_was_ready_for_nothing(ready: int, shrinks_to: int) -> None:
    loop = ahead(grown=14)
    for _ in range(63):
        loop.note_taken(1.0, ready)
    assert loop.depth == 16
    loop.note_taken(1.0, ready)
    assert loop.depth == shrinks_to


def test_one_batch_that_was_needed_keeps_the_depth() -> None:
    loop = ahead(grown=14)
    for number in range(2000):
        loop.note_taken(1.0, 0 if number % 60 == 0 else 16)
    assert loop.depth == 16


def test_depth_that_is_no_longer_needed_comes_back_to_the_least() -> None:
    loop = ahead(grown=18)
    for _ in range(5000):
        loop.note_taken(1.0, loop.depth)
    assert loop.depth == 2


@pytest.mark.parametrize(
    ("batch_bytes", "batch_s", "price"),
    [
        (1 << 10, 0.01, 0.25),
        (1 << 10, 0.0001, 10.0),  # tiny batches: a thousandth of a second each
        (84_000_000, 0.04, 8.4),  # a third of a second of waiting for one more
        (84_000_000, 4.0, 0.25),  # pages cost nothing beside such samples
    ],
)
def test_one_more_batch_ahead_costs_its_pages(batch_bytes: int, batch_s: float, price: float) -> None:
    assert LoaderRules().ahead_price(batch_bytes, batch_s) == pytest.approx(price, rel=0.05)


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
    rules = LoaderRules()
    assert rules.most_ahead(batch_bytes, 800 * MIB, 8, per_worker=per_worker) == most
    assert rules.cheap_ahead(batch_bytes, 6400 * MIB, 8, per_worker=per_worker) == most


@pytest.mark.parametrize(
    ("cheap", "depth"),
    [(0, 9), (12, 12), (100, 16)],  # two per worker if they are cheap, as many as are cheap, or one more than workers
)
def test_workers_that_build_whole_batches_have_a_next_one_where_bytes_are_cheap(cheap: int, depth: int) -> None:
    assert LoaderRules().depth(20 * MS, 8, 8, rows=8, cheap=cheap) == depth


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


@pytest.mark.parametrize("cheap", [0, 100])
def test_batches_for_the_trainers_absence_are_ahead_only_where_bytes_are_cheap(cheap: int) -> None:
    rules = LoaderRules()
    usual = rules.depth(20 * MS, 8, 4, rows=1)
    assert (rules.depth(20 * MS, 8, 4, rows=1, absence_s=40 * MS, cheap=cheap) > usual) is (cheap > 0)


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
