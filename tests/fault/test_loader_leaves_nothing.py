"""However a loader is left, nothing of it stays: no process, no descriptor, no thread, no memory."""

from __future__ import annotations

import collections
import dataclasses
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import RandomSampler, Sampler

import penstock
from penstock.workers.process_worker import ProcessWorker
from support.datasets.numbers import Counted, Endless, Numbers
from support.faults.processes import HANG_S
from support.ready_python import ReadyPython

MIB = 1 << 20

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


def children() -> set[int]:
    """Living processes below this one, but for those multiprocessing keeps for itself."""
    mine = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if not any("resource_tracker" in word or "forkserver" in word for word in process.cmdline()):
                mine.add(process.pid)
        except psutil.NoSuchProcess:
            continue
    return mine


def descriptors() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(entry.readlink()).split(":")[0])
        except OSError:
            continue
    return sorted(found)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:penstock")


def shared_names() -> set[str]:
    """Names in /dev/shm that this process or its children made would start with these."""
    return {entry.name for entry in Path("/dev/shm").iterdir() if entry.name.startswith(("psm_", "torch_", "penstock"))}


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails a test that leaves anything behind."""
    # Whatever multiprocessing and torch open once, they have opened after this.
    list(penstock.DataLoader(Numbers(4), num_workers=1))
    resource_tracker.ensure_running()
    before = everything()
    yield
    assert everything() == before


def everything() -> dict[str, Any]:
    # A finaliser that runs in one collection leaves its engine, a cycle itself, to the next.
    for _ in range(3):
        gc.collect()
    return {
        "children": children(),
        "descriptors": collections.Counter(descriptors()),
        "threads": {thread.name for thread in threading.enumerate()},
        "mappings": mappings(),
    }


def big_loader(**more: Any) -> penstock.DataLoader[Any]:
    return penstock.DataLoader(Numbers(400, 1 << 16), batch_size=8, **{"num_workers": 3, **more})


each_start_method = pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])


@each_start_method
def test_a_whole_epoch_leaves_nothing_for_any_start_method(method: str) -> None:
    loader = big_loader(num_workers=2, multiprocessing_context=method)
    # The first of its kind starts a process that multiprocessing keeps.
    next(iter(loader))
    before = everything()
    assert sum(1 for _ in loader) == 50
    assert everything() == before


@pytest.mark.usefixtures("nothing_left")
class TestInThisProcess:
    def test_a_loop_left_early(self) -> None:
        for number, _ in enumerate(big_loader()):
            if number == 3:
                break

    def test_an_exception_in_the_loop(self) -> None:
        def train() -> None:
            for _ in big_loader():
                raise KeyError("training failed")

        with pytest.raises(KeyError):
            train()

    def test_a_loop_left_before_an_exception_of_its_sampler_is_due(self) -> None:
        def broken() -> Iterator[int]:
            yield from range(8)
            raise KeyError("sampler failed")

        class Broken(Sampler[int]):
            def __iter__(self) -> Iterator[int]:
                return broken()

        for _ in big_loader(sampler=Broken()):
            break
        # The exception and the frames it came through are a cycle.
        gc.collect()

    def test_an_iterator_dropped_before_its_first_batch(self) -> None:
        iterator = iter(big_loader())
        del iterator

    def test_an_iterator_dropped_between_batches_while_one_is_held(self) -> None:
        iterator = iter(big_loader())
        batch = next(iterator)
        del iterator
        gc.collect()
        assert int(batch[3, 5]) == 3

    def test_closing_twice_and_in_the_middle(self) -> None:
        loader = big_loader()
        iterator = iter(loader)
        batch = next(iterator)
        loader.close()
        loader.close()
        assert not children()
        assert int(batch[7, 0]) == 7
        assert list(iterator) == []
        del batch

    def test_a_context_manager_left_by_an_exception(self) -> None:
        with pytest.raises(ZeroDivisionError), big_loader(persistent_workers=True) as loader:
            next(iter(loader))
            _ = 1 / 0

    def test_persistent_workers_after_close_and_after_del(self) -> None:
        loader = big_loader(persistent_workers=True)
        for _ in range(3):
            assert sum(1 for _ in loader) == 50
        loader.close()
        again = big_loader(persistent_workers=True)
        assert sum(1 for _ in again) == 50
        del again, loader

    def test_a_closed_loader_can_be_iterated_again(self) -> None:
        loader = big_loader()
        next(iter(loader))
        loader.close()
        assert sum(1 for _ in loader) == 50

    def test_two_live_iterators(self) -> None:
        loader = big_loader()
        one, other = iter(loader), iter(loader)
        for first, second in zip(one, other, strict=True):
            assert torch.equal(first, second)

    def test_two_live_iterators_of_which_one_is_left_early(self) -> None:
        loader = big_loader()
        one, other = iter(loader), iter(loader)
        next(one)
        next(other)
        del one
        assert sum(1 for _ in other) == 49

    def test_an_endless_stream(self) -> None:
        for number, _ in enumerate(penstock.DataLoader(Endless(), batch_size=4, num_workers=2)):
            if number == 50:
                break

    def test_threads(self) -> None:
        for _ in range(2):
            assert sum(1 for _ in big_loader(backend="thread")) == 50
        for _ in big_loader(backend="thread"):
            break

    def test_a_dataset_that_fails(self) -> None:
        loader = penstock.DataLoader([1, 2, "three", 4], batch_size=4, num_workers=2)  # type: ignore[arg-type]
        with pytest.raises((TypeError, RuntimeError)):
            list(loader)

    def test_workers_that_cannot_start(self) -> None:
        with pytest.raises((AttributeError, TypeError, OSError)), pytest.warns(UserWarning, match="pickle"):
            list(big_loader(collate_fn=lambda samples: samples, multiprocessing_context="spawn"))

    def test_batches_kept_until_after_the_loader_is_gone(self) -> None:
        batches = list(big_loader(memory="40MB"))
        gc.collect()
        assert [int(batch[0, 0]) for batch in batches] == [8 * n % 251 for n in range(50)]
        del batches

    def test_a_reference_cycle_around_the_iterator(self) -> None:
        class Trainer:
            pass

        for _ in range(3):
            trainer = Trainer()
            trainer.me = trainer  # type: ignore[attr-defined]
            trainer.batches = iter(big_loader())  # type: ignore[attr-defined]
            next(trainer.batches)  # type: ignore[attr-defined]
            del trainer
        gc.collect()

    def test_a_reference_cycle_that_a_worker_thread_collects(self) -> None:
        class Collecting(Numbers):
            forgotten, collected = threading.Event(), threading.Event()

            def __getitem__(self, index: int) -> Any:
                if index >= 8:
                    assert self.forgotten.wait(30)
                    gc.collect()
                    self.collected.set()
                return super().__getitem__(index)

        gc.disable()
        try:
            iterator = iter(penstock.DataLoader(Collecting(800), batch_size=8, num_workers=2, backend="thread"))
            next(iterator)
            cycle: list[Any] = [iterator]
            cycle.append(cycle)
            still_there = weakref.ref(iterator)
            del iterator, cycle
            Collecting.forgotten.set()
            assert Collecting.collected.wait(30) and still_there() is None
        finally:
            gc.enable()
        for thread in threading.enumerate():  # nobody could wait for the one that collected
            if thread.name.startswith("penstock-worker"):
                thread.join(30)

    def test_a_fork_of_the_trainer_while_a_loader_lives(self) -> None:
        loader = big_loader()
        iterator = iter(loader)
        batch = next(iterator)
        pid = os.fork()
        if pid == 0:
            # The child's copies go away; the parent's workers, leases and memory must not notice.
            ok = int(batch[5, 5]) == 5
            del batch, iterator, loader
            gc.collect()
            os._exit(0 if ok else 1)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert sum(1 for _ in iterator) == 49
        assert loader.stats().worker_restarts == 0

    def test_many_loaders_one_after_another(self) -> None:
        for _ in range(10):
            for _ in penstock.DataLoader(Numbers(16), batch_size=4, num_workers=2):
                pass


def test_workers_started_later_hold_nothing_of_earlier_loaders() -> None:
    """Forked workers inherit every mapping there is: a training loader's arena must not live on in evaluation's."""
    training = penstock.DataLoader(Numbers(64, 4 * MIB), batch_size=8, num_workers=1, memory="200MB")
    batches = iter(training)
    next(batches)
    before = children()
    evaluation = iter(penstock.DataLoader(Numbers(64, sample_s=0.01), batch_size=8, num_workers=1))
    next(evaluation)
    (worker,) = children() - before
    training.close()
    held = [line for line in Path(f"/proc/{worker}/maps").read_text().splitlines() if "memfd:penstock" in line]
    large = [line for line in held if _span(line) >= 16 * MIB]
    assert not large
    opened = [fd for fd in Path(f"/proc/{worker}/fd").iterdir() if "penstock" in str(fd.readlink())]
    assert not [fd for fd in opened if fd.stat().st_size >= 16 * MIB]
    del evaluation, batches


def _span(line: str) -> int:
    start, end = line.split()[0].split("-")
    return int(end, 16) - int(start, 16)


def test_many_small_batches_can_be_kept_under_the_usual_limit_of_open_files(run: Run) -> None:
    """list(loader) with more batches than a process may have files open."""
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
batches = list(penstock.DataLoader(Numbers(8000, 1 << 13), batch_size=4, num_workers=2))
assert [int(b[0, 0]) for b in batches] == [4 * n % 251 for n in range(2000)]
"""
    done = run(code)
    assert done.returncode == 0, done.stderr[-600:]


