"""The trainer is killed at any moment: within two seconds no process of it lives, and so no memory of it is left.

Segments have no names, so they go with the last process that has them. All processes of a training carry a mark.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.faults.processes import HANG_S, until
from support.faults.trainings import Nursery, nursery

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
]

MOMENT_S = 0.6
"""Long enough for a loader that forks to be past its first epochs: moments fall before, at and after the start."""

TRAIN = """
if {method!r} != "fork":
    loader = penstock.DataLoader(Noisy(400), num_workers=3, multiprocessing_context={method!r})
    first = iter(loader)
    next(first)
    while not all(worker.doing != "starting" for worker in workers_now(loader)):
        time.sleep(0.01)
    print("up", flush=True)
    for batch in first:
        time.sleep(0.01)
for _ in range(1000):
    loader = penstock.DataLoader(Noisy(4000, values=20000, sample_s=0.001), batch_size=8, num_workers=3,
                                 multiprocessing_context={method!r}, memory="200MB")
    for number, batch in enumerate(loader):
        if number == 40:
            break
        if {kills} and number % 10 == 9 and (living := workers()):
            kill(random.choice(living))
"""


@pytest.fixture
def nest(tmp_path: Path) -> Iterator[Nursery]:
    with nursery(tmp_path) as made:
        yield made


def shared_names() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir() if entry.name.startswith("penstock")}


def kill_at_moments(nest: Nursery, method: str, times: int, *, seed: int, kills: bool = False) -> None:
    """Kill so many trainings, each at a moment of its own: nothing of them lives on."""
    chance = random.Random(seed)
    before = shared_names()
    for _ in range(times):
        moment_s = chance.uniform(0.0, MOMENT_S)
        training = nest.start(TRAIN.format(method=method, kills=kills))
        if method != "fork":
            # Workers that are still importing have a test of their own.
            training.wait_for("up")
        time.sleep(moment_s)
        training.signal(signal.SIGKILL)
        end = training.end()
        assert end.status == -signal.SIGKILL, end.err
        assert not end.left, f"killed after {moment_s:.3f} s: {end}"
    assert shared_names() <= before


@pytest.mark.parametrize(("method", "times"), [("fork", 12), ("spawn", 1), ("forkserver", 1)])
def test_nothing_is_left_of_a_trainer_killed_at_a_random_moment(nest: Nursery, method: str, times: int) -> None:
    kill_at_moments(nest, method, times, seed=1)


def test_nothing_is_left_of_a_trainer_killed_while_its_workers_are_being_replaced(nest: Nursery) -> None:
    kill_at_moments(nest, "fork", 8, seed=2, kills=True)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("kills", [False, True])
def test_nothing_is_left_of_a_trainer_killed_at_fifty_random_moments(nest: Nursery, method: str, kills: bool) -> None:
    kill_at_moments(nest, method, 50, seed=3, kills=kills)


IMPORTING = """
loader = penstock.DataLoader(Noisy(400), num_workers=2, multiprocessing_context={method!r})
iterator = iter(loader)
print("importing", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_still_importing_die_with_their_trainer(nest: Nursery, method: str) -> None:
    """Python runs the trainer's own main module first in a spawned process; only after that can a worker be told."""
    training = nest.start(IMPORTING.format(method=method))
    training.wait_for("importing")
    training.signal(signal.SIGKILL)
    end = training.end()
    assert not end.left, end


SITTING = """
loader = penstock.DataLoader(Sitting(64, gil={gil}), num_workers=2, multiprocessing_context={method!r})
iterator = iter(loader)
next(iterator)
"""


@pytest.mark.parametrize("gil", [False, True], ids=["", "with the interpreter lock held"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_in_a_long_sample_die_with_their_trainer(nest: Nursery, method: str, gil: bool) -> None:
    training = nest.start(SITTING.format(method=method, gil=gil))
    until(lambda: training.printed().count("sitting") == 2, 60)
    training.signal(signal.SIGKILL)
    end = training.end()
    assert end.status == -signal.SIGKILL, end.err
    assert not end.left, end


REPLACED = """
class Replaced(Sitting):
    def __getitem__(self, index):
        # The first batch comes; both workers sit in the next two, however few are ahead.
        if index >= 2:
            self.sit_here()
        return noise(index, 8)
loader = penstock.DataLoader(Replaced(64, gil=True), batch_size=2, num_workers=2)
iterator = iter(loader)
next(iterator)
for pid in workers():
    kill(pid)
    print("killed", pid, flush=True)
time.sleep(60)
"""


def sitting_successors(printed: str) -> set[str]:
    """Workers that sit in a sample and are not the ones that were killed."""
    said = [line.split() for line in printed.splitlines() if line.startswith(("sitting ", "killed "))]
    first = {pid for word, pid in said if word == "killed"}
    return {pid for word, pid in said if word == "sitting"} - first if len(first) == 2 else set()


def test_replaced_workers_in_a_long_sample_die_with_their_trainer(nest: Nursery) -> None:
    """Successors are started by another thread than the first workers were."""
    training = nest.start(REPLACED)
    until(lambda: len(sitting_successors(training.printed())) == 2, 30)
    training.signal(signal.SIGKILL)
    end = training.end()
    assert not end.left, end


STOPPED = """
loader = penstock.DataLoader(Noisy(4000, sample_s=0.001), batch_size=8, num_workers=2,
                             multiprocessing_context={method!r})
iterator = iter(loader)
next(iterator)
os.kill(workers()[0], signal.SIGSTOP)
print("stopped", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_stopped_worker_dies_with_its_trainer(nest: Nursery, method: str) -> None:
    training = nest.start(STOPPED.format(method=method))
    training.wait_for("stopped")
    training.signal(signal.SIGKILL)
    end = training.end()
    assert not end.left, end


THREADED = """
def train():
    loader = penstock.DataLoader(Noisy(4000, values=20000, sample_s=0.001), batch_size=8, num_workers=2)
    for batch in loader:
        print("training", flush=True)
threads = [threading.Thread(target=train) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_workers_of_loaders_in_threads_die_with_their_trainer(nest: Nursery) -> None:
    training = nest.start(THREADED)
    training.wait_for("training")
    time.sleep(0.3)
    training.signal(signal.SIGKILL)
    end = training.end()
    assert not end.left, end


MEMORY = """
loader = penstock.DataLoader(Noisy(4000, values=1 << 18), batch_size=16, num_workers=2, memory="400MB")
kept = [batch for batch, _ in zip(loader, range(6))]
print("full", flush=True)
time.sleep(60)
"""


def test_the_memory_of_a_killed_trainer_is_released(nest: Nursery) -> None:
    def shared_kib() -> int:
        return next(
            int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("Shmem:")
        )

    training = nest.start(MEMORY)
    training.wait_for("full")
    held = sum(held_bytes(pid) for pid in training.left())
    assert held >= 6 * 16 * (8 << 18)
    before = shared_kib()
    training.signal(signal.SIGKILL)
    end = training.end()
    assert not end.left, end
    # Others use shared memory at the same time, hence only half of it.
    deadline = time.monotonic() + HANG_S
    while before - shared_kib() < 6 * 16 * (8 << 8) // 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert before - shared_kib() >= 6 * 16 * (8 << 8) // 2


def held_bytes(pid: int) -> int:
    """Bytes of segments mapped by a process."""
    spans = [line.split()[0] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:penstock" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in (span.split("-") for span in spans))
