"""Workers are killed, stopped and cut off in every way there is; the batches that come are the oracle's all the same.

The oracle is the loader without workers. Full counts run under the ``soak`` marker.
"""

from __future__ import annotations

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
from support.datasets.faulty import Deadly, DeadlyStream, Leaving, Noisy, Ragged, Sitting, Stream, joined, listed, plain
from support.faults import connections, processes
from support.faults.leaks import no_leaks  # noqa: F401  (a fixture for every test here)
from support.faults.points import POINTS, Fault, Faulty, injected
from support.faults.triggers import Trigger

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


def make(dataset: Any, workers: int, **more: Any) -> penstock.DataLoader[Any]:
    chosen = {"batch_size": 4, "shuffle": True, **more}
    if not workers:
        chosen.pop("multiprocessing_context", None)
        chosen.pop("timeout", None)
    return penstock.DataLoader(dataset, num_workers=workers, generator=torch.Generator().manual_seed(5), **chosen)


def oracle(dataset: Any, **more: Any) -> list[Any]:
    dataset = copy.copy(dataset)
    dataset.sample_s = 0.0
    return [plain(batch) for batch in make(dataset, 0, **more)]


# -- kill -9 of random workers ---------------------------------------------------------------------


def epoch_with_kills(
    dataset: Any, *, workers: int, kills: int, every: int, seed: int, **more: Any
) -> tuple[list[Any], int, float, float, int]:
    """Batches, kills made, seconds in all, longest wait for a batch, and restarts the loader counted."""
    chance = random.Random(seed)
    loader = make(dataset, workers, **more)
    came: list[Any] = []
    killed, longest = 0, 0.0
    began = time.monotonic()
    iterator = iter(loader)
    while True:
        asked = time.monotonic()
        batch = next(iterator, None)
        longest = max(longest, time.monotonic() - asked)
        if batch is None:
            break
        came.append(plain(batch))
        if len(came) % every == 0 and killed < kills and (living := processes.workers()):
            processes.kill(chance.choice(living))
            killed += 1
    spent = time.monotonic() - began
    restarts = loader.stats().worker_restarts
    loader.close()
    return came, killed, spent, longest, restarts


def test_two_hundred_random_kills_in_four_hundred_batches_change_nothing_and_cost_little() -> None:
    dataset = Noisy(1600, sample_s=0.002)
    quiet, _, quiet_s, _, restarts = epoch_with_kills(dataset, workers=4, kills=0, every=2, seed=0)
    assert quiet == oracle(dataset)
    assert restarts == 0
    came, killed, spent_s, longest_s, restarts = epoch_with_kills(dataset, workers=4, kills=200, every=2, seed=1)
    added = (spent_s - quiet_s) / killed
    print(f"{killed} kills, {restarts} restarts, {added * 1e3:.0f} ms added per kill, longest wait {longest_s:.2f} s")
    assert (killed, came == quiet) == (200, True)
    assert restarts > 150
    assert added <= 2.0
    assert longest_s <= 2.0


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_random_kills_under_other_start_methods_change_nothing(method: str) -> None:
    dataset = Noisy(160)
    came, killed, spent_s, longest_s, restarts = epoch_with_kills(
        dataset, workers=2, kills=4, every=8, seed=2, multiprocessing_context=method
    )
    print(f"{method}: {killed} kills, {restarts} restarts, {spent_s:.1f} s, longest wait {longest_s:.2f} s")
    assert killed == 4
    assert came == oracle(dataset)


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_two_hundred_random_kills_under_other_start_methods_change_nothing(method: str) -> None:
    dataset = Noisy(1600, sample_s=0.002)
    came, killed, spent_s, longest_s, restarts = epoch_with_kills(
        dataset, workers=4, kills=200, every=2, seed=3, multiprocessing_context=method
    )
    print(f"{method}: {killed} kills, {restarts} restarts, {spent_s:.1f} s, longest wait {longest_s:.2f} s")
    assert killed == 200
    assert came == oracle(dataset)


