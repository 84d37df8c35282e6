"""The dispatcher's decisions, with workers that exist on paper only."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from penstock.arena.arena import Arena
from penstock.arena.layout import layout_of
from penstock.arena.segment import Segment
from penstock.arena.template import Template, learn
from penstock.errors import BudgetError, WorkerError
from penstock.loader.engine.batch import Batch
from penstock.loader.engine.crashes import DeathToll
from penstock.loader.engine.dispatcher import Dispatcher
from penstock.loader.engine.estimates import Pace
from penstock.loader.engine.order import Order
from penstock.loader.engine.rules import LoaderRules
from penstock.loader.engine.seat import Seat
from penstock.workers.protocol import DROP, NO_SEGMENT, Collate, Done, Fetch, Learn, Need, Outcome, Room, Started

KIB, MIB = 1 << 10, 1 << 20


WORKER_BYTES = 100 << 20
"""What each paper worker takes, whatever it does: the arena is left with the limit the test names."""
OWN_BYTES = 4 << 20


class PaperHandle:
    """A worker that writes down what it is told."""

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id
        self.started = True
        self.private_bytes = WORKER_BYTES
        self.template: Template | None = None
        self.posted: list[Any] = []
        self.attached: set[int] = set()
        self.reaped = 0
        self.exit_code: int | None = -9

    @property
    def pid(self) -> int:
        return 1000 + self.worker_id

    def fileno(self) -> int:
        raise AssertionError("a dispatcher does not listen")

    def post(self, message: object) -> None:
        self.posted.append(message)

    def flush(self) -> bool:
        return False

    def read_available(self) -> list[Any]:
        return []

    def attach(self, segment: Segment) -> None:
        assert segment.number not in self.attached
        self.attached.add(segment.number)

    def detach(self, number: int) -> None:
        self.attached.discard(number)

    def has_attached(self, number: int) -> bool:
        return number in self.attached

    def stop(self) -> None: ...

    def reap(self, deadline_s: float) -> int | None:
        self.reaped += 1
        return self.exit_code


class Works:
    """A dispatcher, its arena and its paper workers."""

    def __init__(
        self,
        *,
        workers: int = 2,
        limit_bytes: int = 100 * MIB,
        headroom_bytes: Callable[[], int] = lambda: 1 << 50,
        rows: bool = True,
        splittable: bool = True,
        bound: bool = False,
        in_order: bool = True,
        batch_rows: int = 8,
        row_s: float | None = 0.02,
        max_slots: int = 256,
        depth: int | None = None,
    ) -> None:
        rules = LoaderRules(most_slots=max_slots)
        pace = Pace(rules, splits=splittable)
        if row_s is not None:
            pace.note(1, row_s)
        self.arena = Arena(
            limit_bytes=limit_bytes,
            headroom_bytes=headroom_bytes,
            closed=self._closed,
            woken=lambda: None,
            keep_free=64,
        )
        self.replaced: list[Seat] = []
        self.dispatcher = Dispatcher(
            arena=self.arena,
            rules=rules,
            pace=pace,
            order=Order(
                rows=rows,
                splittable=splittable,
                bound=bound,
                in_order=in_order,
                batch_rows=batch_rows,
                keeps_generators=False,
            ),
            workers=workers,
            memory_bytes=limit_bytes + workers * WORKER_BYTES + OWN_BYTES,
            deaths=DeathToll(in_hand=self._in_hand, diagnosis=lambda: None),
        )
        self.dispatcher.depth_wanted = depth
        self.dispatcher.roster.seats = [Seat(PaperHandle(number)) for number in range(workers)]
        self.batch_rows = batch_rows
        self._drawn = 0

    def _closed(self, segment: Segment) -> None:
        for seat in self.dispatcher.roster.seats:
            seat.handle.detach(segment.number)

    def _in_hand(self, seat: Seat) -> tuple[int, int]:
        first = next(iter(seat.tasks.values()), None)
        return (-1, -1) if first is None else (first.number, -1 if first.rows is None else first.rows.start)

    def die(self, seat: Seat) -> None:
        """A worker's line has closed, and another takes its seat."""
        self.dispatcher.on_death(seat)
        for dead in self.dispatcher.roster.take_dead():
            self.replaced.append(dead)
            self.dispatcher.roster.welcome(Seat(PaperHandle(dead.handle.worker_id)))

    def offer(self, count: int) -> None:
        for _ in range(count):
            first = self._drawn * self.batch_rows
            indices = list(range(first, first + self.batch_rows))
            self.dispatcher.admission.upcoming.append(Batch(self._drawn, indices, self.batch_rows, seed=self._drawn))
            self._drawn += 1
        self.dispatcher.progress()

    def seat(self, number: int) -> Seat:
        return self.dispatcher.roster.seats[number]

    def handle(self, number: int) -> PaperHandle:
        handle = self.seat(number).handle
        assert isinstance(handle, PaperHandle)
        return handle

    def told(self, number: int, kind: type) -> list[Any]:
        return [message for message in self.handle(number).posted if isinstance(message, kind)]

    def all_tasks(self) -> list[tuple[Seat, Any]]:
        """Tasks handed out and not answered, oldest first."""
        found = []
        for seat in self.dispatcher.roster.seats:
            assert isinstance(seat.handle, PaperHandle)
            for message in seat.handle.posted:
                if isinstance(message, (Fetch, Collate)) and message.task in seat.tasks:
                    found.append((seat, message))
        return sorted(found, key=lambda pair: pair[1].task)

    def task_for(self, batch: int) -> tuple[Seat, Any]:
        return next(pair for pair in self.all_tasks() if pair[0].tasks[pair[1].task].batch.number == batch)

    def let_wait(self, seat: Seat, task: int, need_bytes: int) -> None:
        """A need that came earlier and found no room."""
        seat.tasks[task].need = Need(task, need_bytes, None, 0)
        self.dispatcher.admission._waiting.append((seat, seat.tasks[task]))

    def need(self, seat: Seat, task: int, need_bytes: int, template: Template | None = None) -> None:
        self.dispatcher.on_message(seat, Need(task, need_bytes, template, 0))
        self.dispatcher.progress()

    def done(self, seat: Seat, task: int, outcome: Outcome, *, error: Any = None, fetch_s: float = 0.02) -> None:
        self.dispatcher.on_message(seat, Done(task, outcome, error, fetch_s, 0.0, 0, None))
        self.dispatcher.progress()

    def rows_done(self, seat: Seat, fetch: Fetch) -> None:
        self.done(seat, fetch.task, Outcome("rows", len(fetch.indices), [], segment=fetch.segment), fetch_s=0.02)

    def finish_everything(self, template: Template | None, limit: int = 10_000) -> list[int]:
        """Workers do all that is asked of them, the user takes and drops; the numbers of the batches that came."""
        came: list[int] = []
        for _ in range(limit):
            while (batch := self.dispatcher.take_ready()) is not None:
                came.append(batch.number)
                self.dispatcher.admission.release(batch)
                self.dispatcher.progress()
            tasks = self.all_tasks()
            if not tasks:
                return came
            seat, message = tasks[0]
            self.do(seat, message, template)
        raise AssertionError("no end in sight")

    def do(self, seat: Seat, message: Any, template: Template | None) -> None:
        assert isinstance(seat.handle, PaperHandle)
        segment = message.segment
        if template is not None:
            if segment == NO_SEGMENT:
                self.need(seat, message.task, layout_of(template, message.batch_rows).total_bytes, template)
                room = self.room_of(seat, message.task)
                assert room is not None and room.segment != DROP
                segment = room.segment
            self.done(seat, message.task, Outcome("rows", len(message.indices), [], segment=segment))
        elif isinstance(message, Fetch) and not message.alone:
            self.done(seat, message.task, Outcome("part", 0, [], b"", [], NO_SEGMENT))
        else:
            self.done(seat, message.task, Outcome("inline", pickled=b""))

    @staticmethod
    def room_of(seat: Seat, task: int) -> Room | None:
        assert isinstance(seat.handle, PaperHandle)
        rooms = [m for m in seat.handle.posted if isinstance(m, Room) and m.task == task]
        return rooms[-1] if rooms else None

    def accounted(self) -> int:
        return self.arena.in_use_bytes + self.arena.free_bytes


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def image(kib: int) -> Template:
    found = learn(torch.zeros(kib * KIB, dtype=torch.uint8))
    assert found is not None
    return found