def test_iteration_continues_after_any_number_of_errors() -> None:
    """One failing batch after another, more of them than are drawn ahead."""

    class Failing(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index < 40:
                raise ValueError(index)
            return index

    iterator = iter(penstock.DataLoader(Failing(60), num_workers=2))
    came: list[Any] = []
    for _ in range(61):
        try:
            came.append(int(next(iterator)))
        except ValueError:
            came.append("error")
        except StopIteration:
            break
    assert came == ["error"] * 40 + list(range(40, 60))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_thread_that_exits_is_an_error_and_not_a_hang() -> None:
    class Leaving(Numbers):
        def __getitem__(self, index: int) -> Any:
            raise SystemExit(3)

    loader = penstock.DataLoader(Leaving(8), num_workers=2, backend="thread", timeout=20)
    with pytest.raises((RuntimeError, SystemExit)) as caught:
        list(loader)
    assert "timed out" not in str(caught.value)


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
@pytest.mark.parametrize("leave", ["close", "break", "whole epoch"])
def test_workers_end_by_themselves_and_are_not_waited_for_until_they_are_killed(
    monkeypatch: pytest.MonkeyPatch, leave: str, persistent: bool
) -> None:
    """With the usual 5 s until the kill, a worker that does not see the end is only a delay; here it is a hang."""
    monkeypatch.setattr("penstock.workers.worker._STOP_S", 1000.0)
    statuses: list[int | None] = []
    reap = ProcessWorker.reap

    def reaped(process: ProcessWorker, deadline_s: float) -> int | None:
        statuses.append(reap(process, deadline_s))
        return statuses[-1]

    monkeypatch.setattr(ProcessWorker, "reap", reaped)
    length = 64 if leave == "whole epoch" else 100_000
    loader = penstock.DataLoader(Numbers(length, 1 << 14), batch_size=8, num_workers=3, persistent_workers=persistent)
    for number, _ in enumerate(loader):
        if leave != "whole epoch" and number == 5:
            break
    if leave == "close" or persistent:
        loader.close()
    del loader
    gc.collect()
    assert statuses == [0, 0, 0]


# -- interpreter exit ----------------------------------------------------------------------

START = """
import sys
import penstock, torch, os, signal, time, warnings
warnings.simplefilter("ignore")
from support.datasets.numbers import Numbers, Endless
def pids():
    import psutil
    return [c.pid for c in psutil.Process().children(recursive=True)]
"""


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(python: ReadyPython) -> Run:
    return lambda code, **more: python.run(START + code, **more)


def assert_gone(pids: list[int]) -> None:
    """No process of these is left; the kernel may take a moment over one that was killed."""
    deadline = time.monotonic() + HANG_S
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline, "workers live on"
        time.sleep(0.01)


LIVE = """
loader = penstock.DataLoader(Numbers(100000, 1 << 14), batch_size=8, num_workers=3{more})
iterator = iter(loader)
batch = next(iterator)
print(*pids(), flush=True)
"""


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("", 0),
        ("raise SystemExit(5)", 5),
        ("other = iter(loader); next(other)", 0),
        ("keep = [next(iterator) for _ in range(20)]", 0),
        ("torch.keep = iterator", 0),
        ("loader.me = loader; iterator.me = iterator", 0),
    ],
)
@pytest.mark.parametrize("more", ["", ", persistent_workers=True", ", backend='thread'"])
def test_the_interpreter_exits_silently_with_iterators_alive(ending: str, status: int, more: str, run: Run) -> None:
    if "other" in ending and "persistent" in more:
        pytest.skip("a persistent loader has one iterator")
    done = run(LIVE.format(more=more) + ending)
    assert (done.returncode, done.stderr) == (status, "")
    assert_gone([int(pid) for pid in done.stdout.split()])