@pytest.mark.parametrize("seed", range(3))
def test_all_workers_killed_at_once_again_and_again_change_nothing(seed: int) -> None:
    dataset = Noisy(240, sample_s=0.001)
    chance = random.Random(seed)
    came = []
    loader = make(dataset, 3)
    for batch in loader:
        came.append(plain(batch))
        if chance.random() < 0.2:
            for pid in processes.workers():
                processes.kill(pid)
    loader.close()
    assert came == oracle(dataset)


@pytest.mark.parametrize("collate", [listed, joined])
@pytest.mark.parametrize("kind", [Noisy, Ragged])
def test_random_kills_with_a_custom_collate_function_change_nothing(collate: Any, kind: type[Noisy]) -> None:
    dataset = kind(400, values=3000)
    came, killed, *_ = epoch_with_kills(dataset, workers=3, kills=25, every=4, seed=4, collate_fn=collate)
    assert killed == 25
    assert came == oracle(dataset, collate_fn=collate)


@pytest.mark.parametrize("beside", ["alone", "beside another loader"])
def test_random_kills_with_persistent_workers_change_nothing_over_epochs(beside: str) -> None:
    dataset = Noisy(120, sample_s=0.001)
    chance = random.Random(6)
    loader, calm = make(dataset, 3, persistent_workers=True, timeout=10), make(dataset, 3, persistent_workers=True)
    expected = [[plain(batch) for batch in calm] for _ in range(4)]
    if beside == "alone":
        calm.close()
    for epoch in range(4):
        came = []
        for batch in loader:
            came.append(plain(batch))
            if len(came) % 5 == 0 and (living := sorted(set(processes.workers()) - pids_of(calm))):
                processes.kill(chance.choice(living))
        assert came == expected[epoch]
        if beside != "alone":
            # Workers of the one are replaced while the other's are at work, killed and replaced, too.
            processes.kill(chance.choice(sorted(pids_of(calm))))
            assert sum(1 for _ in calm) == 30
    loader.close()
    calm.close()


@pytest.mark.parametrize("seed", range(2))
def test_random_kills_are_never_blamed_on_samples_that_take_no_time(seed: int) -> None:
    """Workers mostly die between samples here, with many tasks waiting that they have not begun."""
    dataset = Noisy(1600)
    came, killed, *_ = epoch_with_kills(dataset, workers=4, kills=200, every=2, seed=seed)
    # Now and then nobody lives who could be killed.
    assert killed > 150
    assert came == oracle(dataset)


def pids_of(loader: penstock.DataLoader[Any]) -> set[int]:
    return {worker.pid for worker in workers_now(loader) if worker.pid is not None}


def test_workers_killed_between_epochs_are_replaced() -> None:
    dataset = Noisy(40)
    loader, calm = make(dataset, 2, persistent_workers=True), make(dataset, 2, persistent_workers=True)
    for _ in range(3):
        assert [plain(b) for b in loader] == [plain(b) for b in calm]
        for pid in pids_of(loader):
            processes.kill(pid)
    loader.close()
    calm.close()


def test_random_kills_of_a_stream_lose_and_repeat_nothing() -> None:
    expected = [plain(b) for b in penstock.DataLoader(Stream(600, sample_s=0.001), batch_size=4, num_workers=3)]
    chance = random.Random(7)
    came = []
    loader = penstock.DataLoader(Stream(600, sample_s=0.001), batch_size=4, num_workers=3)
    for batch in loader:
        came.append(plain(batch))
        if len(came) % 10 == 0:
            processes.kill(chance.choice(processes.workers()))
    loader.close()
    assert came == expected


def test_random_kills_under_torchs_own_seeding_change_nothing() -> None:
    dataset = Noisy(400, sample_s=0.001)
    expected = [plain(b) for b in make(dataset, 3, seeding="worker")]
    came, killed, *_ = epoch_with_kills(dataset, workers=3, kills=20, every=5, seed=8, seeding="worker")
    assert killed == 20
    assert came == expected


# -- kills at named points --------------------------------------------------------------------------