def test_rows_of_the_first_batch_are_shared_among_all_workers() -> None:
    works = Works(workers=4)
    works.offer(3)
    rows = [message.first_row for _, message in works.all_tasks()]
    assert rows == [0, 1, 2, 3]
    assert {seat.tasks[m.task].batch.number for seat, m in works.all_tasks()} == {0}
    assert all(m.indices == [m.first_row] and m.batch_rows == 8 and not m.alone for _, m in works.all_tasks())


def test_batches_come_in_order_however_their_rows_came_to_rest() -> None:
    works = Works(workers=4)
    works.offer(6)
    template = image(4)
    taken: list[int] = []
    for _ in range(200):
        tasks = works.all_tasks()
        if not tasks:
            break
        works.do(*tasks[-1], template)
        while (batch := works.dispatcher.take_ready()) is not None:
            taken.append(batch.number)
            works.dispatcher.admission.release(batch)
            works.dispatcher.progress()
    assert taken == [0, 1, 2, 3, 4, 5]
    assert works.dispatcher.is_idle


def test_out_of_order_a_ready_batch_does_not_wait_for_an_earlier_one() -> None:
    works = Works(workers=2, in_order=False, splittable=False)
    works.offer(1)
    ((seat, fetch),) = works.all_tasks()
    works.do(seat, fetch, image(4))
    assert works.dispatcher.take_ready() is not None
    works.offer(2)
    first, second = works.all_tasks()
    works.do(*second, image(4))
    ready = works.dispatcher.take_ready()
    assert ready is not None
    assert ready.number == 2
    assert works.dispatcher.take_ready() is None
    works.do(*first, image(4))
    assert works.dispatcher.take_ready().number == 1  # type: ignore[union-attr]


