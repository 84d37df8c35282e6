"""Workers, depth and memory change in the middle of an epoch: nothing is lost, repeated or reordered."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.loader.gauges import workers_now
from penstock.loader.rules import LoaderRules
from support.datasets.faulty import Noisy, Ragged, Stream, WithPid, joined, listed, plain
from support.faults import processes
from support.faults.leaks import no_leaks  # noqa: F401  (a fixture for every test here)

MIB = 1 << 20

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


def segments_here() -> set[int]:
    """The inode numbers of all memfds that this process has open: two segments never share one."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:penstock" in str(entry.readlink()):
                found.add(entry.stat().st_ino)
    return found


def make(dataset: Any, workers: int, **more: Any) -> penstock.DataLoader[Any]:
    chosen = {"batch_size": 8, "shuffle": True, **more}
    if not workers:
        chosen.pop("multiprocessing_context", None)
    return penstock.DataLoader(dataset, num_workers=workers, generator=torch.Generator().manual_seed(5), **chosen)


def oracle(dataset: Any, **more: Any) -> list[Any]:
    dataset = copy.copy(dataset)
    dataset.sample_s = 0.0
    return [plain(batch) for batch in make(dataset, 0, **more)]


def makers(batch: Any) -> set[int]:
    return set(batch["pid"].tolist())


STEPS = [4, 2, 0, 3]


@pytest.mark.parametrize("by", ["resize", "assignment"])
def test_changing_to_1_4_2_0_and_3_workers_keeps_the_batches_and_takes_effect_within_two(by: str) -> None:
    dataset = WithPid(800, sample_s=0.004)
    loader = make(dataset, 1)
    iterator = iter(loader)
    came: list[Any] = []
    late: dict[int, float] = {}
    for _ in range(6):
        came.append(plain(next(iterator)))
    for step in STEPS:
        if by == "resize":
            loader.resize(workers=step)
        else:
            loader.num_workers = step
        for _ in range(2):
            came.append(plain(next(iterator)))
        # Those that leave may still be on their way out of the interpreter.
        late[step] = processes.until(lambda step=step: len(processes.workers()) == step)
        assert loader.num_workers == loader.stats().workers == step
        batches = [next(iterator) for _ in range(8)]
        came += [plain(batch) for batch in batches]
        batch = batches[-1]
        if step == 0:
            assert makers(batch) == {os.getpid()}
        else:
            assert makers(batch) <= set(processes.workers())
    came += [plain(batch) for batch in iterator]
    print({step: f"{s * 1e3:.0f} ms after the second batch" for step, s in late.items()})
    loader.close()
    assert came == oracle(dataset)


def test_new_workers_take_part_within_two_batches_of_those_ahead() -> None:
    dataset = WithPid(800, sample_s=0.01)
    loader = make(dataset, 1)
    iterator = iter(loader)
    (old,) = set[int]().union(*(makers(next(iterator)) for _ in range(5)))
    loader.resize(workers=4)
    ahead = loader.stats().depth
    seen = [makers(next(iterator)) for _ in range(ahead + 2)]
    first = next(number for number, pids in enumerate(seen, 1) if pids - {old})
    print(f"first rows by a new worker in batch {first} after the change, {ahead} were ahead")
    assert first <= ahead + 2
    loader.close()


@pytest.mark.parametrize(("kind", "collate"), [(Noisy, None), (Noisy, listed), (Ragged, listed), (Ragged, joined)])
@pytest.mark.parametrize("seed", range(2))
def test_changing_settings_at_any_time_does_not_change_the_batches(kind: type[Noisy], collate: Any, seed: int) -> None:
    dataset = kind(320, values=500)
    chance = random.Random(seed)
    loader = make(dataset, 2, collate_fn=collate)
    came = []
    for batch in loader:
        came.append(plain(batch))
        change = chance.randrange(6)
        if change == 0:
            loader.resize(workers=chance.randrange(5))
        elif change == 1:
            loader.resize(depth=chance.randrange(1, 6))
        elif change == 2:
            loader.set_memory(chance.choice([30, 60, 120, 400]) * MIB)
        elif change == 3:
            loader.prefetch_factor = chance.randrange(1, 5)
        elif change == 4 and (living := processes.workers()):
            processes.kill(chance.choice(living))
    loader.close()
    assert came == oracle(dataset, collate_fn=collate)