SCENES: dict[str, dict[str, Any]] = {
    "mapping memory": {"dataset": Ragged(96, values=2000), "collate_fn": listed, "every": 11},
    "in a sample": {"every": 5},
    "asking for room": {"dataset": Ragged(96, values=2000), "collate_fn": listed, "every": 4},
    "mid-write of rows": {"dataset": Noisy(96, values=5000), "every": 5},
    "mid-write of an object": {"dataset": Ragged(96, values=2000), "collate_fn": joined, "every": 5},
    "collating": {"dataset": Ragged(96, values=2000), "collate_fn": joined, "every": 4},
    "before its report": {"every": 5},
    "mid-message": {"every": 5},
}
"""What is to be loaded so that workers come to the point; at the others they come by starting and stopping."""


def strike(point: str, times: int, folder: Path, *, method: str = "fork", how: str = "kill") -> int:
    """Epochs with a fault at the point until it has struck so often; every one is the oracle's. Gives the epochs."""
    scene = dict(SCENES.get(point, {"every": 3 if point in ("at birth", "before started") else 1}))
    dataset, every = scene.pop("dataset", Noisy(96)), scene.pop("every")
    expected = oracle(dataset, **scene)
    # No more passes than this are made while a retried task waits for its turn.
    trigger = Trigger(path=folder / "passes", every=every, times=times, rest=48 if point in SCENES else 0)
    fault = Fault(point=point, trigger=trigger, how=how, trainer_pid=os.getpid())
    # Fork takes the faults of this process, the others those of the dataset.
    given = dataset if method == "fork" else Faulty(dataset, fault)
    epochs = 0
    with injected(*([fault] if method == "fork" else [])):
        while trigger.fired < times:
            assert epochs < 40 * times, f"{trigger.fired} of {times} after {epochs} epochs"
            loader = make(given, 3, multiprocessing_context=method, timeout=60, **scene)
            assert [plain(batch) for batch in loader] == expected
            loader.close()
            epochs += 1
    return epochs


