"""Admission, dispatcher and settlement with workers that exist on paper only."""

from __future__ import annotations

import contextlib
import selectors
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from penstock.arena.arena import Arena
from penstock.arena.layout import layout_of
from penstock.arena.segment import Segment
from penstock.arena.template import Template, learn
from penstock.errors import BudgetError, WorkerError
from penstock.loader.engine.batch import Batch, SamplerFailure
from penstock.loader.engine.budget import MemoryBudget
from penstock.loader.engine.crashes import CrashCounter
from penstock.loader.engine.dispatcher import Dispatcher
from penstock.loader.engine.engine_parts import EngineParts
from penstock.loader.engine.settlement import Settlement
from penstock.loader.engine.worker_set import WorkerEntry, WorkerSet
from penstock.loader.rules import LoaderRules, Order
from penstock.workers.protocol import (
    DROP,
    NO_SEGMENT,
    Collate,
    Done,
    Fetch,
    Learn,
    Need,
    Outcome,
    Resume,
    Room,
    Started,
)

KIB, MIB = 1 << 10, 1 << 20


WORKER_BYTES = 100 << 20
"""Private memory of each paper worker: the arena keeps the limit that the test gives."""
OWN_BYTES = 4 << 20


class PaperPeer:
    """A worker that writes down what it is sent."""

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id
        self.started = True
        self.private_bytes = WORKER_BYTES
        self.trace_fd = -1
        self.template: Template | None = None
        self.posted: list[Any] = []
        self.attached: set[int] = set()
        self.reaped = 0
        self.exit_code: int | None = -9

    @property
    def pid(self) -> int:
        return 1000 + self.worker_id

    def fileno(self) -> int:
        raise AssertionError("a paper selector does not listen")

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

    @property
    def is_gone(self) -> bool:
        return True

    def reap(self, deadline_s: float) -> int | None:
        self.reaped += 1
        return self.exit_code