@pytest.mark.parametrize(("why", "method"), [("resize", "spawn"), ("death", "spawn")])
def test_next_never_waits_for_a_starting_worker(why: str, method: str) -> None:
    """The dataset's pickle is far larger than a pipe: batches come before a spawned worker has read it."""
    dataset = Noisy(400, sample_s=0.005)
    dataset.ballast = bytes(4 * MIB)  # type: ignore[attr-defined]
    loader = make(dataset, 2, multiprocessing_context=method)
    iterator = iter(loader)
    came = [plain(next(iterator)) for _ in range(5)]
    processes.until(lambda: all(worker.doing != "starting" for worker in workers_now(loader)))
    before = {worker.pid for worker in workers_now(loader)}
    if why == "resize":
        loader.resize(workers=3)
    else:
        processes.kill(processes.workers()[0])
    while_starting = 0
    for _ in range(30):
        came.append(plain(next(iterator)))
        up = {worker.pid for worker in workers_now(loader) if worker.doing != "starting"}
        while_starting += up <= before
    came += [plain(batch) for batch in iterator]
    loader.close()
    assert came == oracle(dataset)
    assert while_starting >= 10, "next() waited until the new worker had started"


def test_memory_halved_in_the_middle_gives_the_same_batches_and_holds_within_two() -> None:
    dataset = Noisy(320, values=1 << 17)
    # No generator of the user's: with one, indices are drawn no further ahead than torch would.
    torch.manual_seed(3)
    loader = penstock.DataLoader(dataset, batch_size=8, shuffle=True, num_workers=3, memory=240 * MIB)
    loader.resize(depth=16)
    iterator = iter(loader)
    came = []
    for _ in range(20):
        came.append(plain(next(iterator)[:, :8]))
    processes.until(lambda: loader.stats().in_flight_bytes > 110 * MIB)
    full = loader.stats()
    loader.set_memory(120 * MIB)
    for _ in range(2):
        came.append(plain(next(iterator)[:, :8]))
    now = loader.stats()
    print(f"in flight {full.in_flight_bytes >> 20} MiB, two batches after halving {now.in_flight_bytes >> 20} MiB")
    assert full.in_flight_bytes + full.workers_private_bytes > 120 * MIB
    assert now.memory_bytes == 120 * MIB
    assert now.in_flight_bytes + now.workers_private_bytes <= 120 * MIB
    for batch in iterator:
        came.append(plain(batch[:, :8]))
        now = loader.stats()
        assert now.in_flight_bytes + now.workers_private_bytes <= 120 * MIB
        del batch
    loader.close()
    torch.manual_seed(3)
    assert came == [plain(batch[:, :8]) for batch in penstock.DataLoader(dataset, batch_size=8, shuffle=True)]


def test_killing_a_worker_that_is_leaving_does_not_change_the_batches() -> None:
    dataset = Noisy(400, sample_s=0.003)
    loader = make(dataset, 4)
    iterator = iter(loader)
    came = []
    for _ in range(5):
        came.append(plain(next(iterator)))
        loader.resize(workers=1)
        for pid in processes.workers():
            processes.kill(pid)
        came.append(plain(next(iterator)))
        loader.resize(workers=4)
    came += [plain(batch) for batch in iterator]
    loader.close()
    assert came == oracle(dataset)


def test_a_stopped_worker_that_is_leaving_does_not_delay_the_others() -> None:
    dataset = Noisy(400, sample_s=0.003)
    loader = make(dataset, 2)
    iterator = iter(loader)
    came = [plain(next(iterator)) for _ in range(5)]
    victim = max(processes.workers())
    with processes.stopped(victim):
        loader.resize(workers=1)
        time.sleep(0.2)
    came += [plain(batch) for batch in iterator]
    loader.close()
    assert came == oracle(dataset)


