"""Simulates penstock's DataLoader, whose workers fill rows of the same few batches.

In:  a ``Load``, a depth, the number of batches that there is room for.
Out: a ``Simulation``.
Runs in: anywhere; pure.

Batches lie in segments that are reused for batches of about the same size; a worker holds the sample that it is
loading. The number of batches is the depth plus the batch that the training loop holds, or the number that the budget
has room for. Samples for a user's collate function are stored one by one until the function makes a batch of them.
"""

from __future__ import annotations

import math
from collections import deque

from penstock.planner.profile import Profile
from penstock.planner.simulate.arena import SimulatedArena, SimulatedSegment
from penstock.planner.simulate.cores import Activity, Compute, Cores, Until, Wait
from penstock.planner.simulate.pipeline import (
    Load,
    Piece,
    SimulatedMemory,
    Simulation,
    Stream,
    Trainer,
    fetch,
    simulate_alone,
)

_NEW_BYTES_PER_S = 2e9
"""The approximate rate at which pages are created. Until all segments have pages, batches take longer than later, and
more batches are being filled at the same time."""
_LAG, _MOST_LAG = 0.15, 0.5
"""Two waits for a core, as shares of a sample's own time: the wait with twice as many workers as busy cores, and the
longest wait. The operating system lets some workers wait for one core while another core is idle."""