class PaperStarter:
    board = None
    starts_at_once = True

    def sharing_setup(self, workers: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def start(self, worker_id: int, num_workers: int, resume: Resume | None = None, setup: Any = None) -> PaperPeer:
        return PaperPeer(worker_id)

    def close(self) -> None: ...


class PaperSelector(selectors.BaseSelector):
    """Listens to nothing."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return []

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return {}


class PaperWorkers(WorkerSet):
    def in_hand(self, worker: WorkerEntry) -> tuple[int, int]:
        """The first row of the first task, which a real worker would write on the board."""
        first = next(iter(worker.tasks.values()), None)
        return (-1, -1) if first is None else (first.number, -1 if first.rows is None else first.rows.start)


ARENAS: list[Arena] = []
"""The arenas that the running test has made."""


@pytest.fixture(autouse=True)
def closes_arenas() -> Iterator[None]:
    yield
    while ARENAS:
        ARENAS.pop().close()


class Works:
    """An engine's parts without its pump, and its paper workers."""

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
        nominal_rows: int | None = None,
        whole_share: float = 0.25,
    ) -> None:
        """``nominal_rows``: the batch length known before any batch is drawn, if it is not ``batch_rows``."""
        rules = LoaderRules(most_slots=max_slots, whole_share=whole_share)
        order = Order(
            rows=rows,
            splittable=splittable,
            bound=bound,
            in_order=in_order,
            batch_rows=nominal_rows or batch_rows,
            keeps_generators=False,
        )
        self.workers = PaperWorkers(
            PaperStarter(),
            workers,
            selector=PaperSelector(),
            lock=threading.RLock(),
            wake=lambda: None,
            start_failed=lambda worker_id, problem: None,
            keeps_position=bound,
        )
        self.arena = Arena(
            limit_bytes=limit_bytes,
            headroom_bytes=headroom_bytes,
            closed=self.workers.forget_segment,
            woken=lambda: None,
            keep_free=64,
        )
        ARENAS.append(self.arena)
        parts = EngineParts(workers=self.workers, arena=self.arena, order=order, rules=rules)
        self.pace, self.admission = parts.pace, parts.admission
        if row_s is not None:
            self.pace.note(1, row_s)
        self.budget = MemoryBudget(limit_bytes + workers * WORKER_BYTES + OWN_BYTES, parts)
        self.now_s = 0.0
        self.dispatcher = Dispatcher(parts, self.budget, clock=lambda: self.now_s)
        self.settlement = Settlement(parts, CrashCounter(diagnosis=lambda: None), self.budget)
        self.dispatcher.depth_wanted = depth
        self.replaced: list[WorkerEntry] = []
        for _ in self.workers.start_first({}):
            pass
        self.batch_rows = batch_rows
        self._drawn = 0

    def crash(self, worker: WorkerEntry) -> None:
        """A worker's socket has closed; another worker replaces it."""
        self.settlement.on_crash(worker)
        self.replaced += self.workers.replace_crashed()

    def offer(self, count: int) -> None:
        for _ in range(count):
            first = self._drawn * self.batch_rows
            indices = list(range(first, first + self.batch_rows))
            self.dispatcher.offer(Batch(self._drawn, indices, self.batch_rows, seed=self._drawn))
            self._drawn += 1
        self.dispatcher.progress()

    def worker(self, number: int) -> WorkerEntry:
        return self.workers.members[number]

    def peer(self, number: int) -> PaperPeer:
        return peer_of(self.worker(number))

    def sent(self, number: int, kind: type) -> list[Any]:
        return [message for message in self.peer(number).posted if isinstance(message, kind)]

    def all_tasks(self) -> list[tuple[WorkerEntry, Any]]:
        """Tasks handed out and not answered, oldest first."""
        found = []
        for worker in self.workers.members:
            for message in peer_of(worker).posted:
                if isinstance(message, (Fetch, Collate)) and message.task in worker.tasks:
                    found.append((worker, message))
        return sorted(found, key=lambda pair: pair[1].task)

    def task_for(self, batch: int) -> tuple[WorkerEntry, Any]:
        return next(pair for pair in self.all_tasks() if pair[0].tasks[pair[1].task].batch.number == batch)

    def make_wait(self, worker: WorkerEntry, task: int, need_bytes: int) -> None:
        """A need that came earlier and found no room."""
        worker.tasks[task].need = Need(task, need_bytes, None, 0)
        self.admission._waiting.append((worker, worker.tasks[task]))

    def need(self, worker: WorkerEntry, task: int, need_bytes: int, template: Template | None = None) -> None:
        self.settlement.on_message(worker, Need(task, need_bytes, template, 0))
        self.dispatcher.progress()

    def guess(self, worker: WorkerEntry, task: int, need_bytes: int) -> None:
        self.settlement.on_message(worker, Need(task, need_bytes, None, 0, is_guess=True))
        self.dispatcher.progress()

    def done(
        self, worker: WorkerEntry, task: int, outcome: Outcome, *, error: Any = None, fetch_s: float = 0.02
    ) -> None:
        self.settlement.on_message(worker, Done(task, outcome, error, fetch_s, 0.0, 0, None))
        self.dispatcher.progress()

    def rows_done(self, worker: WorkerEntry, fetch: Fetch) -> None:
        self.done(worker, fetch.task, Outcome("rows", len(fetch.indices), [], segment=fetch.segment), fetch_s=0.02)

    def finish_everything(self, template: Template | None, limit: int = 10_000) -> list[int]:
        """Workers finish all their tasks, the user takes and drops every batch; returns the numbers of the batches."""
        came: list[int] = []
        for _ in range(limit):
            while (batch := self.settlement.take_ready()) is not None:
                came.append(batch.number)
                self.admission.release(batch)
                self.dispatcher.progress()
            tasks = self.all_tasks()
            if not tasks:
                return came
            worker, message = tasks[0]
            self.do(worker, message, template)
        raise AssertionError(f"not finished after {limit} rounds")

    def do(self, worker: WorkerEntry, message: Any, template: Template | None) -> None:
        segment = message.segment
        if template is not None:
            if segment == NO_SEGMENT:
                self.need(worker, message.task, layout_of(template, message.batch_rows).total_bytes, template)
                room = self.room_of(worker, message.task)
                assert room is not None and room.segment != DROP
                segment = room.segment
            self.done(worker, message.task, Outcome("rows", len(message.indices), [], segment=segment))
        elif isinstance(message, Fetch) and not message.alone:
            self.done(worker, message.task, Outcome("part", 0, [], b"", [], NO_SEGMENT))
        else:
            self.done(worker, message.task, Outcome("inline", pickled=b""))

    @staticmethod
    def room_of(worker: WorkerEntry, task: int) -> Room | None:
        rooms = [m for m in peer_of(worker).posted if isinstance(m, Room) and m.task == task]
        return rooms[-1] if rooms else None

    def accounted(self) -> int:
        return self.arena.in_use_bytes + self.arena.free_bytes


def peer_of(worker: WorkerEntry) -> PaperPeer:
    assert isinstance(worker.peer, PaperPeer)
    return worker.peer


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
    assert {worker.tasks[m.task].batch.number for worker, m in works.all_tasks()} == {0}
    assert all(m.indices == [m.first_row] and m.batch_rows == 8 and not m.alone for _, m in works.all_tasks())


@pytest.mark.parametrize("row_s", [0.0001, 0.0005, 0.02])
def test_depth_follows_the_length_of_the_batches_that_a_batch_sampler_draws(row_s: float) -> None:
    by_size, by_sampler = (Works(workers=4, batch_rows=64, row_s=row_s, nominal_rows=rows) for rows in (64, 1))
    for works in (by_size, by_sampler):
        works.offer(2)
    assert by_sampler.dispatcher.depth == by_size.dispatcher.depth


def test_batches_are_delivered_in_order_whatever_order_their_rows_finish_in() -> None:
    works = Works(workers=4)
    works.offer(6)
    template = image(4)
    taken: list[int] = []
    for _ in range(200):
        tasks = works.all_tasks()
        if not tasks:
            break
        works.do(*tasks[-1], template)
        while (batch := works.settlement.take_ready()) is not None:
            taken.append(batch.number)
            works.admission.release(batch)
            works.dispatcher.progress()
    assert taken == [0, 1, 2, 3, 4, 5]
    assert works.dispatcher.is_idle