@pytest.mark.parametrize("point", POINTS)
def test_kills_at_a_named_point_change_nothing(point: str, tmp_path: Path) -> None:
    strike(point, 6, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", POINTS)
def test_twenty_kills_at_a_named_point_change_nothing(point: str, tmp_path: Path) -> None:
    began = time.monotonic()
    epochs = strike(point, 20, tmp_path)
    print(f"{point}: 20 kills in {epochs} epochs, {time.monotonic() - began:.1f} s")


@pytest.mark.parametrize("point", ["mid-message", "before started"])
def test_kills_at_a_named_point_under_spawn_change_nothing(point: str, tmp_path: Path) -> None:
    strike(point, 1, tmp_path, method="spawn")


@pytest.mark.soak
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("point", POINTS)
def test_kills_at_every_named_point_under_spawn_change_nothing(point: str, tmp_path: Path) -> None:
    began = time.monotonic()
    epochs = strike(point, 20, tmp_path, method="spawn")
    print(f"{point}: 20 kills in {epochs} epochs, {time.monotonic() - began:.1f} s")


@pytest.mark.parametrize("point", POINTS)
def test_a_worker_that_exits_at_a_named_point_changes_nothing(point: str, tmp_path: Path) -> None:
    strike(point, 2, tmp_path, how="exit")


# -- lines and processors ------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["mid-message", "before its report", "asking for room", "before started"])
def test_a_worker_that_closes_its_socket_and_keeps_running_is_replaced(point: str, tmp_path: Path) -> None:
    strike(point, 3, tmp_path, how="hang up")


@pytest.mark.parametrize("collate", [None, joined])
def test_small_socket_buffers_do_not_change_the_batches(collate: Any) -> None:
    dataset = Ragged(96, values=3000)
    collate = collate or listed
    with connections.narrow():
        loader = make(dataset, 3, collate_fn=collate, timeout=60, prefetch_factor=8)
        assert [plain(batch) for batch in loader] == oracle(dataset, collate_fn=collate)
        loader.close()


def test_large_indices_over_small_socket_buffers_do_not_change_the_batches() -> None:
    """What the trainer posts is larger than the socket: it waits in the outbox and never blocks the trainer."""

    class ByText(Noisy):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(int(index.split()[0]))

    order = [f"{number} " + "x" * 20_000 for number in range(64)]
    with connections.narrow():
        loader = penstock.DataLoader(ByText(64), batch_size=8, sampler=order, num_workers=3, timeout=60)
        torch.manual_seed(3)
        came = [plain(batch) for batch in loader]
        loader.close()
    torch.manual_seed(3)
    assert came == [plain(b) for b in penstock.DataLoader(ByText(64), batch_size=8, sampler=order)]


def test_slow_sockets_do_not_change_the_batches() -> None:
    dataset = Noisy(96)
    with connections.slow():
        loader = make(dataset, 3, timeout=60)
        assert [plain(batch) for batch in loader] == oracle(dataset)
        loader.close()


def test_kills_over_slow_sockets_with_small_buffers_do_not_change_the_batches() -> None:
    dataset = Noisy(200, values=400)
    with connections.narrow(), connections.slow():
        came, killed, *_ = epoch_with_kills(dataset, workers=3, kills=15, every=3, seed=9, collate_fn=listed)
    assert killed == 15
    assert came == oracle(dataset, collate_fn=listed)


def test_a_stopped_and_continued_worker_changes_nothing() -> None:
    dataset = Noisy(200, sample_s=0.001)
    chance = random.Random(10)
    came = []
    loader = make(dataset, 3)
    iterator = iter(loader)
    for _ in range(10):
        came.append(plain(next(iterator)))
        with processes.stopped(chance.choice(processes.workers())):
            # The others go on while it sleeps, if only with what is not its own.
            time.sleep(0.05)
    came += [plain(batch) for batch in iterator]
    loader.close()
    assert came == oracle(dataset)


def test_the_timeout_names_a_stopped_worker_and_iteration_continues_once_it_is_resumed() -> None:
    dataset = Noisy(40, sample_s=0.02)
    loader = make(dataset, 1, timeout=1)
    iterator = iter(loader)
    came = [plain(next(iterator))]
    (pid,) = processes.workers()
    with processes.stopped(pid), pytest.raises(penstock.WorkerError) as caught:
        while True:
            came.append(plain(next(iterator)))
    assert "timed out after 1 seconds" in str(caught.value)
    assert f"worker 0 (pid {pid})" in str(caught.value)
    came += [plain(batch) for batch in iterator]
    loader.close()
    assert came == oracle(dataset)


def test_a_stopped_worker_does_not_delay_closing_for_long() -> None:
    loader = make(Noisy(40, sample_s=0.02), 2)
    iterator = iter(loader)
    next(iterator)
    with processes.stopped(processes.workers()[0]):
        loader.close()
    assert not processes.workers()


@pytest.mark.parametrize("gil", [False, True])
def test_a_timeout_names_worker_index_time_and_stack(gil: bool) -> None:
    loader = penstock.DataLoader(Sitting(16, at=7, gil=gil), batch_size=4, num_workers=2, timeout=1)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(penstock.WorkerError) as caught:
        next(iterator)
    text = str(caught.value)
    assert "timed out after 1 seconds" in text
    assert "index 7 of batch 1" in text
    assert any(f"(pid {pid})" in text for pid in processes.workers())
    assert "sit_here" in text and "faulty.py" in text
    loader.close()


# -- samples at fault ------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_a_sample_that_kills_every_worker_is_named(workers: int) -> None:
    loader = penstock.DataLoader(Deadly(64, at=21), batch_size=4, num_workers=workers, timeout=30)
    came = 0
    with pytest.raises(penstock.WorkerError, match=r"index 21 \(batch 5\).*SIGKILL"):
        for _ in loader:
            came += 1
    assert came <= 5
    loader.close()


@pytest.mark.parametrize("at_once", [True, False], ids=["os._exit", "sys.exit"])
def test_a_sample_that_exits_its_worker_is_named_with_the_exit_status(at_once: bool) -> None:
    loader = penstock.DataLoader(Leaving(64, 21, at_once=at_once), batch_size=4, num_workers=2, timeout=30)
    with pytest.raises(penstock.WorkerError, match=r"index 21 \(batch 5\).*exited with status 5"):
        list(loader)
    loader.close()


def test_batches_before_the_crashing_sample_are_delivered_first() -> None:
    """The error belongs to its batch, as a dataset's exception does: what is ready before it is not lost."""
    loader = penstock.DataLoader(Deadly(64, at=21), batch_size=4, num_workers=3, timeout=30)
    came = 0
    with pytest.raises(penstock.WorkerError):
        for _ in loader:
            time.sleep(0.2)
            came += 1
    loader.close()
    assert came == 5


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_after_a_worker_error_nothing_hangs_and_the_loader_can_be_used_again(workers: int, persistent: bool) -> None:
    dataset = Deadly(32, at=5)
    loader = penstock.DataLoader(dataset, batch_size=4, num_workers=workers, persistent_workers=persistent, timeout=10)
    for _ in range(2):
        iterator = iter(loader)
        with pytest.raises(penstock.WorkerError, match="index 5"):
            list(iterator)
        # Whatever the next one is: a batch, the end, or the same error. Not a wait for nobody.
        try:
            next(iterator)
        except StopIteration:
            pass
        except penstock.WorkerError as error:
            assert "timed out" not in str(error)
    loader.close()


def test_a_stream_that_kills_its_worker_is_an_error_and_not_a_loop() -> None:
    loader = penstock.DataLoader(DeadlyStream(64, at=21), batch_size=4, num_workers=2, timeout=30)
    with pytest.raises(penstock.WorkerError, match="SIGKILL"):
        list(loader)
    loader.close()


def test_workers_that_never_start_are_an_error_and_not_a_loop(tmp_path: Path) -> None:
    trigger = Trigger(path=tmp_path / "passes", every=1, times=10_000)
    fault = Fault(point="before started", trigger=trigger, trainer_pid=os.getpid())
    with injected(fault):
        loader = make(Noisy(16), 2, timeout=30)
        with pytest.raises(penstock.WorkerError, match=r"starting.*SIGKILL"):
            list(loader)
        loader.close()
    assert trigger.passes < 30


def test_a_replacement_that_cannot_start_is_an_error_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """fork fails for want of memory or process numbers, exactly when a worker is to be replaced."""
    import multiprocessing.context

    loader = make(Noisy(400, sample_s=0.005), 2, timeout=10)
    iterator = iter(loader)
    next(iterator)
    monkeypatch.setattr(multiprocessing.context.ForkProcess, "_Popen", staticmethod(_no_fork))
    for pid in processes.workers():
        processes.kill(pid)
    with pytest.raises((OSError, penstock.WorkerError)) as caught:
        list(iterator)
    assert "timed out" not in str(caught.value)
    loader.close()


def _no_fork(process: Any) -> Any:
    raise BlockingIOError(11, "Resource temporarily unavailable")


def test_a_crash_is_seen_although_another_loaders_worker_was_forked_during_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two threads start loaders: a worker forked between a socket's birth and its use must not keep its end open."""
    import penstock.workers.process_worker as process_worker

    real = process_worker.channel_pair
    others: list[Any] = []

    def pair() -> Any:
        made = real()
        if not others:
            others.append(None)
            other = make(Noisy(40, sample_s=0.01), 1)
            others[:] = [other, iter(other)]
            next(others[1])
        return made

    monkeypatch.setattr(process_worker, "channel_pair", pair)
    dataset = Noisy(40, sample_s=0.005)
    loader = make(dataset, 1, timeout=5)
    iterator = iter(loader)
    came = [plain(next(iterator))]
    beside = pids_of(others[0])
    for pid in set(processes.workers()) - beside:
        processes.kill(pid)
    came += [plain(batch) for batch in iterator]
    others[0].close()
    loader.close()
    assert came == oracle(dataset)
