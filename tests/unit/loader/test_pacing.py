"""How finely batches are cut and how far ahead they run, as tables."""

from __future__ import annotations

import pytest

from penstock.loader.engine.estimates import Pace
from penstock.loader.rules import LoaderRules
from penstock.workers.stretches import stretch_rows

MS = 1e-3


def pace(row_s: float | None, *, splits: bool = True, **rules: float | bool) -> Pace:
    made = Pace(LoaderRules(**rules), splits=splits)  # type: ignore[arg-type]
    if row_s is not None:
        made.note(1, row_s)
    return made


@pytest.mark.parametrize(
    ("row_s", "batch_rows", "rows"),
    [
        (None, 8, 1),  # nothing known: each worker takes part as soon as it has started
        (None, 64, 8),
        (None, 1, 1),
        (20 * MS, 8, 1),  # long samples: one by one
        (1 * MS, 64, 8),  # 5 ms of work, rounded up to whole stretches of 8
        (0.01 * MS, 64, 64),  # under 5 ms in all: not cut
        (2 * MS, 64, 8),  # never less than a stretch
        (0.3 * MS, 64, 24),  # workers beyond 5 ms of work each have other batches
        (0.0, 64, 64),
    ],
)
def test_tasks_are_whole_stretches_of_about_five_milliseconds(row_s: float | None, batch_rows: int, rows: int) -> None:
    assert pace(row_s).rows_per_task(batch_rows, workers=4) == rows
    assert rows % stretch_rows(batch_rows) == 0 or rows == batch_rows


@pytest.mark.parametrize(
    ("row_s", "batch_rows", "threads", "rows"),
    [
        (6 * MS, 64, 12, 16),  # whole stretches, with a row for every thread
        (6 * MS, 64, 4, 8),
        (6 * MS, 8, 12, 8),  # never more than the batch
        (0.3 * MS, 64, 2, 24),  # long enough anyway
        (None, 64, 12, 8),  # the first batch comes soonest if all workers take part
    ],
)
def test_tasks_have_a_row_for_every_thread_of_a_worker(
    row_s: float | None, batch_rows: int, threads: int, rows: int
) -> None:
    shared = Pace(LoaderRules(), splits=True, threads=threads)
    if row_s is not None:
        shared.note(1, row_s)
    assert shared.rows_per_task(batch_rows, workers=4) == rows


@pytest.mark.parametrize(
    ("most_open", "workers", "rows"),
    [
        (100, 14, 64),  # room for plenty: not cut
        (7, 14, 32),  # two workers a batch
        (3, 14, 8),  # as fine as stretches go
        (1, 100, 8),
        (1, 1, 64),
    ],
)
def test_when_few_batches_fit_the_budget_each_is_cut_for_all_workers(most_open: int, workers: int, rows: int) -> None:
    short = pace(0.01 * MS)
    short.most_open = most_open
    assert short.rows_per_task(64, workers=workers) == rows


@pytest.mark.parametrize(
    ("batch_bytes", "workers", "memory_bytes", "whole"),
    [
        (None, 8, 1, True),  # nothing known
        (10, 2, 160, True),  # each of both workers holds the samples and the result
        (10, 2, 159, False),
        (10, 16, 1280, True),
        (10, 17, 1280, False),
        (0, 4, 0, True),
    ],
)
def test_a_batch_that_is_not_written_in_place_is_built_whole_while_that_takes_little_memory(
    batch_bytes: int | None, workers: int, memory_bytes: int, whole: bool
) -> None:
    rules = LoaderRules()
    assert rules.builds_whole(batch_bytes, workers=workers, memory_bytes=memory_bytes) == whole
    assert not LoaderRules(split_always=True).builds_whole(batch_bytes, workers=workers, memory_bytes=memory_bytes)


def test_batches_that_are_not_written_in_place_are_split_only_where_memory_is_short() -> None:
    collated = Pace(LoaderRules(), splits=True, in_place=False)
    collated.note(1, 20 * MS)
    assert not collated.splits and collated.rows_per_task(8, workers=4) == 8
    collated.builds_whole = False
    assert collated.splits and collated.rows_per_task(8, workers=4) == 1
    collated.may_split = False
    assert not collated.splits


@pytest.mark.parametrize(
    ("first", "later", "gains"),
    [
        ([20.0] * 4, [0.01] * 4, True),  # a chunk is read, then its rows come from memory
        ([20.0] * 3, [0.01] * 9, False),  # too few to say
        ([10.0, 400.0, 10.0, 10.0], [10.0] * 4, False),  # one slow sample
        ([10.0, 400.0, 10.0, 10.0, 400.0], [11.0, 9.0, 400.0, 12.0], False),
        ([12.0] * 8, [10.0] * 8, False),
        ([20.0, 0.01, 20.0, 20.0, 20.0], [0.01] * 4, True),  # one began in a chunk that was read before
        ([20.0] * 4 + [1.0] * 16, [0.01] * 4 + [1.0] * 16, False),  # it has changed since
    ],
)
def test_workers_that_share_a_batch_repeat_work_if_their_first_rows_of_each_take_longest(
    first: list[float], later: list[float], gains: bool
) -> None:
    made = pace(1 * MS)
    for is_first, times in ((True, first), (False, later)):
        for spent_s in times:
            made.note_part(8, 8 * spent_s, is_first=is_first)
    assert made.gains_together == gains
    made.keeps_together = True
    assert made.rows_per_task(64, workers=2) == 64


def test_splitting_can_be_forced() -> None:
    assert pace(0.0, split_always=True).rows_per_task(64, workers=4) == 8
    assert pace(None, split_always=True).rows_per_task(7, workers=4) == 1


@pytest.mark.parametrize(
    ("row_s", "rows", "in_order", "queued"),
    [
        (None, 8, True, 1),
        (1 * MS, 8, False, 1),  # out of order: no task waits behind a slow one
        (20 * MS, 1, True, 1),  # long tasks are never queued behind another
        (19 * MS, 1, True, 2),
        (1 * MS, 1, True, 7),
        (0.0001 * MS, 1, True, 24),
        (0.0, 1, True, 24),
    ],
)
def test_short_tasks_are_queued_so_that_workers_never_wait(
    row_s: float | None, rows: int, in_order: bool, queued: int
) -> None:
    assert pace(row_s).tasks_queued(rows, in_order=in_order) == queued


@pytest.mark.parametrize(
    ("row_s", "batch_rows", "workers", "splittable", "depth"),
    [
        (None, 8, 4, True, 2),
        (20 * MS, 8, 4, True, 2),
        (20 * MS, 8, 16, True, 3),
        (20 * MS, 8, 4, False, 5),
        (20 * MS, 1, 1, True, 2),
        (20 * MS, 1, 6, True, 7),
    ],
)
def test_depth_is_the_least_that_keeps_all_workers_busy(
    row_s: float | None, batch_rows: int, workers: int, splittable: bool, depth: int
) -> None:
    assert pace(row_s, splits=splittable).depth(batch_rows, workers, in_order=True) == depth


def test_estimates_follow_the_dataset_slowly_and_ignore_tasks_without_rows() -> None:
    made = pace(10 * MS)
    made.note(0, 100.0)
    assert made.row_s == 10 * MS
    made.note(10, 0.2)
    assert made.row_s == pytest.approx(12 * MS)
    for _ in range(100):
        made.note(1, 50 * MS)
    assert made.row_s == pytest.approx(50 * MS, rel=0.01)