def test_workers_die_with_a_trainer_that_was_killed(run: Run) -> None:
    done = run(LIVE.format(more="") + "os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 3
    assert_gone(pids)


def test_workers_in_a_long_sample_die_with_a_trainer_that_was_killed(run: Run) -> None:
    code = """
loader = penstock.DataLoader(Numbers(100, sample_s=1000), num_workers=2)
iterator = iter(loader)
print(*pids(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run(code)
    assert_gone([int(pid) for pid in done.stdout.split()])


def test_a_trainer_exits_promptly_while_workers_are_in_a_long_sample(run: Run) -> None:
    code = """
loader = penstock.DataLoader(Numbers(100, sample_s=1000), num_workers=2)
iterator = iter(loader)
print(*pids(), flush=True)
"""
    done = run(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert_gone([int(pid) for pid in done.stdout.split()])


def test_ctrl_c_ends_the_training_with_one_traceback(run: Run) -> None:
    code = LIVE.format(more="") + "os.killpg(os.getpid(), signal.SIGINT); time.sleep(1000)"
    done = run(code, own_session=True)
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert_gone([int(pid) for pid in done.stdout.split()])


def test_a_forked_child_that_exits_normally_causes_at_most_restarts(run: Run) -> None:
    """Python terminates the daemons it believes to be the child's own at its exit; torch's loader dies of that."""
    code = """
loader = penstock.DataLoader(Numbers(4000, 1 << 14), batch_size=8, num_workers=2)
iterator = iter(loader)
next(iterator)
sys.stdout.flush()
if os.fork() == 0:
    sys.exit(0)
os.wait()
print(*(int(batch[0, 0]) for batch in iterator))
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert [int(word) for word in done.stdout.split()] == [8 * n % 251 for n in range(1, 500)]


# -- samplers ---------------------------------------------------------------------------------


def test_a_sampler_of_ten_million_is_drawn_as_it_is_needed() -> None:
    sampler = Counted(10_000_000)
    loader = penstock.DataLoader(Numbers(10_000_000, 64), batch_size=10, sampler=sampler, num_workers=2)
    iterator = iter(loader)
    for _ in range(20):
        next(iterator)
    assert sampler.drawn <= 10 * 100
    del iterator


def test_ten_million_shuffled_indices_take_the_memory_of_the_sampler_alone() -> None:
    """Memory of the whole tree, against the same sampler started on its own."""
    count = 10_000_000
    gc.collect()
    base = penstock.memory().pss_bytes or 0
    alone = iter(RandomSampler(range(count)))  # type: ignore[arg-type]
    next(alone)
    sampler_bytes = (penstock.memory().pss_bytes or 0) - base
    del alone
    gc.collect()
    base = penstock.memory().pss_bytes or 0
    iterator = iter(penstock.DataLoader(Numbers(count, 64), batch_size=10, shuffle=True, num_workers=2))
    for _ in range(50):
        next(iterator)
    grown = (penstock.memory().pss_bytes or 0) - base
    del iterator
    gc.collect()
    assert grown <= sampler_bytes + 48 * MIB, f"{grown / MIB:.0f} MiB, the sampler alone {sampler_bytes / MIB:.0f}"


@pytest.mark.soak  # compares speeds: needs the machine to itself
def test_dispatch_costs_no_more_per_batch_from_a_long_sampler_than_from_a_short_one() -> None:
    def batches_per_s(length: int) -> float:
        iterator = iter(penstock.DataLoader(Numbers(length, 64), batch_size=8, sampler=Counted(length), num_workers=1))
        for _ in range(50):
            next(iterator)
        began = time.perf_counter()
        for _ in range(400):
            next(iterator)
        return 400 / (time.perf_counter() - began)

    short, long = (max(batches_per_s(length) for _ in range(3)) for length in (5_000, 10_000_000))
    assert long >= 0.5 * short, f"{long:.0f} batches/s against {short:.0f}"


# -- soak -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Level:
    pss_bytes: int
    descriptors: int
    children: set[int]
    threads: int


def own_pss_bytes() -> int:
    """PSS of the tree without pages of files: their share changes with every other process that maps torch."""
    total_kib = 0
    for process in penstock.memory(exact=False).processes:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total_kib += int(line.split()[1])
    return total_kib << 10


def level() -> Level:
    gc.collect()
    return Level(own_pss_bytes(), len(descriptors()), children(), threading.active_count())


def soak(loader: penstock.DataLoader[Any], batches: int, settled_after: int) -> tuple[Level, Level]:
    """The levels once settled, and at the end."""
    # Otherwise the number of segments follows the speed of the workers.
    loader.resize(depth=8)
    iterator = iter(loader)
    batch = None
    for batch in itertools.islice(iterator, settled_after):
        assert batch.shape[0] == 8
    del batch
    first = level()
    batch = None
    for number, batch in enumerate(itertools.islice(iterator, batches - settled_after - 1), settled_after):
        if number % 500 == 0:
            assert int(batch[1, 0]) == (8 * number + 1) % 251
    del batch
    last = level()
    del iterator
    return first, last


def assert_level(first: Level, last: Level, grown_bytes: int) -> None:
    assert last.children == first.children
    assert last.threads == first.threads
    # Segments in use differ by a batch or two with the moment; one kept per hundred batches would be 35 and more.
    assert abs(last.descriptors - first.descriptors) <= 16
    grown = last.pss_bytes - first.pss_bytes
    assert grown <= grown_bytes, f"{grown / MIB:.2f} MiB more after {settled_text(first)}"


def settled_text(first: Level) -> str:
    return f"{first.pss_bytes / MIB:.0f} MiB"


each_kind: Callable[[Any], Any] = pytest.mark.parametrize(
    "more",
    [{}, {"collate_fn": torch.stack}, {"backend": "thread"}],
    ids=["default collate", "own collate", "threads"],
)


@each_kind
def test_five_thousand_batches_leave_no_trace(more: dict[str, Any]) -> None:
    loader = penstock.DataLoader(Numbers(40_000), batch_size=8, num_workers=2, **more)
    assert_level(*soak(loader, 5_000, 1_500), grown_bytes=MIB)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_hundred_thousand_batches_leave_no_trace() -> None:
    loader = penstock.DataLoader(Numbers(800_000), batch_size=8, num_workers=2)
    assert_level(*soak(loader, 100_000, 10_000), grown_bytes=MIB)
