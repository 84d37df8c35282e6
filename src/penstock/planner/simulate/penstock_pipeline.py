"""penstock's DataLoader, played through: workers fill rows of the same few batches.

In:  a ``Load``, a depth and a budget.
Out: an ``Outcome``.
Runs in: anywhere; pure.

Batches lie in segments that are used again for others of about their size; a worker holds the sample it is at. There
are as many batches as the depth and what the training loop holds, or as the budget leaves room for. Samples for a
function of the user's lie apart until it makes a batch of them.
"""

from __future__ import annotations

import math
from collections import deque

from penstock.planner.profile import Profile
from penstock.planner.simulate.arena import Arena, Segment
from penstock.planner.simulate.cores import Activity, Compute, Cores, Until, Wait
from penstock.planner.simulate.pipeline import MOST_LAG, PIECES, Gauge, Load, Outcome, Piece, Stream, Trainer, fetch
from penstock.planner.simulate.torch_pipeline import play_torch

_TASK_S, _QUEUE_S, _PATIENT_S, _MOST_QUEUED = 0.005, 0.006, 0.020, 24
"""The loader's own: shorter work is not cut, tasks shorter than so long are queued on their worker."""
_NEW_BYTES_PER_S = 2e9
"""How fast pages are made, about: until segments have theirs, batches take longer to make, and more of them are being
made at a time than ever after."""
RECENT = 8
"""The loader's own, too: what is made of samples gets as much room as the largest of so many batches before it."""


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
    room = _batches_within(load, memory_bytes)
    is_made, is_apart = profile.has_collate, _is_apart(profile)
    slots = slots_within(load, depth, memory_bytes)
    cores, gauge, stream = Cores(load.cores, crowding=cost.crowding), Gauge(), Stream(load)
    rows = rows_a_task(profile, load.batch_size)
    lag = min(MOST_LAG, load.workers_beyond_cores * cost.lag)
    trainer = Trainer(load, cost, cores, ahead=max(slots, load.workers * rows // load.batch_size))
    todo: deque[tuple[int, Piece]] = deque()
    left: dict[int, int] = {}
    """Pieces of open batches that are not done."""
    ready: set[int] = set()
    in_slot: dict[int, list[Segment]] = {}
    arena = Arena(lambda size_bytes: gauge.add(batches=size_bytes))
    made_bytes: deque[int] = deque([0], maxlen=RECENT)
    """What the latest batches took that a function of the user's made."""
    opened = lent = 0

    def room_for(piece: Piece) -> int:
        return math.ceil(cost.copies * piece.size_bytes)

    def open_next() -> bool:
        nonlocal opened
        # Parts and the batch made of them exist side by side for a moment.
        needed = len(in_slot) + 1 + (len(left) + 1 if is_apart else 0)
        is_full = len(left) + len(ready) >= depth or len(in_slot) >= slots or needed > room
        # The one that is due next is opened whatever there is, if nothing but what is lent is in the way; while two
        # are lent, only into room there is.
        if is_full and (len(in_slot) > lent or len(in_slot) >= max(2, room)):
            return False
        pieces = stream.batch(rows)
        # Samples that go through a function of the user's take memory as they come.
        in_slot[opened] = [] if is_made else [arena.take(sum(map(room_for, pieces)))]
        todo.extend((opened, piece) for piece in pieces)
        left[opened] = len(pieces)
        opened += 1
        return True

    def has_task() -> bool:
        return bool(todo) or open_next()

    def take(number: int) -> None:
        nonlocal lent
        ready.discard(number)
        lent += 1
        if number:
            cores.begin(give_back(number - 1))

    def give_back(number: int) -> Activity:
        """For a moment the training loop has a batch and still holds the one before it."""
        nonlocal lent
        yield Wait(0.0)
        arena.give_back(in_slot.pop(number))
        lent -= 1

    def work() -> Activity:
        gauge.add(private=cost.worker_bytes)
        while True:
            yield Until(has_task)
            number, piece = todo.popleft()
            yield from fetch(piece, cost)
            held_bytes = piece.size_bytes if is_made else piece.largest_bytes
            gauge.add(private=held_bytes)
            if is_apart:
                part = arena.take(room_for(piece))
                in_slot[number].append(part)
                yield Compute(part.new_bytes / _NEW_BYTES_PER_S)
            if is_apart or not is_made:
                gauge.add(private=-held_bytes)
            if lag:
                yield Wait(lag * (piece.wait_s + piece.cpu_s))
            left[number] -= 1
            if not left[number]:
                yield from make(number, held_bytes)
                cores.begin(finish(number))

    def make(number: int, samples_bytes: int) -> Activity:
        """A function of the user's reads samples where they lie, apart or with this worker; what it makes of them is
        its own first, and written to the arena then."""
        if not is_made:
            yield Compute(cost.batch_s)
            return
        parts = in_slot[number]
        batch_bytes = sum(each.used_bytes for each in parts) if is_apart else math.ceil(cost.copies * samples_bytes)
        own_bytes = batch_bytes if profile.is_collated else 0
        gauge.add(private=own_bytes)
        made = arena.take(batch_bytes, room_bytes=max(batch_bytes, *made_bytes))
        in_slot[number] = [made]
        made_bytes.append(batch_bytes)
        yield Compute(cost.batch_s + made.new_bytes / _NEW_BYTES_PER_S)
        arena.give_back(parts)
        gauge.add(private=-own_bytes - (0 if is_apart else samples_bytes))

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


def play_held(load: Load, depth: int) -> Outcome:
    """Held by ``memory=`` to so many batches ahead, where the loader might take more."""
    return play_ours(load, depth, bytes_for(load, depth + 1))


def slots_within(load: Load, depth: int, memory_bytes: int | None) -> int:
    """Batches that may be in the arena at a time: those ahead and the one the training loop holds, if they fit."""
    room = _batches_within(load, memory_bytes) - _is_apart(load.profile)
    return int(max(1, min(depth + 1, room)))


def bytes_for(load: Load, slots: int) -> int:
    """The budget that has room for so many batches and no more."""
    return _workers_bytes(load) + (slots + _is_apart(load.profile)) * _batch_bytes(load)


def _batches_within(load: Load, memory_bytes: int | None) -> float:
    """How many batches a budget has room for."""
    return math.inf if memory_bytes is None else (memory_bytes - _workers_bytes(load)) // _batch_bytes(load)


def _is_apart(profile: Profile) -> bool:
    """Whether samples of one batch come from several workers and are made into a batch by one of them."""
    return profile.has_collate and profile.is_splittable


def _workers_bytes(load: Load) -> int:
    profile = load.profile
    held_bytes = profile.largest_bytes
    if profile.has_collate and not profile.is_splittable:
        # Whole batches of samples, and what is made of them.
        held_bytes = math.ceil((1 + profile.is_collated) * profile.sample_bytes * load.batch_size)
    return load.workers * (profile.ours.worker_bytes + held_bytes)


def _batch_bytes(load: Load) -> int:
    return max(1, math.ceil(load.profile.ours.copies * load.profile.sample_bytes * load.batch_size))