def test_out_of_order_a_ready_batch_does_not_wait_for_an_earlier_one() -> None:
    works = Works(workers=2, in_order=False, splittable=False)
    works.offer(1)
    ((worker, fetch),) = works.all_tasks()
    works.do(worker, fetch, image(4))
    assert works.settlement.take_ready() is not None
    works.offer(2)
    first, second = works.all_tasks()
    works.do(*second, image(4))
    ready = works.settlement.take_ready()
    assert ready is not None
    assert ready.number == 2
    assert works.settlement.take_ready() is None
    works.do(*first, image(4))
    assert works.settlement.take_ready().number == 1  # type: ignore[union-attr]


def test_a_task_carries_the_template_and_the_segment_once_they_are_known() -> None:
    works = Works(workers=1)
    works.offer(2)
    template = image(4)
    worker, fetch = works.all_tasks()[0]
    assert fetch.segment == NO_SEGMENT and not fetch.by_template
    works.need(worker, fetch.task, layout_of(template, 8).total_bytes, template)
    room = works.room_of(worker, fetch.task)
    assert room is not None and room.template == template and works.peer(0).has_attached(room.segment)
    works.done(worker, fetch.task, Outcome("rows", 1, [], segment=room.segment))
    later = works.all_tasks()[0][1]
    assert later.by_template and later.segment == room.segment
    assert works.sent(0, Learn) == [Learn(template)]


def test_only_the_due_batch_is_opened_beyond_the_budget() -> None:
    template = image(1024)
    works = Works(workers=2, limit_bytes=20 * MIB, depth=6)
    works.offer(6)
    worker, fetch = works.all_tasks()[0]
    works.do(worker, fetch, template)
    while any(b.todo or b.running for b in [works.admission.open[0]]):
        works.do(*works.task_for(0), template)
    assert sorted(works.admission.open) == [0, 1]
    assert works.finish_everything(template) == [0, 1, 2, 3, 4, 5]
    assert works.arena.peak_bytes <= 20 * MIB


def test_a_batch_larger_than_the_budget_passes_alone_with_one_warning() -> None:
    template = image(1024)
    works = Works(workers=2, limit_bytes=3 * MIB)
    with pytest.warns(RuntimeWarning, match="8.00 MiB.* 3.00 MiB"):
        works.offer(3)
        assert works.finish_everything(template) == [0, 1, 2]
        works.admission.notices.give()
    assert works.arena.peak_bytes == 8 * MIB


def test_the_due_batch_is_opened_although_the_user_holds_everything() -> None:
    template = image(1024)
    works = Works(workers=1, limit_bytes=17 * MIB)
    works.offer(4)
    held = []
    for number in range(4):
        works.admission.trainer_waits = True
        works.dispatcher.progress()
        while (batch := works.settlement.take_ready()) is None:
            works.do(*works.all_tasks()[0], template)
        assert batch.number == number
        assert batch.rows_segment is not None
        token = works.arena.lend(batch.rows_segment, 8 * MIB)
        token[:10] = number
        held.append(token)
        works.admission.trainer_waits = False
        assert works.accounted() <= 17 * MIB
    assert [int(token[0]) for token in held] == [0, 1, 2, 3]
    assert works.arena.handed_over_bytes > 0


def test_while_the_user_computes_the_engine_waits_for_the_batch_the_user_holds() -> None:
    template = image(1024)
    works = Works(workers=1, limit_bytes=9 * MIB)
    works.offer(2)
    while (batch := works.settlement.take_ready()) is None:
        works.do(*works.all_tasks()[0], template)
    assert batch.rows_segment is not None
    token = works.arena.lend(batch.rows_segment, 8 * MIB)
    works.dispatcher.progress()
    assert not works.all_tasks()
    del token
    works.dispatcher.progress()
    assert works.all_tasks()
    assert works.arena.handed_over_bytes == 0


def test_a_batch_that_does_not_fit_the_machine_raises_a_budget_error_with_the_numbers() -> None:
    works = Works(workers=1, headroom_bytes=lambda: 5 * MIB)
    works.offer(1)
    worker, fetch = works.all_tasks()[0]
    works.need(worker, fetch.task, 8 * MIB, image(1024))
    failure = works.admission.failure
    assert isinstance(failure, BudgetError)
    assert "batch 0" in str(failure)
    assert works.accounted() == 0


def test_a_later_batch_makes_room_for_a_due_batch_that_grew() -> None:
    works = Works(workers=2, rows=False, splittable=False, limit_bytes=10 * MIB)
    works.admission.shapes.note_size(1 * MIB)
    works.offer(3)
    (first_worker, first), (second_worker, second) = works.all_tasks()
    works.need(second_worker, second.task, 6 * MIB)
    room = works.room_of(second_worker, second.task)
    assert room is not None and room.segment >= 0
    works.done(second_worker, second.task, Outcome("object", pickled=b"", segment=room.segment, used_bytes=6 * MIB))
    assert works.admission.open[1].ready
    works.need(first_worker, first.task, 7 * MIB)
    answer = works.room_of(first_worker, first.task)
    assert answer is not None and answer.segment >= 0, "the due batch waits for a batch that waits for it"
    assert not works.admission.open.get(1) or not works.admission.open[1].ready
    assert works.accounted() <= 10 * MIB
    works.done(first_worker, first.task, Outcome("object", pickled=b"", segment=answer.segment, used_bytes=7 * MIB))
    taken = works.settlement.take_ready()
    assert taken is not None and taken.number == 0
    works.admission.release(taken)
    works.dispatcher.progress()
    assert works.finish_everything(None) == [1, 2]


