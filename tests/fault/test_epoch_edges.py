"""The beginning of an epoch: iterations begun by ``start()``, and what spawned workers get of the dataset."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Sampler

import penstock
from penstock.loader.engine.worker_set import WorkerSet
from penstock.workers.board import Board
from penstock.workers.setup import SharedPickle
from support.faults.processes import HANG_S

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

each_spawning_method = pytest.mark.parametrize("method", ["forkserver", "spawn"])
with_and_without_persistent_workers = pytest.mark.parametrize("persistent", [False, True])


class Scaled(Dataset[torch.Tensor]):
    """Numbers times a factor, with randomness of torch's global generator."""

    def __init__(self, length: int = 64, factor: int = 1) -> None:
        self.length, self.factor = length, factor

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(self.factor * index), float(torch.rand(()))])

    def set_factor(self, worker_id: int) -> None:
        """An init function."""
        self.factor = 5


class Pickled(Scaled):
    """Counts how often it is pickled, and raises a signal each time if one is given."""

    pickles = 0

    def __init__(self, raised: signal.Signals | None = None) -> None:
        super().__init__()
        self.raised = raised

    def __getstate__(self) -> dict[str, Any]:
        Pickled.pickles += 1
        if self.raised is not None:
            signal.raise_signal(self.raised)
        return self.__dict__


class WaitsInWorker(Scaled):
    """Larger than a pipe; a worker that unpickles it waits until the test has written into ``fifo``."""

    def __init__(self, fifo: Path) -> None:
        super().__init__()
        self.fifo = fifo
        self.content = bytes(1 << 20)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with self.fifo.open("rb", buffering=0) as fifo:
            assert select.select([fifo], [], [], HANG_S)[0], "the trainer waits for this worker"


class ForOneProcess(Scaled):
    """With parts whose pickles only one process can read."""

    def __init__(self) -> None:
        super().__init__()
        context = torch.multiprocessing.get_context("spawn")
        self.tensor = torch.arange(64.0)
        self.lock = context.Lock()
        self.ends = context.Pipe()

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:
            self.ends[1].send(index)
        return torch.stack([self.tensor[index], torch.rand(())])


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(8.0))


class CountsIterators(Sampler[int]):
    iterators = 0

    def __init__(self) -> None: ...

    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Iterator[int]:
        self.iterators += 1
        return iter(torch.randperm(64).tolist())


def epochs(loader: Any, count: int) -> list[list[torch.Tensor]]:
    return [[batch.clone() for batch in loader] for _ in range(count)]


def assert_same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> None:
    assert [len(epoch) for epoch in one] == [len(epoch) for epoch in other]
    for a, b in zip(one, other, strict=True):
        assert all(map(torch.equal, a, b))


def loader_of(dataset: Any = None, **more: Any) -> penstock.DataLoader[Any]:
    arguments = {"batch_size": 8, "shuffle": "sampler" not in more, "num_workers": 4, **more}
    return penstock.DataLoader(Scaled() if dataset is None else dataset, **arguments)


def seeded_loader(**more: Any) -> penstock.DataLoader[Any]:
    """One that gives the same batches as every other one."""
    torch.manual_seed(3)
    return loader_of(**more)


def workers_of(loader: penstock.DataLoader[Any]) -> list[psutil.Process]:
    """The workers of what was begun last."""
    return [psutil.Process(worker.pid) for worker in loader._live()[-1].workers_now()]


def any_runs(workers: list[psutil.Process]) -> bool:
    return any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)


def setup_files(pid: int | str = "self") -> int:
    """How many descriptors and mappings a process has of what is pickled for several workers."""
    found = Path(f"/proc/{pid}/maps").read_text().count("penstock-setup")
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found += "penstock-setup" in str(entry.readlink())
    return found


