"""penstock's DataLoader, played through: workers fill rows of the same few batches.

In:  a ``Load``, a depth and a budget.
Out: an ``Outcome``.
Runs in: anywhere; pure.

Batches lie in slots that are used again and not given back between batches; a worker holds the sample it is at. Slots
are as many as the depth and what the training loop holds, or as the budget leaves room for.
"""

from __future__ import annotations

import math
from collections import deque

from penstock.planner.cores import Activity, Compute, Cores, Until, Wait
from penstock.planner.pipeline import PIECES, Gauge, Kept, Load, Outcome, Piece, Stream, Trainer, fetch
from penstock.planner.profile import Profile
from penstock.planner.torch_pipeline import play_torch

_TASK_S, _QUEUE_S, _PATIENT_S, _MOST_QUEUED = 0.005, 0.006, 0.020, 24
"""The loader's own: shorter work is not cut, tasks shorter than so long are queued on their worker."""


def rows_a_task(profile: Profile, batch_size: int) -> int:
    """How many rows of a batch one worker gets at a time."""
    stretch = -(-batch_size // PIECES)
    row_s = max(profile.wait_s + profile.cpu_s + profile.ours.sample_s, 1e-9)
    if not profile.is_splittable or row_s * batch_size < _TASK_S:
        return batch_size
    return min(batch_size, stretch * math.ceil(_TASK_S / (row_s * stretch)))


def usual_depth(profile: Profile, batch_size: int, workers: int) -> int:
    """Batches ahead where nobody has said: the least that keeps all workers busy."""
    rows = rows_a_task(profile, batch_size)
    task_s = max((profile.wait_s + profile.cpu_s + profile.ours.sample_s) * rows, 1e-6)
    queued = 1 if task_s >= _PATIENT_S else min(_MOST_QUEUED, max(2, 1 + math.ceil(_QUEUE_S / task_s)))
    return max(2, math.ceil(workers * queued / math.ceil(batch_size / rows)) + 1)


def play_ours(load: Load, depth: int | None = None, memory_bytes: int | None = None) -> Outcome:
    profile, cost = load.profile, load.profile.ours
    if not load.workers:
        return play_torch(load)
    depth = usual_depth(profile, load.batch_size, load.workers) if depth is None else depth
    slots = slots_within(load, depth, memory_bytes)
    cores, gauge, stream = Cores(load.cores, crowding=cost.crowding), Gauge(), Stream(load)
    rows = rows_a_task(profile, load.batch_size)
    trainer = Trainer(load, cost, cores, ahead=max(slots, load.workers * rows // load.batch_size))
    todo: deque[tuple[int, Piece]] = deque()
    left: dict[int, int] = {}
    """Pieces of open batches that are not done."""
    ready: set[int] = set()
    free_bytes: list[float] = []
    """Slots that lie unused."""
    in_slot: dict[int, float] = {}
    apart = Kept(lambda size_bytes: gauge.add(batches=size_bytes))
    """Samples, and batches made of them, in pieces that fit anywhere."""
    opened = lent = 0

    def room_for(piece: Piece) -> float:
        return cost.copies * piece.size_bytes

    def let_go(size_bytes: float) -> None:
        if profile.has_collate:
            apart.free(size_bytes)
        else:
            free_bytes.append(size_bytes)

    def find_slot(need_bytes: float) -> float:
        fitting = [each for each in free_bytes if each >= need_bytes]
        if fitting:
            free_bytes.remove(min(fitting))
            return min(fitting)
        if free_bytes:
            # A slot that is too small is given back for one that is not.
            smallest = min(free_bytes)
            free_bytes.remove(smallest)
            gauge.add(batches=-smallest)
        gauge.add(batches=need_bytes)
        return need_bytes

    def open_next() -> bool:
        nonlocal opened
        is_full = len(left) + len(ready) >= depth or len(in_slot) >= slots
        # The one that is due next is opened whatever there is, if nothing but what is lent is in the way.
        if is_full and (len(in_slot) > lent or (in_slot and min(in_slot) < opened - 1)):
            return False
        pieces = stream.batch(rows)
        # Samples that go through a function of the user's take memory as they come.
        in_slot[opened] = 0.0 if profile.has_collate else find_slot(sum(map(room_for, pieces)))
        todo.extend((opened, piece) for piece in pieces)
        left[opened] = len(pieces)
        opened += 1
        return True

    def has_task() -> bool:
        return bool(todo) or open_next()

    def take(number: int) -> None:
        nonlocal lent
        ready.discard(number)
        if number:
            let_go(in_slot.pop(number - 1))
        lent = 1

    def work() -> Activity:
        gauge.add(private=cost.worker_bytes)
        while True:
            yield Until(has_task)
            number, piece = todo.popleft()
            yield from fetch(piece, cost)
            gauge.add(private=piece.largest_bytes)
            gauge.add(private=-piece.largest_bytes)
            if profile.has_collate:
                apart.take(room_for(piece))
                in_slot[number] += room_for(piece)
            left[number] -= 1
            if not left[number]:
                yield from collate(number)
                cores.begin(finish(number))

    def collate(number: int) -> Activity:
        """A function of the user's reads samples where they lie, and the batch is written beside them."""
        samples_bytes = in_slot[number]
        if profile.has_collate:
            apart.take(samples_bytes)
        yield Compute(cost.batch_s)
        if profile.has_collate:
            apart.free(samples_bytes)

    def finish(number: int) -> Activity:
        yield Compute(cost.beside_s)
        del left[number]
        ready.add(number)

    def start() -> Activity:
        for _ in range(load.workers):
            yield Wait(cost.start_s)
            cores.begin(work())

    cores.begin(start())
    cores.begin(trainer.steps(ready.__contains__, take))
    cores.run(lambda: trainer.is_done)
    return trainer.outcome(gauge)


def slots_within(load: Load, depth: int, memory_bytes: int | None) -> int:
    """Batches that may be in the arena at a time: those ahead and the one the training loop holds, if they fit."""
    wanted = depth + 1
    if memory_bytes is None:
        return wanted
    profile, cost = load.profile, load.profile.ours
    left_bytes = memory_bytes - load.workers * (cost.worker_bytes + profile.largest_bytes)
    batch_bytes = max(1.0, cost.copies * profile.sample_bytes * load.batch_size)
    # A function of the user's has one batch's samples beside the batches.
    return max(1, min(wanted, int(left_bytes // batch_bytes) - profile.has_collate))