def test_a_request_for_a_batch_that_is_not_due_waits_until_memory_is_released() -> None:
    works = Works(workers=2, rows=False, splittable=False, limit_bytes=10 * MIB)
    works.admission.shapes.note_size(1 * MIB)
    works.offer(2)
    (first_worker, first), (second_worker, second) = works.all_tasks()
    works.need(first_worker, first.task, 6 * MIB)
    room = works.room_of(first_worker, first.task)
    assert room is not None
    works.need(second_worker, second.task, 6 * MIB)
    assert works.room_of(second_worker, second.task) is None
    works.done(first_worker, first.task, Outcome("object", pickled=b"", segment=room.segment, used_bytes=6 * MIB))
    batch = works.settlement.take_ready()
    assert batch is not None
    works.admission.release(batch)
    works.dispatcher.progress()
    answer = works.room_of(second_worker, second.task)
    assert answer is not None and answer.segment >= 0


def test_a_worker_that_must_drop_a_task_gets_no_second_answer_about_it() -> None:
    """A later batch with a part in the arena and a need that waits is evicted while needs are being answered."""
    works = Works(workers=3, rows=False, limit_bytes=10 * MIB, batch_rows=2, depth=2, whole_share=0)
    works.admission.shapes.note_size(1 * MIB)
    works.offer(2)
    tasks = works.all_tasks()
    assert [(its_worker.tasks[m.task].batch.number, m.first_row) for its_worker, m in tasks] == [(0, 0), (0, 1), (1, 0)]
    (worker_a, a), (worker_b, b), (worker_c, c) = tasks
    # Batch 1 leaves a part of 3 MiB, then its second row wants 6 MiB more: that waits.
    works.need(worker_c, c.task, 3 * MIB)
    room = works.room_of(worker_c, c.task)
    assert room is not None
    works.done(worker_c, c.task, Outcome("part", 0, [], b"", [], room.segment, 3 * MIB))
    worker_d, d = works.task_for(1)
    works.need(worker_a, a.task, 4 * MIB)
    works.need(worker_d, d.task, 6 * MIB)
    assert works.room_of(worker_d, d.task) is None
    # The due batch needs what batch 1 holds. Its need is answered in the same round as the one that waits.
    works.make_wait(worker_b, b.task, 5 * MIB)
    works.dispatcher.progress()
    drops = [m for m in works.peer(works.workers.members.index(worker_d)).posted if isinstance(m, Room)]
    assert [m.segment for m in drops if m.task == d.task] == [DROP]
    works.done(worker_d, d.task, Outcome("dropped"))
    works.dispatcher.progress()
    answer = works.room_of(worker_b, b.task)
    assert answer is not None and answer.segment >= 0
    assert 1 not in works.admission.open or not works.admission.open[1].evicted


def test_a_worker_that_waits_for_a_later_batch_drops_it_if_the_due_one_is_queued_behind_it() -> None:
    works = Works(workers=1, rows=False, splittable=False, limit_bytes=4 * MIB, row_s=0.0001, depth=2)
    works.admission.shapes.note_size(1 * MIB)
    works.offer(2)
    (worker, due), (_, later) = works.all_tasks()
    works.make_wait(worker, later.task, 6 * MIB)
    works.dispatcher.progress()
    answer = works.room_of(worker, later.task)
    assert answer is not None and answer.segment == DROP
    assert works.room_of(worker, due.task) is None
    works.done(worker, later.task, Outcome("dropped"))
    assert works.finish_everything(None) == [0, 1]


def test_a_batch_that_was_evicted_is_opened_although_later_ones_fill_the_depth() -> None:
    works = Works(workers=1, depth=3, row_s=0.0001)
    works.offer(3)
    admission = works.admission
    first = admission.open[0]
    while tasks := works.all_tasks():
        works.done(tasks[0][0], tasks[0][1].task, Outcome("inline", pickled=b""))
    assert [batch.ready for batch in admission.open.values()] == [True] * 3
    admission.evict(first)
    works.dispatcher.depth_wanted = 2
    assert list(admission.open) == [1, 2] and works.settlement.take_ready() is None
    works.dispatcher.progress()
    assert list(admission.open) == [0, 1, 2]


def test_a_batch_that_was_evicted_keeps_its_place_while_another_thread_draws_further_ones() -> None:
    works = Works(workers=1, depth=3, row_s=0.0001)
    works.offer(3)
    admission = works.admission
    while tasks := works.all_tasks():
        works.done(tasks[0][0], tasks[0][1].task, Outcome("inline", pickled=b""))
    drawn: list[Batch] = []

    class DrawnMeanwhile(Batch):
        """While its number is read, the training thread draws one more batch."""

        def __getattribute__(self, name: str) -> Any:
            if name == "number" and not drawn:
                drawn.append(Batch(99, None, 1, None))
                admission.upcoming.append(drawn[0])
            return super().__getattribute__(name)

    admission.upcoming.append(DrawnMeanwhile(98, None, 1, None))
    admission.evict(admission.open[0])
    assert [batch.number for batch in admission.upcoming] == [0, 98, 99]