class LongAway(Noisy):
    """Sample 1 takes a minute anywhere but at home."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.home = os.getpid()

    def __getitem__(self, index: int) -> Any:
        if index == 1 and os.getpid() != self.home:
            time.sleep(60)
        return super().__getitem__(index)


def test_after_a_change_to_zero_workers_the_trainer_fetches_the_due_batch_of_a_killed_one() -> None:
    """The batch behind it is ready already, and must not be in the way."""
    dataset = LongAway(12)
    loader = make(dataset, 2, batch_size=1, shuffle=False, timeout=10)
    iterator = iter(loader)
    came = [plain(next(iterator))]
    processes.until(lambda: iterator.engine.gauges().ready > 0)
    loader.resize(workers=0)
    for pid in processes.workers():
        processes.kill(pid)
    came += [plain(batch) for batch in iterator]
    loader.close()
    assert came == oracle(dataset, batch_size=1, shuffle=False)


@pytest.mark.parametrize("seeding", ["batch", "worker"])
def test_workers_with_batches_of_their_own_change_when_the_next_epoch_begins(seeding: str) -> None:
    """Iterable datasets and torch's own seeding: this epoch goes on as it began, the next has the new number."""
    dataset: Any = Stream(240) if seeding == "batch" else Noisy(240)
    more: dict[str, Any] = {"batch_size": 8, "seeding": seeding}
    torch.manual_seed(1)
    expected = [[plain(b) for b in penstock.DataLoader(dataset, num_workers=n, **more)] for n in (2, 3)]
    for persistent in (False, True):
        torch.manual_seed(1)
        loader = penstock.DataLoader(dataset, num_workers=2, persistent_workers=persistent, **more)
        came = []
        for number, batch in enumerate(loader):
            came.append(plain(batch))
            if number == 5:
                loader.resize(workers=3)
        assert came == expected[0]
        second = [plain(b) for b in loader]
        loader.close()
        if not persistent or seeding == "batch":
            assert second == expected[1]


def test_memory_stays_between_epochs_and_is_released_when_the_loader_is_idle_for_longer() -> None:
    with penstock.DataLoader(Noisy(64, values=1 << 17), batch_size=8, num_workers=2, persistent_workers=True) as loader:
        loader._rules = LoaderRules(epoch_end_release_s=3.0)
        assert sum(1 for _ in loader) == 8
        kept = segments_here()
        assert kept and loader.stats().in_flight_bytes > 0
        assert sum(1 for _ in loader) == 8
        assert kept & segments_here(), "the second epoch made all its segments anew"
        processes.until(lambda: loader.stats().in_flight_bytes == 0, 20)
        assert sum(1 for _ in loader) == 8


class Counted(Noisy):
    """Counts, in memory that workers share, how often a sample is read."""

    def __init__(self, count: int) -> None:
        super().__init__(count, values=1 << 15)
        self.read = torch.zeros(count, dtype=torch.int64).share_memory_()

    def __getitem__(self, index: int) -> Any:
        self.read[index] += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("is_short_of_memory", [False, True])
def test_a_long_step_loses_no_batch_that_is_ready_unless_memory_is_short(
    is_short_of_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Counted(64)
    with penstock.DataLoader(dataset, batch_size=8, num_workers=2) as loader:
        loader._rules = LoaderRules(idle_release_s=0.2)
        batches: Any = iter(loader)
        arena = batches.engine._arena
        released: list[int] = []
        close_free = arena.close_free
        monkeypatch.setattr(arena, "close_free", lambda: (close_free(), released.append(0)))
        headroom = arena._headroom_bytes
        came = [plain(next(batches))]

        def most_ready() -> int:
            return min(loader.stats().depth, 7)

        processes.until(lambda: batches.engine.gauges().ready == most_ready(), 60)
        if is_short_of_memory:
            arena._headroom_bytes = lambda: 0
        released.clear()
        processes.until(lambda: bool(released), 60)
        assert batches.engine.gauges().ready == (0 if is_short_of_memory else most_ready())
        arena._headroom_bytes = headroom
        came += [plain(batch) for batch in batches]
    assert len(came) == 8
    assert dataset.read.max() == (2 if is_short_of_memory else 1)