@pytest.fixture(autouse=True)
def no_pickles() -> None:
    Pickled.pickles = 0


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the workers in the order in which they were started."""
    started: list[int] = []
    add = WorkerSet._add

    def noted(self: WorkerSet, peer: Any, *rest: Any, **more: Any) -> None:
        started.append(peer.worker_id)
        add(self, peer, *rest, **more)

    monkeypatch.setattr(WorkerSet, "_add", noted)
    return started


class TestStart:
    @with_and_without_persistent_workers
    def test_iter_takes_over_what_start_has_begun(self, persistent: bool, starts: list[int]) -> None:
        expected = epochs(seeded_loader(persistent_workers=persistent), 2)
        after = torch.get_rng_state()
        loader = seeded_loader(persistent_workers=persistent)
        found = []
        for _ in range(2):
            loader.start()
            loader.start()
            starts.clear()
            found += epochs(loader, 1)
            assert not starts
        assert_same(found, expected)
        assert torch.equal(torch.get_rng_state(), after)

    @with_and_without_persistent_workers
    def test_start_during_an_iteration_changes_nothing(self, persistent: bool) -> None:
        expected = epochs(seeded_loader(persistent_workers=persistent), 2)
        loader = seeded_loader(persistent_workers=persistent)
        found = []
        for _ in range(2):
            found.append([])
            for batch in loader:
                loader.start()
                found[-1].append(batch.clone())
        assert_same(found, expected)

    def test_without_workers_start_does_nothing(self) -> None:
        sampler = CountsIterators()
        loader = loader_of(num_workers=0, sampler=sampler)
        before = torch.get_rng_state()
        loader.start()
        assert sampler.iterators == 0
        assert torch.equal(torch.get_rng_state(), before)
        assert len(epochs(loader, 1)[0]) == 8

    @with_and_without_persistent_workers
    def test_an_epoch_given_to_the_sampler_after_start_counts(self, persistent: bool) -> None:
        sampler = DistributedSampler(Scaled(), num_replicas=1, rank=0)
        sampler.set_epoch(4)
        expected = torch.cat(epochs(loader_of(sampler=sampler), 1)[0])[:, 0]
        sampler.set_epoch(0)
        loader = loader_of(sampler=sampler, persistent_workers=persistent)
        loader.start()
        begun = workers_of(loader)
        sampler.set_epoch(4)
        iterator = iter(loader)
        assert any_runs(begun) is persistent
        assert torch.equal(torch.cat(list(iterator))[:, 0], expected)

    def test_the_epoch_that_the_sampler_had_at_start_is_taken_over(self, starts: list[int]) -> None:
        sampler = DistributedSampler(Scaled(), num_replicas=1, rank=0)
        sampler.set_epoch(4)
        loader = loader_of(sampler=sampler)
        loader.start()
        starts.clear()
        sampler.set_epoch(4)
        assert len(epochs(loader, 1)[0]) == 8
        assert not starts

    def test_a_state_saved_after_start_begins_with_its_batches(self) -> None:
        loader = seeded_loader()
        loader.start()
        state = loader.state_dict()
        found = epochs(loader, 1)
        resumed = loader_of()
        resumed.load_state_dict(state)
        assert_same(epochs(resumed, 1), found)

    @with_and_without_persistent_workers
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_state_loaded_before_or_after_start_decides_the_batches(self, when: str, persistent: bool) -> None:
        saved = seeded_loader()
        iterator = iter(saved)
        for _ in range(3):
            next(iterator)
        state = saved.state_dict()
        expected = [batch.clone() for batch in iterator]
        loader = loader_of(persistent_workers=persistent)
        if when == "after":
            loader.start()
            begun = workers_of(loader)
            loader.load_state_dict(state)
            assert not any_runs(begun)
        else:
            loader.load_state_dict(state)
            loader.start()
            assert len(loader.state_dict()) == len(state)
        assert_same(epochs(loader, 1), [expected])

    def test_fewer_workers_after_start_give_the_same_batches(self) -> None:
        expected = epochs(seeded_loader(), 1)
        for workers in (2, 0):
            loader = seeded_loader()
            loader.start()
            loader.resize(workers=workers)
            assert_same(epochs(loader, 1), expected)

    def test_a_stream_with_another_number_of_workers_begins_anew(self) -> None:
        loader = penstock.DataLoader(Stream(), num_workers=1)
        loader.start()
        begun = workers_of(loader)
        loader.resize(workers=2)
        assert sum(1 for _ in loader) == 16
        assert not any_runs(begun)

    def test_the_rate_of_an_iteration_counts_from_iter(self) -> None:
        loader = loader_of()
        loader._counters.clock = itertools.count().__next__
        loader.start()
        began_s = loader._counters.began_s
        iterator = iter(loader)
        assert began_s is not None
        assert loader._counters.began_s == began_s + 1
        iterator.close()

    @pytest.mark.parametrize("other", ["iter", "close"])
    def test_start_in_another_thread_leaves_one_iteration_at_most(self, other: str) -> None:
        for _ in range(4):
            loader = loader_of(sampler=(sampler := CountsIterators()))
            both = threading.Barrier(2)

            def start(loader: Any = loader, both: threading.Barrier = both) -> None:
                both.wait(HANG_S)
                loader.start()

            thread = threading.Thread(target=start)
            thread.start()
            both.wait(HANG_S)
            if other == "close":
                loader.close()
            else:
                iterator = iter(loader)
                thread.join(HANG_S)
                assert sampler.iterators == 1
                assert len(list(iterator)) == 8
            thread.join(HANG_S)
            assert len(epochs(loader, 1)[0]) == 8
            loader.start()
            workers = workers_of(loader)
            assert len(workers) == 4
            del loader, start, thread, both
            gc.collect()
            assert not any_runs(workers)

    @with_and_without_persistent_workers
    def test_a_started_loader_that_is_closed_or_dropped_leaves_no_process(self, persistent: bool) -> None:
        before = psutil.Process().children()
        loader = loader_of(persistent_workers=persistent)
        loader.start()
        assert len(psutil.Process().children()) == len(before) + 4
        loader.close()
        assert psutil.Process().children() == before
        loader.start()
        del loader
        gc.collect()
        assert psutil.Process().children() == before

    @with_and_without_persistent_workers
    def test_ctrl_c_during_start_leaves_no_process_and_a_loader_that_can_begin(
        self, persistent: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        add, before = WorkerSet._add, psutil.Process().children()

        def struck(self: WorkerSet, peer: Any, *rest: Any, **more: Any) -> None:
            add(self, peer, *rest, **more)
            if peer.worker_id == 2:
                signal.raise_signal(signal.SIGINT)

        loader = loader_of(persistent_workers=persistent)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(WorkerSet, "_add", struck)
            loader.start()
        gc.collect()
        assert psutil.Process().children() == before
        assert len(epochs(loader, 1)[0]) == 8

    @pytest.mark.parametrize("killed", [1, 4])
    def test_workers_killed_between_start_and_iter_cost_no_batch(self, killed: int) -> None:
        expected = epochs(seeded_loader(), 1)
        loader = seeded_loader()
        loader.start()
        for worker in workers_of(loader)[:killed]:
            worker.kill()
        assert_same(epochs(loader, 1), expected)

    def test_copies_of_a_started_loader_are_independent_of_it(self) -> None:
        loader = loader_of()
        loader.start()
        for other in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
            other.start()
            assert not {worker.pid for worker in workers_of(loader)} & {worker.pid for worker in workers_of(other)}
            assert len(epochs(other, 1)[0]) == 8
        assert len(epochs(loader, 1)[0]) == 8


class TestSpawnedWorkers:
    @each_spawning_method
    def test_a_dataset_is_pickled_once_for_all_workers_and_its_pickle_is_gone_when_they_have_it(
        self, method: str
    ) -> None:
        expected = epochs(seeded_loader(num_workers=0), 1)
        loader = seeded_loader(dataset=Pickled(), multiprocessing_context=method, num_workers=3)
        iterator = iter(loader)
        assert Pickled.pickles == 1
        assert setup_files() == 0
        assert_same([[batch.clone() for batch in iterator]], expected)
        assert Pickled.pickles == 1

    def test_workers_hold_nothing_of_the_pickle_when_they_have_started(self) -> None:
        loader = loader_of(num_workers=2, multiprocessing_context="spawn", persistent_workers=True)
        epochs(loader, 1)
        started = [worker.pid for worker in loader._live()[-1].workers_now() if worker.doing != "starting"]
        assert started
        assert all(setup_files(pid) == 0 for pid in started if pid is not None)

    @each_spawning_method
    def test_the_trainer_does_not_wait_for_a_worker_that_reads_a_large_dataset(
        self, method: str, tmp_path: Path
    ) -> None:
        os.mkfifo(fifo := tmp_path / "go")
        dataset = WaitsInWorker(fifo)
        with os.fdopen(os.open(fifo, os.O_RDWR), "wb", buffering=0) as go:
            loader = loader_of(dataset, num_workers=2, multiprocessing_context=method)
            loader.start()
            go.write(b"\0")
            assert len(epochs(loader, 1)[0]) == 8

    def test_workers_that_are_killed_while_they_start_are_replaced(self) -> None:
        expected = epochs(seeded_loader(), 1)
        loader = seeded_loader(dataset=Pickled(), num_workers=2, multiprocessing_context="spawn")
        loader.start()
        for worker in workers_of(loader):
            worker.kill()
        assert_same(epochs(loader, 1), expected)
        assert Pickled.pickles > 1

    def test_a_method_of_the_dataset_as_init_function_works_on_the_workers_dataset(self) -> None:
        dataset = Scaled()
        more = {"num_workers": 2, "worker_init_fn": dataset.set_factor, "multiprocessing_context": "spawn"}
        found = torch.cat(epochs(loader_of(dataset, shuffle=False, **more), 1)[0])
        assert found[:, 0].tolist() == [5.0 * index for index in range(64)]

    def test_a_dataset_with_tensors_locks_and_pipes_reaches_every_worker(self) -> None:
        loader = loader_of(dataset := ForOneProcess(), num_workers=2, multiprocessing_context="spawn")
        found = torch.cat(epochs(loader, 1)[0])
        assert sorted(found[:, 0].tolist()) == list(range(64))
        assert sorted(dataset.ends[0].recv() for _ in range(64)) == list(range(64))
        for end in dataset.ends:
            end.close()

    def test_a_dataset_that_cannot_be_pickled_raises_what_torch_raises(self) -> None:
        raised = []
        for maker in (torch.utils.data.DataLoader, penstock.DataLoader):
            dataset: Any = Scaled()
            dataset.transform = lambda sample: sample
            with pytest.raises(Exception, match="lambda") as error, pytest.warns(UserWarning, match="pickle"):
                iter(maker(dataset, num_workers=2, multiprocessing_context="spawn"))
            raised.append((error.type, str(error.value)))
        assert raised[0] == raised[1]
        assert setup_files() == 0

    @pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
    def test_what_only_one_process_can_unpickle_is_not_shared(self, strategy: str) -> None:
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy(strategy)
        try:
            for thing in (torch.ones(3), [torch.nn.Parameter(torch.ones(3))], torch.ones(3).untyped_storage()):
                assert SharedPickle.of(thing) is None
        finally:
            torch.multiprocessing.set_sharing_strategy(before)
        read, write = torch.multiprocessing.get_context("spawn").Pipe()
        assert SharedPickle.of(read) is None
        assert SharedPickle.of(lambda: None) is None
        assert setup_files() == 0
        read.close()
        write.close()

    def test_ctrl_c_while_the_dataset_is_pickled_leaves_nothing(self) -> None:
        before = psutil.Process().children()
        loader = loader_of(Pickled(signal.SIGINT), num_workers=2, multiprocessing_context="spawn")
        with pytest.raises(KeyboardInterrupt):
            loader.start()
        assert psutil.Process().children() == before
        assert setup_files() == 0
        assert get_spawning_popen() is None

    def test_ctrl_c_while_workers_start_side_by_side_leaves_no_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = psutil.Process().children()
        loader = loader_of(num_workers=3, multiprocessing_context="spawn")
        clear, cleared = Board.clear, []

        def struck(self: Any, worker_id: int) -> None:
            clear(self, worker_id)
            cleared.append(worker_id)
            if worker_id == 1:
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(Board, "clear", struck)
        with pytest.raises(KeyboardInterrupt):
            loader.start()
        gc.collect()
        assert cleared == [0, 1]
        # The second one was not the loader's yet: it ends by itself.
        left = [process for process in psutil.Process().children() if process not in before]
        assert not psutil.wait_procs(left, HANG_S)[1]
        assert setup_files() == 0