def test_once_learnt_the_template_and_the_segment_go_with_the_task() -> None:
    works = Works(workers=1)
    works.offer(2)
    template = image(4)
    seat, fetch = works.all_tasks()[0]
    assert fetch.segment == NO_SEGMENT and not fetch.by_template
    works.need(seat, fetch.task, layout_of(template, 8).total_bytes, template)
    room = works.room_of(seat, fetch.task)
    assert room is not None and room.template == template and works.handle(0).has_attached(room.segment)
    works.done(seat, fetch.task, Outcome("rows", 1, [], segment=room.segment))
    later = works.all_tasks()[0][1]
    assert later.by_template and later.segment == room.segment
    assert works.told(0, Learn) == [Learn(template)]


def test_nothing_is_opened_beyond_the_budget_but_what_is_due() -> None:
    template = image(1024)
    works = Works(workers=2, limit_bytes=20 * MIB, depth=6)
    works.offer(6)
    seat, fetch = works.all_tasks()[0]
    works.do(seat, fetch, template)
    while any(b.todo or b.running for b in [works.dispatcher.admission.open[0]]):
        works.do(*works.task_for(0), template)
    assert sorted(works.dispatcher.admission.open) == [0, 1]
    assert works.finish_everything(template) == [0, 1, 2, 3, 4, 5]
    assert works.arena.peak_bytes <= 20 * MIB


def test_a_batch_larger_than_the_budget_passes_alone_with_one_warning() -> None:
    template = image(1024)
    works = Works(workers=2, limit_bytes=3 * MIB)
    with pytest.warns(RuntimeWarning, match="8.00 MiB.* 3.00 MiB"):
        works.offer(3)
        assert works.finish_everything(template) == [0, 1, 2]
    assert works.arena.peak_bytes == 8 * MIB


def test_the_due_batch_is_opened_although_the_user_holds_everything() -> None:
    template = image(1024)
    works = Works(workers=1, limit_bytes=17 * MIB)
    works.offer(4)
    held = []
    for number in range(4):
        works.dispatcher.admission.trainer_waits = True
        works.dispatcher.progress()
        while (batch := works.dispatcher.take_ready()) is None:
            works.do(*works.all_tasks()[0], template)
        assert batch.number == number
        assert batch.rows_segment is not None
        token = works.arena.lend(batch.rows_segment, 8 * MIB)
        token[:10] = number
        held.append(token)
        works.dispatcher.admission.trainer_waits = False
        assert works.accounted() <= 17 * MIB
    assert [int(token[0]) for token in held] == [0, 1, 2, 3]
    assert works.arena.handed_over_bytes > 0


def test_while_the_user_computes_what_is_held_is_waited_for() -> None:
    template = image(1024)
    works = Works(workers=1, limit_bytes=9 * MIB)
    works.offer(2)
    while (batch := works.dispatcher.take_ready()) is None:
        works.do(*works.all_tasks()[0], template)
    assert batch.rows_segment is not None
    token = works.arena.lend(batch.rows_segment, 8 * MIB)
    works.dispatcher.progress()
    assert not works.all_tasks()
    del token
    works.dispatcher.progress()
    assert works.all_tasks()
    assert works.arena.handed_over_bytes == 0