def test_a_worker_that_waits_for_a_later_batch_drops_it_if_the_due_one_was_evicted_and_no_worker_is_free() -> None:
    works = Works(workers=1, rows=False, splittable=False, limit_bytes=4 * MIB, row_s=0.01, depth=4)
    works.admission.shapes.note_size(1 * MIB)
    works.offer(4)
    admission = works.admission
    (worker, first), *_ = works.all_tasks()
    works.done(worker, first.task, Outcome("inline", pickled=b""))
    (worker, later), *_ = works.all_tasks()
    works.make_wait(worker, later.task, 6 * MIB)
    admission.evict(admission.open[0])
    assert admission.is_next_due and works.room_of(worker, later.task) is None
    works.dispatcher.progress()
    answer = works.room_of(worker, later.task)
    assert answer is not None and answer.segment == DROP
    works.done(worker, later.task, Outcome("dropped"))
    assert works.finish_everything(None) == [0, 1, 2, 3]


def test_a_batch_that_was_evicted_is_fetched_before_the_rest_of_later_ones() -> None:
    works = Works(workers=1, splittable=False, row_s=0.02, depth=2)
    works.offer(2)
    admission = works.admission
    (worker, fetch), *_ = works.all_tasks()
    works.done(worker, fetch.task, Outcome("inline", pickled=b""))
    (worker, fetch), *_ = works.all_tasks()
    assert admission.open[0].ready and worker.tasks[fetch.task].batch.number == 1
    admission.evict(admission.open[0])
    works.done(worker, fetch.task, Outcome("dropped"))
    (worker, fetch), *_ = works.all_tasks()
    assert worker.tasks[fetch.task].batch.number == 0


def test_evicting_a_batch_while_needs_are_answered_leaves_no_need_unanswered() -> None:
    """Of several needs that wait, one is due and evicts a later batch: each of the others is still answered."""
    works = Works(workers=4, rows=False, limit_bytes=10 * MIB, batch_rows=2, depth=3, whole_share=0)
    works.admission.shapes.note_size(64 * KIB)
    works.offer(3)
    (worker_a, a), _, (worker_c, c), (worker_d, d) = works.all_tasks()
    batches = [worker.tasks[m.task].batch.number for worker, m in works.all_tasks()]
    assert batches == [0, 0, 1, 1]
    works.need(worker_c, c.task, 7 * MIB)
    room = works.room_of(worker_c, c.task)
    assert room is not None
    works.done(worker_c, c.task, Outcome("part", 0, [], b"", [], room.segment, 7 * MIB))
    worker_e, e = works.task_for(2)
    assert worker_e is worker_c
    # All three wait: the due batch's row, the rest of batch 1 (which will be evicted), and a row of batch 2.
    admission = works.admission
    works.make_wait(worker_d, d.task, 5 * MIB)
    works.make_wait(worker_a, a.task, 5 * MIB)
    works.make_wait(worker_e, e.task, 5 * MIB)
    works.dispatcher.progress()
    drop = works.room_of(worker_d, d.task)
    assert drop is not None and drop.segment == DROP
    waits = any(task.number == e.task for _, task in admission._waiting)
    assert works.room_of(worker_e, e.task) is not None or waits, "a worker waits for an answer that never comes"
    works.done(worker_d, d.task, Outcome("dropped"))
    answer = works.room_of(worker_a, a.task)
    assert answer is not None and answer.segment >= 0


def test_a_batch_that_was_evicted_is_still_delivered_in_its_turn() -> None:
    """Batch 1 makes way for batch 0 while batch 2 is open already: 2 must not be delivered before 1."""
    works = Works(workers=3, rows=False, splittable=False, limit_bytes=10 * MIB, depth=3)
    works.admission.shapes.note_size(64 * KIB)
    works.admission.room_ahead = lambda task, worker: NO_SEGMENT  # type: ignore[method-assign]
    works.offer(3)
    (worker_a, a), (worker_b, b), (worker_c, c) = works.all_tasks()
    works.need(worker_b, b.task, 6 * MIB)
    room = works.room_of(worker_b, b.task)
    assert room is not None
    works.done(worker_b, b.task, Outcome("object", pickled=b"", segment=room.segment, used_bytes=6 * MIB))
    works.need(worker_a, a.task, 7 * MIB)
    room = works.room_of(worker_a, a.task)
    assert room is not None and room.segment >= 0
    works.done(worker_c, c.task, Outcome("inline", pickled=b""))
    works.done(worker_a, a.task, Outcome("object", pickled=b"", segment=room.segment, used_bytes=7 * MIB))
    assert works.finish_everything(None) == [0, 1, 2]


def test_rows_of_a_crashed_worker_are_fetched_by_another_and_it_is_replaced() -> None:
    works = Works(workers=2)
    works.offer(1)
    template = image(4)
    crashed = works.worker(0)
    rows = [message.first_row for worker, message in works.all_tasks() if worker is crashed]
    works.crash(crashed)
    works.dispatcher.progress()
    assert peer_of(crashed).reaped == 1
    assert works.replaced == [crashed]
    assert rows[0] in [message.first_row for _, message in works.all_tasks()]
    assert works.finish_everything(template) == [0]