def simulate_penstock(load: Load, depth: int | None = None, room: float = math.inf) -> Simulation:
    """``depth`` is the number of batches ahead; None for the depth that the loader chooses, which grows. ``room`` is
    the number of batches that the budget has room for."""
    if not load.workers:
        return simulate_alone(load)
    profile, cost, rules = load.profile, load.profile.ours, load.rules
    most_ahead = load.most_ahead(room) if depth is None else 0
    ahead = load.depth_within(room) if depth is None else depth
    is_made, is_apart = profile.has_collate, _is_apart(profile)
    slots = slots_within(load, ahead, room)
    cores, memory, stream = Cores(load.cores), SimulatedMemory(), Stream(load)
    rows, lag = load.rows_per_task, _lag(load)
    trainer = Trainer(load, cost, cores, ahead=max(slots, load.workers * rows // load.batch_size))
    todo: deque[tuple[int, Piece]] = deque()
    left: dict[int, int] = {}
    """Batch -> the number of its pieces that are not done."""
    ready: set[int] = set()
    in_slot: dict[int, list[SimulatedSegment]] = {}
    arena = SimulatedArena(rules, lambda size_bytes: memory.add(batches=size_bytes))
    made_bytes: deque[int] = deque([0], maxlen=rules.recent_batches)
    """The sizes of the latest batches that the user's collate function made."""
    opened = lent = 0

    def room_for(piece: Piece) -> int:
        return math.ceil(cost.copies * piece.size_bytes)

    def open_next() -> bool:
        nonlocal opened, ahead, slots
        waits = trainer.asked is not None and left.get(trainer.asked, 0) > 0
        if waits and len(left) + len(ready) >= ahead and ahead < most_ahead:
            # The training loop waits while a worker has nothing to do, so one more batch ahead helps.
            ahead += 1
            slots = slots_within(load, ahead, room)
        # For a moment, samples and the batch made of them exist at the same time.
        needed = len(in_slot) + 1 + (len(left) + 1 if is_apart else 0)
        is_full = len(left) + len(ready) >= ahead or len(in_slot) >= slots or needed > room
        # The batch that is due next is opened even without room if only lent batches take its room. While two batches
        # are lent, it is opened only if there is room.
        if is_full and (len(in_slot) > lent or len(in_slot) >= max(2, room)):
            return False
        pieces = stream.batch(rows)
        # Samples for a user's collate function take memory only when they are fetched.
        in_slot[opened] = [] if is_made else [arena.take(sum(map(room_for, pieces)))]
        todo.extend((opened, piece) for piece in pieces)
        left[opened] = len(pieces)
        opened += 1
        return True

    def take(number: int) -> None:
        nonlocal lent
        ready.discard(number)
        lent += 1
        if number:
            cores.begin(release(number - 1))

    def release(number: int) -> Activity:
        """Release a batch a moment after the next batch is taken: for that moment the training loop holds both."""
        nonlocal lent
        yield Wait(0.0)
        arena.release(in_slot.pop(number))
        lent -= 1

    def work() -> Activity:
        memory.add(private=cost.worker_bytes)
        while True:
            yield Until(lambda: bool(todo) or open_next())
            number, piece = todo.popleft()
            yield from fetch(piece, cost)
            held_bytes = piece.size_bytes if is_made else piece.largest_bytes
            memory.add(private=held_bytes)
            if is_apart:
                part = arena.take(room_for(piece))
                in_slot[number].append(part)
                yield Compute(part.new_bytes / _NEW_BYTES_PER_S)
            if is_apart or not is_made:
                memory.add(private=-held_bytes)
            if lag:
                yield Wait(lag * (piece.wait_s + piece.cpu_s))
            left[number] -= 1
            if not left[number]:
                yield from make(number, held_bytes)
                cores.begin(finish(number))

    def make(number: int, samples_bytes: int) -> Activity:
        """Make a batch with the user's collate function. The function reads samples in place; its result is first in
        private memory and is then written to the arena."""
        if not is_made:
            yield Compute(cost.batch_s)
            return
        parts = in_slot[number]
        batch_bytes = sum(each.used_bytes for each in parts) if is_apart else math.ceil(cost.copies * samples_bytes)
        own_bytes = batch_bytes if profile.is_collated else 0
        memory.add(private=own_bytes)
        made = arena.take(batch_bytes, room_bytes=max(batch_bytes, *made_bytes))
        in_slot[number] = [made]
        made_bytes.append(batch_bytes)
        yield Compute(cost.batch_s + made.new_bytes / _NEW_BYTES_PER_S)
        arena.release(parts)
        memory.add(private=-own_bytes - (0 if is_apart else samples_bytes))

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
    return trainer.result(memory)


def simulate_held(load: Load, depth: int) -> Simulation:
    """Simulate a loader that ``memory=`` limits to ``depth`` batches ahead, although it would prepare more."""
    return simulate_penstock(load, depth, depth + 1 + _is_apart(load.profile))


def slots_within(load: Load, depth: int, room: float) -> int:
    """The number of batches that may be in the arena at a time: the batches ahead and the one that the training loop
    holds, if all fit."""
    return int(max(1, min(load.rules.slots(depth), room - _is_apart(load.profile))))


def batches_within(load: Load, memory_bytes: int) -> int:
    """The number of batches that a budget has room for."""
    profile = load.profile
    held_bytes = profile.largest_bytes
    if profile.has_collate and not profile.is_splittable:
        # A worker holds all samples of a batch, and also the batch that is made of them.
        held_bytes = math.ceil((1 + profile.is_collated) * load.batch_bytes)
    workers_bytes = load.workers * (profile.ours.worker_bytes + held_bytes)
    left_bytes = memory_bytes - load.rules.own_bytes(memory_bytes) - workers_bytes
    return left_bytes // max(1, math.ceil(profile.ours.copies * load.batch_bytes))


def _is_apart(profile: Profile) -> bool:
    """Whether the samples of one batch come from several workers, one of which makes the batch."""
    return profile.has_collate and profile.is_splittable


def _lag(load: Load) -> float:
    """How long a worker waits for a core, as a share of a sample's own time. The wait is 0 while each worker has a
    core, and it grows with the workers per core and with how busy the cores are."""
    cores = max(1.0, load.cores)
    busy = min(1.0, load.workers * (load.profile.cpu_s + load.profile.ours.sample_s) / (cores * load.row_s))
    return max(0.0, min(_MOST_LAG, _LAG * (load.workers / cores - 1) * busy))