def test_a_batch_the_machine_has_no_memory_for_is_a_budget_error_with_the_numbers() -> None:
    works = Works(workers=1, headroom_bytes=lambda: 5 * MIB)
    works.offer(1)
    seat, fetch = works.all_tasks()[0]
    works.need(seat, fetch.task, 8 * MIB, image(1024))
    failure = works.dispatcher.failure
    assert isinstance(failure, BudgetError)
    assert "batch 0" in str(failure)
    assert works.accounted() == 0


def test_a_later_batch_makes_room_for_one_that_is_due_and_grew() -> None:
    works = Works(workers=2, rows=False, splittable=False, limit_bytes=10 * MIB)
    works.dispatcher.admission.shapes.note_size(1 * MIB)
    works.offer(3)
    (first_seat, first), (second_seat, second) = works.all_tasks()
    works.need(second_seat, second.task, 6 * MIB)
    room = works.room_of(second_seat, second.task)
    assert room is not None and room.segment >= 0
    works.done(second_seat, second.task, Outcome("object", pickled=b"", segment=room.segment, used_bytes=6 * MIB))
    assert works.dispatcher.admission.open[1].ready
    works.need(first_seat, first.task, 7 * MIB)
    answer = works.room_of(first_seat, first.task)
    assert answer is not None and answer.segment >= 0, "the due batch waits for a batch that waits for it"
    assert not works.dispatcher.admission.open.get(1) or not works.dispatcher.admission.open[1].ready
    assert works.accounted() <= 10 * MIB
    works.done(first_seat, first.task, Outcome("object", pickled=b"", segment=answer.segment, used_bytes=7 * MIB))
    taken = works.dispatcher.take_ready()
    assert taken is not None and taken.number == 0
    works.dispatcher.admission.release(taken)
    works.dispatcher.progress()
    assert works.finish_everything(None) == [1, 2]


def test_a_need_that_is_not_due_waits_and_is_answered_when_memory_comes_back() -> None:
    works = Works(workers=2, rows=False, splittable=False, limit_bytes=10 * MIB)
    works.dispatcher.admission.shapes.note_size(1 * MIB)
    works.offer(2)
    (first_seat, first), (second_seat, second) = works.all_tasks()
    works.need(first_seat, first.task, 6 * MIB)
    room = works.room_of(first_seat, first.task)
    assert room is not None
    works.need(second_seat, second.task, 6 * MIB)
    assert works.room_of(second_seat, second.task) is None
    works.done(first_seat, first.task, Outcome("object", pickled=b"", segment=room.segment, used_bytes=6 * MIB))
    batch = works.dispatcher.take_ready()
    assert batch is not None
    works.dispatcher.admission.release(batch)
    works.dispatcher.progress()
    answer = works.room_of(second_seat, second.task)
    assert answer is not None and answer.segment >= 0


def test_a_worker_told_to_drop_is_asked_nothing_more_about_that_task() -> None:
    """A later batch with a part in the arena and a need that waits is evicted while needs are being answered."""
    works = Works(workers=3, rows=False, limit_bytes=10 * MIB, row_s=0.02, batch_rows=2, depth=2)
    works.dispatcher.admission.shapes.note_size(1 * MIB)
    works.offer(2)
    tasks = works.all_tasks()
    assert [(works_seat.tasks[m.task].batch.number, m.first_row) for works_seat, m in tasks] == [(0, 0), (0, 1), (1, 0)]
    (seat_a, a), (seat_b, b), (seat_c, c) = tasks
    # Batch 1 leaves a part of 3 MiB, then its second row wants 6 MiB more: that waits.
    works.need(seat_c, c.task, 3 * MIB)
    room = works.room_of(seat_c, c.task)
    assert room is not None
    works.done(seat_c, c.task, Outcome("part", 0, [], b"", [], room.segment, 3 * MIB))
    seat_d, d = works.task_for(1)
    works.need(seat_a, a.task, 4 * MIB)
    works.need(seat_d, d.task, 6 * MIB)
    assert works.room_of(seat_d, d.task) is None
    # The due batch needs what batch 1 holds. Its need is answered in the same round as the one that waits.
    works.let_wait(seat_b, b.task, 5 * MIB)
    works.dispatcher.progress()
    drops = [m for m in works.handle(works.dispatcher.roster.seats.index(seat_d)).posted if isinstance(m, Room)]
    assert [m.segment for m in drops if m.task == d.task] == [DROP]
    works.done(seat_d, d.task, Outcome("dropped"))
    works.dispatcher.progress()
    answer = works.room_of(seat_b, b.task)
    assert answer is not None and answer.segment >= 0
    assert 1 not in works.dispatcher.admission.open or not works.dispatcher.admission.open[1].evicted