def test_a_worker_that_crashes_while_it_waits_for_room_leaves_nothing_behind() -> None:
    works = Works(workers=2, rows=False, splittable=False, limit_bytes=10 * MIB)
    works.admission.shapes.note_size(MIB)
    works.offer(2)
    (first_worker, first), (second_worker, second) = works.all_tasks()
    works.need(first_worker, first.task, 6 * MIB)
    works.need(second_worker, second.task, 6 * MIB)
    works.crash(second_worker)
    works.crash(first_worker)
    works.dispatcher.progress()
    assert works.arena.in_use_bytes <= 2 * MIB + 128 * KIB
    assert works.finish_everything(None) == [0, 1]


def test_rows_that_crash_every_worker_are_an_error_that_names_them() -> None:
    works = Works(workers=1, splittable=False)
    works.offer(1)
    for _ in range(4):
        assert works.admission.failure is None
        worker, fetch = works.all_tasks()[0]
        works.crash(worker)
        works.dispatcher.progress()
        assert fetch.indices == list(range(8))
    assert works.admission.failure is None, "only the batch is lost, not the epoch"
    batch = works.settlement.take_ready()
    assert batch is not None and batch.error is not None
    with pytest.raises(WorkerError) as failure:
        batch.error[1].reraise()
    assert "batch 0" in str(failure.value) and "index 0" in str(failure.value) and "SIGKILL" in str(failure.value)


def test_workers_that_crash_while_starting_are_an_error_and_not_a_loop() -> None:
    works = Works(workers=1)
    works.peer(0).started = False
    works.offer(1)
    for _ in range(4):
        works.peer(0).started = False
        assert works.admission.failure is None
        works.crash(works.worker(0))
    assert isinstance(works.admission.failure, WorkerError)


def test_a_successful_start_resets_the_count_of_crashes() -> None:
    works = Works(workers=1)
    for _ in range(10):
        works.peer(0).started = False
        works.crash(works.worker(0))
        assert works.admission.failure is None
        works.settlement.on_message(works.worker(0), Started(5, -1))
    assert works.peer(0).private_bytes == 5


@pytest.mark.parametrize(
    ("waits", "depth", "limit_mib", "most_open"),
    [
        (False, None, 100, 2),  # the user computes: nothing is late
        (True, None, 100, 9),  # as far as the indices that were drawn
        (True, 3, 100, 3),  # the user has set the depth
        (True, None, 1, 4),  # an eighth of 1 MiB is worth four batches of 32 KiB
    ],
)
def test_while_the_loop_waits_for_a_slow_sample_free_workers_go_on_where_memory_is_cheap(
    waits: bool, depth: int | None, limit_mib: int, most_open: int
) -> None:
    template = image(4)
    works = Works(workers=4, depth=depth, limit_bytes=limit_mib * MIB)
    works.offer(2)
    works.finish_everything(template)
    works.offer(9)
    works.admission.trainer_waits = waits
    slow, *_ = works.all_tasks()
    for _ in range(200):
        others = [pair for pair in works.all_tasks() if pair[1].task != slow[1].task]
        for pair in others:
            works.do(*pair, template)
        works.now_s += 0.02
        works.dispatcher.progress()
    assert len(works.admission.open) == most_open
    assert works.dispatcher.is_starved == (depth is None and not waits)
    assert works.finish_everything(template)[:1] == [2]


def test_bound_batches_belong_to_workers_in_turn() -> None:
    works = Works(workers=3, bound=True, splittable=False, depth=6)
    works.offer(6)
    template = image(4)
    for _ in range(50):
        if not works.all_tasks():
            break
        worker, message = works.all_tasks()[-1]
        number = worker.tasks[message.task].batch.number
        assert number % 3 == worker.worker_id
        works.do(worker, message, template)
        while (batch := works.settlement.take_ready()) is not None:
            works.admission.release(batch)
            works.dispatcher.progress()
    assert not works.admission.open and not works.admission.upcoming


def test_an_exhausted_worker_leaves_the_rotation_and_the_others_go_on() -> None:
    works = Works(workers=2, bound=True, splittable=False, depth=4)
    works.offer(4)
    came: list[int] = []
    for _ in range(100):
        if works.settlement.is_over:
            break
        if len(works.admission.upcoming) < 2:
            works.offer(2)
        tasks = works.all_tasks()
        assert tasks, "no worker has a task, and not all are exhausted"
        worker, message = tasks[0]
        number = worker.tasks[message.task].batch.number
        # WorkerEntry 1 has nothing at all, worker 0 has five batches.
        out = worker.worker_id == 1 or number >= 10
        works.done(worker, message.task, Outcome("exhausted") if out else Outcome("inline", pickled=b""))
        while (batch := works.settlement.take_ready()) is not None:
            came.append(batch.number)
            works.admission.release(batch)
        works.dispatcher.progress()
    assert came == [0, 2, 4, 6, 8]


