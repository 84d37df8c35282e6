"""torch's DataLoader, played through: every worker builds whole batches of its own.

In:  a ``Load``, a prefetch factor.
Out: an ``Outcome``.
Runs in: anywhere; pure.

A worker holds the samples of its batch until they are collated, into shared memory, where the batch stays until the
training loop has taken the next one. Samples that a collate function keeps apart are sent beside the worker's next
batch. What samples took stays with the worker's heap, unless they are so large that each is mapped on its own. Each
worker may have ``prefetch_factor`` batches asked of it; how many of them are there depends on who is slower.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from penstock.planner.simulate.cores import Activity, Compute, Cores, Until, Wait
from penstock.planner.simulate.pipeline import PIECES, Gauge, Load, Outcome, Stream, Trainer, fetch

HEAP_BYTES = 32 << 20
"""malloc maps what is larger than this on its own, and gives it back at once; the rest stays in the heap."""
_UNEVEN = 0.5
"""By how much the time to collate and send a batch differs from one to the next: workers that are early wait for the
one whose turn it is."""


def play_torch(load: Load, prefetch_factor: int = 2, *, batches: int | None = None) -> Outcome:
    """``batches``: after how many; None: after long."""
    cost = load.profile.torchs
    cores = Cores(load.cores, crowding=cost.crowding)
    if not load.workers:
        return _alone(load)
    gauge, stream, chance = Gauge(), Stream(load), random.Random(0)
    # Workers that began together end together.
    trainer = Trainer(load, cost, cores, ahead=load.workers * prefetch_factor, at_a_time=load.workers)
    asked: list[deque[int]] = [deque() for _ in range(load.workers)]
    sizes: dict[int, float] = {}
    ready: set[int] = set()
    rows_a_piece = -(-load.batch_size // PIECES)
    stays = load.profile.largest_bytes <= HEAP_BYTES

    def take(number: int) -> None:
        ahead = number + load.workers * prefetch_factor
        asked[ahead % load.workers].append(ahead)
        if number:
            gauge.add(batches=-sizes.pop(number - 1))

    def work(worker: int) -> Activity:
        heap = _Heap(lambda size_bytes: gauge.add(private=size_bytes), stays=stays)
        gauge.add(private=cost.worker_bytes)
        to_send: deque[tuple[int, int]] = deque()

        def send() -> Activity:
            while True:
                yield Until(lambda: bool(to_send))
                yield from finish(*to_send[0])
                to_send.popleft()

        def finish(number: int, held_bytes: int) -> Activity:
            sizes[number] = held_bytes * cost.copies
            gauge.add(batches=sizes[number])
            yield Compute(cost.batch_s * chance.uniform(1 - _UNEVEN, 1 + _UNEVEN))
            heap.free(held_bytes)
            ready.add(number)

        if not load.profile.is_collated:
            cores.begin(send())
        while True:
            yield Until(lambda: bool(asked[worker]))
            number = asked[worker].popleft()
            held_bytes = 0
            for piece in stream.batch(rows_a_piece):
                yield from fetch(piece, cost)
                held_bytes += piece.size_bytes
                heap.take(piece.size_bytes)
            if load.profile.is_collated:
                yield from finish(number, held_bytes)
            else:
                to_send.append((number, held_bytes))

    def start() -> Activity:
        for worker in range(load.workers):
            yield Wait(cost.start_s)
            asked[worker].extend(range(worker, load.workers * prefetch_factor, load.workers))
            cores.begin(work(worker))
        yield from trainer.steps(ready.__contains__, take)

    cores.begin(start())
    cores.run(lambda: trainer.is_done)
    each = cost.creep_batches
    if batches is not None:
        each = min(each, batches / load.workers + prefetch_factor)
    gauge.add_for_good(private=load.workers * each * cost.creep_bytes)
    return trainer.outcome(gauge)


def _alone(load: Load) -> Outcome:
    """No workers: the training loop loads for itself, and a batch exists twice while it is collated."""
    cost, cores = load.profile.torchs, Cores(load.cores)
    gauge, stream = Gauge(), Stream(load)
    trainer = Trainer(load, cost, cores, ahead=0)
    sizes: dict[int, float] = {}
    fetched: set[int] = set()

    def take(number: int) -> None:
        if number:
            gauge.add(batches=-sizes.pop(number - 1))

    def steps() -> Activity:
        for step in trainer.steps(fetched.__contains__, take):
            if isinstance(step, Until):
                number = len(fetched)
                held_bytes = 0
                for piece in stream.batch(load.batch_size):
                    yield from fetch(piece, cost)
                    held_bytes += piece.size_bytes
                gauge.add(private=held_bytes)
                sizes[number] = held_bytes * cost.copies
                gauge.add(batches=sizes[number])
                yield Compute(cost.batch_s)
                gauge.add(private=-held_bytes)
                fetched.add(number)
            else:
                yield step

    cores.begin(steps())
    cores.run(lambda: trainer.is_done)
    return trainer.outcome(gauge)


class _Heap:
    """What has been freed stays and is used again, if it ``stays``."""

    def __init__(self, add: Callable[[float], None], *, stays: bool) -> None:
        self._add, self._stays = add, stays
        self._used = self._has = 0.0

    def take(self, size_bytes: float) -> None:
        self._used += size_bytes
        if self._used > self._has:
            self._add(self._used - self._has)
            self._has = self._used

    def free(self, size_bytes: float) -> None:
        self._used -= size_bytes
        if not self._stays:
            self._add(self._used - self._has)
            self._has = self._used