def test_a_worker_that_waits_for_a_later_batch_lets_go_if_the_due_one_is_queued_behind() -> None:
    works = Works(workers=1, rows=False, splittable=False, limit_bytes=4 * MIB, row_s=0.0001, depth=2)
    works.dispatcher.admission.shapes.note_size(1 * MIB)
    works.offer(2)
    (seat, due), (_, later) = works.all_tasks()
    works.let_wait(seat, later.task, 6 * MIB)
    works.dispatcher.progress()
    answer = works.room_of(seat, later.task)
    assert answer is not None and answer.segment == DROP
    assert works.room_of(seat, due.task) is None
    works.done(seat, later.task, Outcome("dropped"))
    assert works.finish_everything(None) == [0, 1]


def test_a_batch_that_was_evicted_is_opened_although_later_ones_fill_the_depth() -> None:
    works = Works(workers=1, depth=3, row_s=0.0001)
    works.offer(3)
    admission = works.dispatcher.admission
    first = admission.open[0]
    while tasks := works.all_tasks():
        works.done(tasks[0][0], tasks[0][1].task, Outcome("inline", pickled=b""))
    assert [batch.ready for batch in admission.open.values()] == [True] * 3
    admission.evict(first)
    works.dispatcher.depth_wanted = 2
    assert list(admission.open) == [1, 2] and works.dispatcher.take_ready() is None
    works.dispatcher.progress()
    assert list(admission.open) == [0, 1, 2]


def test_a_worker_that_waits_for_a_later_batch_lets_go_if_the_due_one_was_evicted_and_nobody_is_free() -> None:
    works = Works(workers=1, rows=False, splittable=False, limit_bytes=4 * MIB, row_s=0.01, depth=4)
    works.dispatcher.admission.shapes.note_size(1 * MIB)
    works.offer(4)
    admission = works.dispatcher.admission
    (seat, first), *_ = works.all_tasks()
    works.done(seat, first.task, Outcome("inline", pickled=b""))
    (seat, later), *_ = works.all_tasks()
    works.let_wait(seat, later.task, 6 * MIB)
    admission.evict(admission.open[0])
    assert admission.is_next_due and works.room_of(seat, later.task) is None
    works.dispatcher.progress()
    answer = works.room_of(seat, later.task)
    assert answer is not None and answer.segment == DROP
    works.done(seat, later.task, Outcome("dropped"))
    assert works.finish_everything(None) == [0, 1, 2, 3]


def test_a_batch_that_was_evicted_is_worked_at_before_what_is_left_of_later_ones() -> None:
    works = Works(workers=1, splittable=False, row_s=0.02, depth=2)
    works.offer(2)
    admission = works.dispatcher.admission
    (seat, fetch), *_ = works.all_tasks()
    works.done(seat, fetch.task, Outcome("inline", pickled=b""))
    (seat, fetch), *_ = works.all_tasks()
    assert admission.open[0].ready and seat.tasks[fetch.task].batch.number == 1
    admission.evict(admission.open[0])
    works.done(seat, fetch.task, Outcome("dropped"))
    (seat, fetch), *_ = works.all_tasks()
    assert seat.tasks[fetch.task].batch.number == 0