def test_the_replacement_of_a_bound_worker_continues_its_batches() -> None:
    works = Works(workers=2, bound=True, splittable=False)
    works.offer(4)
    crashed = works.worker(0)
    works.crash(crashed)
    works.dispatcher.progress()
    assert works.admission.failure is None
    assert works.replaced == [crashed]
    assert sorted(worker.worker_id for worker in works.workers.members) == [0, 1]
    assert works.finish_everything(image(4)) == [0, 1, 2, 3]


def test_samples_that_cannot_travel_make_their_batches_whole_from_then_on() -> None:
    works = Works(workers=2, rows=False, whole_share=0)
    works.admission.shapes.note_size(100)
    works.offer(3)
    assert works.pace.splits
    worker, fetch = works.all_tasks()[0]
    works.done(worker, fetch.task, Outcome("cannot travel"))
    assert not works.pace.splits
    for pair in works.all_tasks():
        if not pair[1].alone:
            works.done(pair[0], pair[1].task, Outcome("cannot travel"))
    assert all(message.alone for _, message in works.all_tasks())
    assert works.finish_everything(None) == [0, 1, 2]


@pytest.mark.parametrize(("limit_bytes", "whole"), [(100 * MIB, True), (96 * KIB, False)])
def test_rows_of_a_dataset_that_reads_in_chunks_go_to_one_worker_where_memory_is_cheap(
    limit_bytes: int, whole: bool
) -> None:
    """Each worker's first task of a batch reads the chunk that all rows of the batch lie in."""
    works = Works(workers=2, limit_bytes=limit_bytes, row_s=0.02)
    template = image(1)
    last: dict[int, int] = {}
    batch_number, is_alone = -1, False
    works.offer(12)
    for _ in range(200):
        while (batch := works.settlement.take_ready()) is not None:
            works.admission.release(batch)
            works.dispatcher.progress()
        if not (tasks := works.all_tasks()):
            break
        worker, message = tasks[0]
        batch_number = worker.tasks[message.task].batch.number
        segment = message.segment
        if segment == NO_SEGMENT:
            works.need(worker, message.task, layout_of(template, 8).total_bytes, template)
            room = works.room_of(worker, message.task)
            assert room is not None
            segment = room.segment
        fetch_s = 0.0001 if last.get(worker.worker_id) == batch_number else 0.02
        last[worker.worker_id] = batch_number
        is_alone = message.alone
        works.done(worker, message.task, Outcome("rows", len(message.indices), [], segment=segment), fetch_s=fetch_s)
    assert batch_number == 11 and is_alone == whole


def test_a_batch_for_a_collate_function_is_built_whole_and_others_open_once_its_first_sample_gives_its_size() -> None:
    works = Works(workers=2, rows=False, row_s=None)
    works.offer(3)
    ((worker, fetch),) = works.all_tasks()
    assert fetch.alone
    works.guess(worker, fetch.task, MIB)
    room = works.room_of(worker, fetch.task)
    assert room is not None and room.segment == NO_SEGMENT
    batches = [(one.tasks[m.task].batch.number, m.alone) for one, m in works.all_tasks()]
    assert batches == [(0, True), (1, True)]
    assert [task.private_bytes for one in works.workers.members for task in one.tasks.values()] == [2 * MIB] * 2
    assert works.finish_everything(None) == [0, 1, 2]


def test_a_batch_whose_first_sample_shows_it_to_be_large_starts_over_shared_by_the_workers() -> None:
    works = Works(workers=2, rows=False, row_s=None, limit_bytes=100 * MIB)
    works.offer(2)
    ((worker, fetch),) = works.all_tasks()
    works.guess(worker, fetch.task, 500_000 * MIB)
    room = works.room_of(worker, fetch.task)
    assert room is not None and room.segment == DROP
    works.done(worker, fetch.task, Outcome("dropped"))
    assert works.all_tasks() and not any(message.alone for _, message in works.all_tasks())
    assert works.finish_everything(None) == [0, 1]


def test_samples_that_only_torchs_collate_can_handle_are_not_shared_after_the_first_batch() -> None:
    works = Works(workers=2, batch_rows=2)
    works.offer(3)
    for worker, fetch in works.all_tasks():
        works.done(worker, fetch.task, Outcome("part", 0, [], b"x"))
    ((worker, collate),) = [pair for pair in works.all_tasks() if isinstance(pair[1], Collate)]
    works.done(worker, collate.task, Outcome("inline", pickled=b""))
    while any(not message.alone for _, message in works.all_tasks()):
        works.do(*next(pair for pair in works.all_tasks() if not pair[1].alone), None)
    assert works.finish_everything(None) == [0, 1, 2]
    works.offer(2)
    assert works.all_tasks() and all(message.alone for _, message in works.all_tasks())
    # Samples that can be written in place again are shared again.
    template = image(4)
    assert works.finish_everything(template) == [3, 4]
    works.offer(1)
    assert [message.alone for _, message in works.all_tasks()] == [False, False]


