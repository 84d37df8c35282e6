"""Simulates torch's DataLoader, in which every worker builds whole batches of its own.

In:  a ``Load``, a prefetch factor.
Out: a ``Simulation``.
Runs in: anywhere; pure.

A worker holds the samples of its batch until they are collated into shared memory, where the batch stays until the
training loop has taken the next batch. If the collate function returns the samples as a list, the worker sends them
while it builds its next batch. The worker's heap keeps the memory of freed samples, unless samples are so large that
each has its own mapping. A worker has at most ``prefetch_factor`` batches to build; how many of them exist depends on
whether the workers or the training loop are slower.
"""

from __future__ import annotations

import random
from collections import deque

from penstock.planner.profile import Profile
from penstock.planner.simulate.cores import Activity, Compute, Cores, Until, Wait
from penstock.planner.simulate.pipeline import (
    Load,
    SimulatedMemory,
    Simulation,
    Stream,
    Trainer,
    fetch,
    simulate_alone,
)

_HEAP_BYTES = 32 << 20
"""The largest allocation that stays in the heap. malloc creates a separate mapping for a larger allocation and releases
the mapping when it is freed."""
_UNEVEN = 0.5
"""The share by which the time to collate and send a batch varies. A worker that is early waits for its turn."""
_CROWDING = 0.15
"""The share by which work takes longer while more activities compute than there are cores. Measured with 6 workers on 2
cores, it was 0 to 0.32, and largest for large samples that are copied."""
_CREEP, _CREEP_FROM_BYTES = 0.7, 200_000
"""The growth of a heap with every batch, as a share of a sample, and the least sample size for which heaps grow. Freed
samples leave a hole into which the samples of the next batch do not quite fit, so one of these samples is placed at the
end of the heap. In runs with samples of 0.2 to 8 MiB heaps grew by a half to one sample. With some sizes (0.3 and 1.5
MB) heaps do not grow, which no short run shows reliably, because heap growth also depends on the heap that workers
inherit."""


def simulate_torch(load: Load, prefetch_factor: int = 2, *, batches: int | None = None) -> Simulation:
    """``batches`` is the length of the run in which heaps grow; None for a run that is long enough for heaps to stop
    growing."""
    if not load.workers:
        return simulate_alone(load)
    profile, cost = load.profile, load.profile.torchs
    cores = Cores(load.cores, crowding=_CROWDING)
    memory, stream, chance = SimulatedMemory(), Stream(load), random.Random(0)
    # Workers that start at the same time finish their batches at the same time.
    trainer = Trainer(load, cost, cores, ahead=load.workers * prefetch_factor, at_a_time=load.workers)
    asked: list[deque[int]] = [deque() for _ in range(load.workers)]
    sizes: dict[int, float] = {}
    ready: set[int] = set()
    rows_per_piece = load.rules.stretch_rows(load.batch_size)
    built = cost.creep_batches if batches is None else min(cost.creep_batches, batches / load.workers + prefetch_factor)
    own_bytes = cost.worker_bytes + built * creep_bytes(profile)

    def take(number: int) -> None:
        ahead = number + load.workers * prefetch_factor
        asked[ahead % load.workers].append(ahead)
        if number:
            memory.add(batches=-sizes.pop(number - 1))

    def work(worker: int) -> Activity:
        memory.add(private=own_bytes)
        heap = _Heap(memory, keeps=profile.largest_bytes <= _HEAP_BYTES)
        to_send: deque[tuple[int, int]] = deque()

        def send() -> Activity:
            while True:
                yield Until(lambda: bool(to_send))
                yield from finish(*to_send[0])
                to_send.popleft()

        def finish(number: int, held_bytes: int) -> Activity:
            sizes[number] = held_bytes * cost.copies
            memory.add(batches=sizes[number])
            yield Compute(cost.batch_s * chance.uniform(1 - _UNEVEN, 1 + _UNEVEN))
            heap.free(held_bytes)
            ready.add(number)

        if not profile.is_collated:
            cores.begin(send())
        while True:
            yield Until(lambda: bool(asked[worker]))
            number = asked[worker].popleft()
            held_bytes = 0
            for piece in stream.batch(rows_per_piece):
                yield from fetch(piece, cost)
                held_bytes += piece.size_bytes
                heap.take(piece.size_bytes)
            if profile.is_collated:
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
    return trainer.result(memory)


def creep_bytes(profile: Profile) -> float:
    """The growth of a worker's heap with every batch, until it stops growing."""
    creeps = profile.sample_bytes >= _CREEP_FROM_BYTES and profile.largest_bytes <= _HEAP_BYTES
    return _CREEP * profile.sample_bytes if creeps else 0.0


class _Heap:
    """The memory of samples. If the heap ``keeps`` freed memory, this memory stays for reuse."""

    def __init__(self, memory: SimulatedMemory, *, keeps: bool) -> None:
        self._memory, self._keeps = memory, keeps
        self._used = self._has = 0.0

    def take(self, size_bytes: float) -> None:
        self._used += size_bytes
        if self._used > self._has:
            self._memory.add(private=self._used - self._has)
            self._has = self._used

    def free(self, size_bytes: float) -> None:
        self._used -= size_bytes
        if not self._keeps:
            self._memory.add(private=self._used - self._has)
            self._has = self._used