def test_evicting_a_batch_while_needs_are_answered_loses_nobody() -> None:
    """Of several needs that wait, one is due and makes a later batch let go: each of the others is still answered."""
    works = Works(workers=4, rows=False, limit_bytes=10 * MIB, row_s=0.02, batch_rows=2, depth=3)
    works.dispatcher.admission.shapes.note_size(64 * KIB)
    works.offer(3)
    (seat_a, a), _, (seat_c, c), (seat_d, d) = works.all_tasks()
    batches = [seat.tasks[m.task].batch.number for seat, m in works.all_tasks()]
    assert batches == [0, 0, 1, 1]
    works.need(seat_c, c.task, 7 * MIB)
    room = works.room_of(seat_c, c.task)
    assert room is not None
    works.done(seat_c, c.task, Outcome("part", 0, [], b"", [], room.segment, 7 * MIB))
    seat_e, e = works.task_for(2)
    assert seat_e is seat_c
    # All three wait: the due batch's row, the rest of batch 1 (which will be evicted), and a row of batch 2.
    admission = works.dispatcher.admission
    works.let_wait(seat_d, d.task, 5 * MIB)
    works.let_wait(seat_a, a.task, 5 * MIB)
    works.let_wait(seat_e, e.task, 5 * MIB)
    works.dispatcher.progress()
    drop = works.room_of(seat_d, d.task)
    assert drop is not None and drop.segment == DROP
    waits = any(task.number == e.task for _, task in admission._waiting)
    assert works.room_of(seat_e, e.task) is not None or waits, "a worker waits for an answer nobody will give"
    works.done(seat_d, d.task, Outcome("dropped"))
    answer = works.room_of(seat_a, a.task)
    assert answer is not None and answer.segment >= 0


def test_a_batch_that_was_evicted_is_still_delivered_in_its_turn() -> None:
    """Batch 1 makes way for batch 0 while batch 2 is open already: 2 must not be delivered before 1."""
    works = Works(workers=3, rows=False, splittable=False, limit_bytes=10 * MIB, depth=3)
    works.dispatcher.admission.shapes.note_size(64 * KIB)
    works.dispatcher.admission.room_ahead = lambda task, seat: NO_SEGMENT  # type: ignore[method-assign]
    works.offer(3)
    (seat_a, a), (seat_b, b), (seat_c, c) = works.all_tasks()
    works.need(seat_b, b.task, 6 * MIB)
    room = works.room_of(seat_b, b.task)
    assert room is not None
    works.done(seat_b, b.task, Outcome("object", pickled=b"", segment=room.segment, used_bytes=6 * MIB))
    works.need(seat_a, a.task, 7 * MIB)
    room = works.room_of(seat_a, a.task)
    assert room is not None and room.segment >= 0
    works.done(seat_c, c.task, Outcome("inline", pickled=b""))
    works.done(seat_a, a.task, Outcome("object", pickled=b"", segment=room.segment, used_bytes=7 * MIB))
    assert works.finish_everything(None) == [0, 1, 2]


def test_a_dead_workers_rows_are_fetched_by_another_and_it_is_replaced() -> None:
    works = Works(workers=2)
    works.offer(1)
    template = image(4)
    dead = works.seat(0)
    rows = [message.first_row for seat, message in works.all_tasks() if seat is dead]
    works.die(dead)
    works.dispatcher.progress()
    assert isinstance(dead.handle, PaperHandle)
    assert dead.handle.reaped == 1
    assert works.replaced == [dead]
    assert rows[0] in [message.first_row for _, message in works.all_tasks()]
    assert works.finish_everything(template) == [0]


def test_a_death_while_its_need_waits_leaves_nothing_behind() -> None:
    works = Works(workers=2, rows=False, splittable=False, limit_bytes=10 * MIB)
    works.dispatcher.admission.shapes.note_size(MIB)
    works.offer(2)
    (first_seat, first), (second_seat, second) = works.all_tasks()
    works.need(first_seat, first.task, 6 * MIB)
    works.need(second_seat, second.task, 6 * MIB)
    works.die(second_seat)
    works.die(first_seat)
    works.dispatcher.progress()
    assert works.arena.in_use_bytes <= 2 * MIB + 128 * KIB
    assert works.finish_everything(None) == [0, 1]


def test_the_same_rows_killing_every_worker_is_an_error_that_names_them() -> None:
    works = Works(workers=1, splittable=False)
    works.offer(1)
    for _ in range(4):
        assert works.dispatcher.failure is None
        seat, fetch = works.all_tasks()[0]
        works.die(seat)
        works.dispatcher.progress()
        assert fetch.indices == list(range(8))
    assert works.dispatcher.failure is None, "only the batch is lost, not the epoch"
    batch = works.dispatcher.take_ready()
    assert batch is not None and batch.error is not None
    with pytest.raises(WorkerError) as failure:
        batch.error[1].reraise()
    assert "batch 0" in str(failure.value) and "index 0" in str(failure.value) and "SIGKILL" in str(failure.value)


def test_workers_that_die_at_start_are_an_error_and_not_a_loop() -> None:
    works = Works(workers=1)
    works.handle(0).started = False
    works.offer(1)
    for _ in range(4):
        works.handle(0).started = False
        assert works.dispatcher.failure is None
        works.die(works.seat(0))
    assert isinstance(works.dispatcher.failure, WorkerError)


