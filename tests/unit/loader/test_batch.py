"""One batch's own bookkeeping."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from penstock.arena.template import learn
from penstock.loader.engine.batch import Batch
from penstock.workers.protocol import NO_SEGMENT, Outcome
from penstock.workers.stretches import stretch_rows


def opened(rows: int, promised_bytes: int = 0) -> Batch:
    batch = Batch(4, list(range(rows)), rows, seed=1)
    batch.open(promised_bytes)
    return batch


def segment(number: int, capacity_bytes: int) -> Any:
    return SimpleNamespace(number=number, capacity_bytes=capacity_bytes)


def test_rows_are_cut_at_stretches_and_cover_the_batch_once() -> None:
    for rows in (1, 7, 8, 9, 31, 64, 65):
        for count in (1, 2, 5, 8):
            batch = opened(rows)
            stretch = stretch_rows(rows)
            taken: list[int] = []
            while batch.todo:
                part = batch.take_rows(count, stretch)
                assert part.start % stretch == 0
                assert part.stop % stretch == 0 or part.stop == rows
                taken += part
            assert taken == list(range(rows))


def test_a_batch_taken_whole_is_one_task_whatever_its_length() -> None:
    """Iterable datasets and those with __getitems__ must never see a batch in two pieces."""
    for rows in range(1, 200):
        batch = opened(rows)
        assert batch.take_rows(rows, stretch_rows(rows)) == range(rows)
        assert batch.alone
        assert not batch.todo


def test_a_batch_covered_by_one_task_is_built_by_one_worker() -> None:
    batch = opened(16)
    assert batch.take_rows(16, 2) == range(16)
    assert batch.alone
    cut = opened(16)
    cut.take_rows(8, 2)
    assert not cut.alone


def test_an_empty_batch_is_one_task() -> None:
    batch = opened(0)
    assert len(batch.take_rows(1, 1)) == 0
    assert batch.alone
    assert batch.at_rest


def test_the_lowest_failing_row_wins() -> None:
    batch = opened(8)
    batch.note_error(4, "late")
    batch.note_error(2, "early")
    batch.note_error(6, "later")
    assert batch.error == (2, "early")


def test_promised_bytes_are_owed_until_they_are_taken() -> None:
    batch = opened(8, promised_bytes=100)
    assert batch.owed_bytes == 100
    batch.extra[1] = segment(1, 30)
    assert (batch.held_bytes, batch.owed_bytes) == (30, 70)
    batch.rows_segment = segment(2, 200)
    assert (batch.held_bytes, batch.owed_bytes) == (230, 0)
    assert [s.number for s in batch.segments] == [2, 1]


def test_pieces_are_joined_in_row_order_whatever_order_they_arrive_in() -> None:
    batch = opened(4)
    batch.template = learn(("text", torch.ones(2)))
    batch.rows_segment = segment(9, 64)
    batch.pieces[2] = (range(2, 4), Outcome("rows", 2, [["c", "d"]]))
    batch.pieces[0] = (range(2), Outcome("rows", 2, [["a", "b"]]))
    assert batch.is_rows
    assert batch.row_count() == 4
    assert batch.texts() == [["a", "b", "c", "d"]]


def test_parts_say_where_every_row_lies() -> None:
    batch = opened(4)
    batch.template = learn(torch.ones(2))
    batch.rows_segment = segment(9, 64)
    batch.pieces[2] = (range(2, 4), Outcome("part", 1, [], b"stray", [(0, 8)], 5, 9, 8))
    batch.pieces[0] = (range(2), Outcome("rows", 2, [], segment=9, rows_segment=9))
    first, second = batch.parts()
    assert (first.rows, first.segment, first.pickled, first.extra_segment) == (range(2), 9, None, NO_SEGMENT)
    assert (second.rows, second.pickled, second.extra_segment) == (range(2, 3), b"stray", 5)
    assert not batch.is_rows


def test_reopening_a_batch_discards_its_finished_work() -> None:
    batch = opened(4)
    batch.take_rows(4, 1)
    batch.pieces[0] = (range(4), Outcome("rows", 4))
    batch.note_error(0, "x")
    batch.ready = batch.evicted = batch.wants_collate = True
    batch.open(7)
    assert list(batch.todo) == [range(4)]
    assert not batch.pieces and batch.error is None and batch.result is None
    assert not batch.ready and not batch.evicted and not batch.wants_collate
    assert batch.promised_bytes == 7