def test_parts_are_collated_by_one_worker_and_then_released() -> None:
    works = Works(workers=2, rows=False, batch_rows=2, whole_share=0)
    works.admission.shapes.note_size(MIB)
    works.offer(1)
    for worker, fetch in works.all_tasks():
        works.need(worker, fetch.task, MIB)
        room = works.room_of(worker, fetch.task)
        assert room is not None
        works.done(worker, fetch.task, Outcome("part", 0, [], b"x", [(0, MIB)], room.segment, MIB))
    ((worker, collate),) = works.all_tasks()
    assert isinstance(collate, Collate)
    assert [part.pickled for part in collate.parts] == [b"x", b"x"]
    assert all(works.peer(worker.worker_id).has_attached(part.extra_segment) for part in collate.parts)
    works.need(worker, collate.task, 2 * MIB)
    room = works.room_of(worker, collate.task)
    assert room is not None
    works.done(worker, collate.task, Outcome("object", pickled=b"y", segment=room.segment, used_bytes=2 * MIB))
    batch = works.settlement.take_ready()
    assert batch is not None and list(batch.extra) == [room.segment]
    assert works.arena.in_use_bytes == 2 * MIB


def test_the_error_of_the_lowest_row_is_delivered_once_all_rows_have_come_to_rest() -> None:
    works = Works(workers=2, batch_rows=2)
    works.offer(1)
    (first_worker, first), (second_worker, second) = works.all_tasks()
    works.done(second_worker, second.task, Outcome("error"), error="second")
    assert works.settlement.take_ready() is None
    works.done(first_worker, first.task, Outcome("error"), error="first")
    batch = works.settlement.take_ready()
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
    for (worker, fetch), (need_bytes, template) in zip(pairs, needs, strict=True):
        works.need(worker, fetch.task, need_bytes, template)
    given = [works.room_of(worker, fetch.task) for worker, fetch in pairs]
    assert all(room is not None for room in given)
    assert given[0].template == given[1].template  # type: ignore[union-attr]


def test_rows_without_bytes_keep_their_layout_when_the_batch_is_laid_out_anew() -> None:
    empty, filled = learn(torch.empty(0)), learn(torch.ones(3))
    assert empty is not None and filled is not None
    works = Works(workers=2, batch_rows=2)
    works.offer(1)
    (one, first), (other, second) = works.all_tasks()
    filled_bytes = layout_of(filled, 2).total_bytes
    works.need(one, first.task, 0, empty)
    works.need(other, second.task, filled_bytes, filled)
    works.done(one, first.task, Outcome("rows", 1))
    # Its sample does not match the layout of the first row, so it asks again.
    works.need(other, second.task, filled_bytes, filled)
    room = works.room_of(other, second.task)
    assert room is not None
    works.done(other, second.task, Outcome("rows", 1, segment=room.segment, rows_segment=room.segment))
    ((_, collate),) = works.all_tasks()
    assert isinstance(collate, Collate)
    assert [part.template for part in collate.parts] == [empty, filled]


def test_an_idle_loader_releases_everything_and_starts_again() -> None:
    works = Works(workers=2)
    template = image(64)
    works.offer(4)
    for _ in range(12):
        works.do(*works.all_tasks()[0], template)
    works.dispatcher.release_idle()
    while works.all_tasks():
        worker, message = works.all_tasks()[0]
        works.rows_done(worker, message)
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
        most = max(most, len(works.admission.open))
        tasks = works.all_tasks()
        if not tasks:
            break
        works.do(*tasks[0], template)
        while (batch := works.settlement.take_ready()) is not None:
            works.admission.release(batch)
            works.dispatcher.progress()
    assert most <= 2
    assert not works.admission.open and not works.admission.upcoming


def test_an_error_of_the_sampler_is_delivered_in_its_turn() -> None:
    works = Works(workers=1)
    works.offer(1)
    failure = SamplerFailure(ValueError("sampler"))
    works.admission.upcoming.append(Batch(1, None, 1, None, failure=weakref.ref(failure)))
    template = image(4)
    came = []
    while works.all_tasks():
        works.do(*works.all_tasks()[0], template)
    while (batch := works.settlement.take_ready()) is not None:
        came.append((batch.number, batch.failure and batch.failure()))
        works.admission.release(batch)
        works.dispatcher.progress()
    assert came == [(0, None), (1, failure)]


def test_a_request_for_the_due_batch_does_not_wait_for_an_evicted_batch_queued_behind_it() -> None:
    """The only task of the later batch is behind the need on the same worker: neither would ever be done."""
    works = Works(workers=1, rows=False, limit_bytes=10 * MIB, row_s=0.001, batch_rows=8, depth=2, whole_share=0)
    works.admission.shapes.note_size(64 * KIB)
    works.offer(2)
    tasks = works.all_tasks()
    assert [worker.tasks[message.task].batch.number for worker, message in tasks] == [0, 0, 1, 1][: len(tasks)]
    later = works.admission.open[1]
    segment = works.arena.take(8 * MIB)
    assert segment is not None
    later.extra[segment.number] = segment
    worker, first = tasks[0]
    with pytest.warns(RuntimeWarning, match="pass one at a time"):
        works.make_wait(worker, first.task, 5 * MIB)
        works.dispatcher.progress()
        works.admission.notices.give()
    answer = works.room_of(worker, first.task)
    assert answer is not None and answer.segment >= 0
    assert later.evicted