def test_a_start_that_succeeds_wipes_the_slate() -> None:
    works = Works(workers=1)
    for _ in range(10):
        works.handle(0).started = False
        works.die(works.seat(0))
        assert works.dispatcher.failure is None
        works.dispatcher.on_message(works.seat(0), Started(5, -1))
    assert works.handle(0).private_bytes == 5


def test_bound_batches_belong_to_workers_in_turn() -> None:
    works = Works(workers=3, bound=True, splittable=False, depth=6)
    works.offer(6)
    template = image(4)
    for _ in range(50):
        if not works.all_tasks():
            break
        seat, message = works.all_tasks()[-1]
        number = seat.tasks[message.task].batch.number
        assert number % 3 == seat.handle.worker_id
        works.do(seat, message, template)
        while (batch := works.dispatcher.take_ready()) is not None:
            works.dispatcher.admission.release(batch)
            works.dispatcher.progress()
    assert not works.dispatcher.admission.open and not works.dispatcher.admission.upcoming


def test_an_exhausted_worker_leaves_the_rotation_and_the_others_go_on() -> None:
    works = Works(workers=2, bound=True, splittable=False, depth=4)
    works.offer(4)
    came: list[int] = []
    for _ in range(100):
        if works.dispatcher.is_over:
            break
        if len(works.dispatcher.admission.upcoming) < 2:
            works.offer(2)
        tasks = works.all_tasks()
        assert tasks, "nobody works and not everybody is exhausted"
        seat, message = tasks[0]
        number = seat.tasks[message.task].batch.number
        # Worker 1 has nothing at all, worker 0 has five batches.
        out = seat.handle.worker_id == 1 or number >= 10
        works.done(seat, message.task, Outcome("exhausted") if out else Outcome("inline", pickled=b""))
        while (batch := works.dispatcher.take_ready()) is not None:
            came.append(batch.number)
            works.dispatcher.admission.release(batch)
        works.dispatcher.progress()
    assert came == [0, 2, 4, 6, 8]


def test_a_bound_workers_successor_takes_up_its_batches() -> None:
    works = Works(workers=2, bound=True, splittable=False)
    works.offer(4)
    dead = works.seat(0)
    works.die(dead)
    works.dispatcher.progress()
    assert works.dispatcher.failure is None
    assert works.replaced == [dead]
    assert sorted(seat.handle.worker_id for seat in works.dispatcher.roster.seats) == [0, 1]
    assert works.finish_everything(image(4)) == [0, 1, 2, 3]


def test_samples_that_cannot_travel_make_their_batches_whole_from_then_on() -> None:
    works = Works(workers=2, rows=False)
    works.dispatcher.admission.shapes.note_size(100)
    works.offer(3)
    assert works.dispatcher.pace.splits
    seat, fetch = works.all_tasks()[0]
    works.done(seat, fetch.task, Outcome("cannot travel"))
    assert not works.dispatcher.pace.splits
    for pair in works.all_tasks():
        if not pair[1].alone:
            works.done(pair[0], pair[1].task, Outcome("cannot travel"))
    assert all(message.alone for _, message in works.all_tasks())
    assert works.finish_everything(None) == [0, 1, 2]


def test_parts_are_collated_by_one_worker_and_then_given_back() -> None:
    works = Works(workers=2, rows=False, batch_rows=2)
    works.offer(1)
    for seat, fetch in works.all_tasks():
        works.need(seat, fetch.task, MIB)
        room = works.room_of(seat, fetch.task)
        assert room is not None
        works.done(seat, fetch.task, Outcome("part", 0, [], b"x", [(0, MIB)], room.segment, MIB))
    ((seat, collate),) = works.all_tasks()
    assert isinstance(collate, Collate)
    assert [part.pickled for part in collate.parts] == [b"x", b"x"]
    assert all(works.handle(seat.handle.worker_id).has_attached(part.extra_segment) for part in collate.parts)
    works.need(seat, collate.task, 2 * MIB)
    room = works.room_of(seat, collate.task)
    assert room is not None
    works.done(seat, collate.task, Outcome("object", pickled=b"y", segment=room.segment, used_bytes=2 * MIB))
    batch = works.dispatcher.take_ready()
    assert batch is not None and list(batch.extra) == [room.segment]
    assert works.arena.in_use_bytes == 2 * MIB


def test_the_lowest_rows_error_is_told_once_all_rows_have_come_to_rest() -> None:
    works = Works(workers=2, batch_rows=2)
    works.offer(1)
    (first_seat, first), (second_seat, second) = works.all_tasks()
    works.done(second_seat, second.task, Outcome("error"), error="second")
    assert works.dispatcher.take_ready() is None
    works.done(first_seat, first.task, Outcome("error"), error="first")
    batch = works.dispatcher.take_ready()
    assert batch is not None and batch.error == (0, "first")
    assert works.arena.in_use_bytes == 0


@pytest.mark.parametrize("small_first", [True, False])
def test_rows_of_different_layouts_never_count_as_one(small_first: bool) -> None:
    """Two workers learn from their first sample at once: one template needs no bytes, the other does."""
    empty, filled = learn(torch.empty(0)), learn(torch.ones(3))
    assert empty is not None and filled is not None
    works = Works(workers=2, batch_rows=2)
    works.offer(1)
    pairs = works.all_tasks()
    needs = [(0, empty), (layout_of(filled, 2).total_bytes, filled)]
    if not small_first:
        needs.reverse()
    for (seat, fetch), (need_bytes, template) in zip(pairs, needs, strict=True):
        works.need(seat, fetch.task, need_bytes, template)
    given = [works.room_of(seat, fetch.task) for seat, fetch in pairs]
    assert all(room is not None for room in given)
    assert given[0].template == given[1].template  # type: ignore[union-attr]


def test_an_idle_loader_gives_everything_back_and_starts_again() -> None:
    works = Works(workers=2)
    template = image(64)
    works.offer(4)
    for _ in range(12):
        works.do(*works.all_tasks()[0], template)
    works.dispatcher.release_idle()
    while works.all_tasks():
        seat, message = works.all_tasks()[0]
        works.rows_done(seat, message)
    assert works.arena.in_use_bytes == 0
    works.arena.close_free()
    assert works.accounted() == 0
    works.dispatcher.paused = False
    works.dispatcher.progress()
    assert works.finish_everything(template) == [0, 1, 2, 3]


def test_no_more_slots_than_allowed_are_open_or_lent() -> None:
    works = Works(workers=4, max_slots=2, depth=8)
    template = image(4)
    works.offer(6)
    most = 0
    for _ in range(500):
        most = max(most, len(works.dispatcher.admission.open))
        tasks = works.all_tasks()
        if not tasks:
            break
        works.do(*tasks[0], template)
        while (batch := works.dispatcher.take_ready()) is not None:
            works.dispatcher.admission.release(batch)
            works.dispatcher.progress()
    assert most <= 2
    assert not works.dispatcher.admission.open and not works.dispatcher.admission.upcoming


def test_a_sampler_that_failed_is_told_in_its_turn() -> None:
    works = Works(workers=1)
    works.offer(1)
    error = ValueError("sampler")
    works.dispatcher.admission.upcoming.append(Batch(1, None, 1, None, failure=error))
    template = image(4)
    came = []
    while works.all_tasks():
        works.do(*works.all_tasks()[0], template)
    while (batch := works.dispatcher.take_ready()) is not None:
        came.append((batch.number, batch.failure))
        works.dispatcher.admission.release(batch)
        works.dispatcher.progress()
    assert came == [(0, None), (1, error)]


def test_a_due_need_does_not_wait_for_an_evicted_batch_queued_behind_it() -> None:
    """The only task of the later batch is behind the need on the same worker: neither would ever be done."""
    works = Works(workers=1, rows=False, limit_bytes=10 * MIB, row_s=0.001, batch_rows=8, depth=2)
    works.dispatcher.admission.shapes.note_size(64 * KIB)
    works.offer(2)
    tasks = works.all_tasks()
    assert [seat.tasks[message.task].batch.number for seat, message in tasks] == [0, 0, 1, 1][: len(tasks)]
    later = works.dispatcher.admission.open[1]
    segment = works.arena.take(8 * MIB)
    assert segment is not None
    later.extra[segment.number] = segment
    seat, first = tasks[0]
    with pytest.warns(RuntimeWarning, match="pass one at a time"):
        works.let_wait(seat, first.task, 5 * MIB)
        works.dispatcher.progress()
    answer = works.room_of(seat, first.task)
    assert answer is not None and answer.segment >= 0
    assert later.evicted
