"""Workers: how they start, what they know of themselves, how long they live, how they are started."""

from __future__ import annotations

import contextlib
import gc
import inspect
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.utils.data.dataloader

from support.datasets.contract import (
    AfterAllStarted,
    Diary,
    Rendezvous,
    Samples,
    SeesInit,
    Sleeps,
    Whereabouts,
    as_list,
    broken_init,
    broken_init_of_worker_1,
    seeded,
)
from support.loaders import MAKERS, MakeLoader
from support.torch_oracle import TORCH, WORKER_ERROR, assert_identical, events

PID, WORKER, OF, DAEMON, GENERATION, INDEX = range(6)
"""Columns of a batch of `Whereabouts`."""

GONE_S = 10.0
"""A worker that has nothing to do is gone long before this; only a failing test waits for it."""


def pids(batches: list[torch.Tensor]) -> set[int]:
    return {int(pid) for batch in batches for pid in batch[:, PID]}


@pytest.fixture
def no_collection() -> Iterator[None]:
    """The last reference must do: a cycle would keep workers and memory until the collector comes by."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def assert_gone(workers: set[int]) -> None:
    processes = []
    for pid in workers:
        try:
            processes.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            pass
    _, alive = psutil.wait_procs(processes, timeout=GONE_S)
    assert not alive


def await_end(workers: set[int]) -> None:
    """Wait for processes to end, without taking their exit status from whoever started them."""
    deadline_s = time.monotonic() + GONE_S
    for pid in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def await_entries(diary: Diary, count: int) -> list[tuple[int, dict[str, Any]]]:
    """A worker may still be starting while the others do all the work."""
    deadline_s = time.monotonic() + GONE_S
    while len(entries := diary.entries()) < count and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return entries


# --- start --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_starts_seeded_single_threaded_and_informed_as_torchs_do(
    persistent: bool, tmp_path: Path, penstock_maker: MakeLoader
) -> None:
    found = []
    for name, make in (("torch", TORCH), ("penstock", penstock_maker)):
        Path(tmp_path, name).mkdir()
        diary = Diary(Path(tmp_path, name))
        generator = torch.Generator().manual_seed(7)
        data = AfterAllStarted(diary)
        loader = make(
            data, batch_size=2, num_workers=3, worker_init_fn=diary,
            generator=generator, persistent_workers=persistent,
        )  # fmt: skip
        for started in (3, 3 if persistent else 6):
            data.expected = started
            assert len(list(loader)) == 6
        found.append([entry for _, entry in diary.entries()])
    theirs, ours = found
    assert len(theirs) == (3 if persistent else 6)
    assert sorted(ours, key=repr) == sorted(theirs, key=repr)
    assert {entry["threads"] for entry in ours} == {1}


def test_worker_init_fn_runs_before_an_iterable_dataset_is_iterated(any_maker: MakeLoader, tmp_path: Path) -> None:
    assert list(any_maker(SeesInit(), batch_size=None, num_workers=2, worker_init_fn=Diary(tmp_path))) == [True] * 2


@pytest.mark.parametrize("num_workers", [1, 3])
def test_worker_info_identifies_each_worker_and_workers_are_daemons(num_workers: int, any_maker: MakeLoader) -> None:
    rows = torch.cat(list(any_maker(Whereabouts(), batch_size=2, num_workers=num_workers)))
    assert os.getpid() not in rows[:, PID].tolist()
    assert set(rows[:, WORKER].tolist()) <= set(range(num_workers))
    assert set(rows[:, OF].tolist()) == {num_workers}
    assert set(rows[:, DAEMON].tolist()) == {1}
    ids_by_pid = {(pid, worker) for pid, worker in rows[:, [PID, WORKER]].tolist()}
    assert len({pid for pid, _ in ids_by_pid}) == len(ids_by_pid)


def test_worker_info_is_for_workers_only(any_maker: MakeLoader) -> None:
    rows = torch.cat(list(any_maker(Whereabouts(), batch_size=2)))
    assert set(rows[:, PID].tolist()) == {os.getpid()}
    assert set(rows[:, WORKER].tolist()) == {-1}
    for _ in any_maker(Whereabouts(), batch_size=2, num_workers=2):
        assert torch.utils.data.get_worker_info() is None
    assert torch.utils.data.get_worker_info() is None


def test_a_handler_of_sigterm_in_the_training_process_does_not_run_in_workers(
    any_maker: MakeLoader, tmp_path: Path
) -> None:
    """Clusters send SIGTERM to all processes of a job, and trainings save a checkpoint then."""
    handled = tmp_path / "handled"
    before = signal.signal(signal.SIGTERM, lambda *_: handled.touch())
    try:
        iterator = iter(any_maker(Whereabouts(200), batch_size=2, num_workers=2))
        workers = pids([next(iterator), next(iterator)])
        # torch raises as soon as it notices.
        with contextlib.suppress(RuntimeError):
            for worker in workers:
                os.kill(worker, signal.SIGTERM)
            await_end(workers)
        with contextlib.suppress(RuntimeError):
            del iterator
        await_end(workers)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not handled.exists()


def test_an_error_in_worker_init_fn_comes_with_the_first_batch_not_before(any_maker: MakeLoader) -> None:
    iterator = iter(any_maker(range(8), num_workers=2, worker_init_fn=broken_init))
    with pytest.raises(RuntimeError, match=r"worker \d cannot start") as caught:
        next(iterator)
    assert WORKER_ERROR.match(str(caught.value))


def test_a_worker_that_cannot_start_fails_its_own_first_batch(any_maker: MakeLoader) -> None:
    if any_maker is MAKERS["batch"]:
        pytest.skip("which batch is a worker's first is torch's assignment, or worker seeding's")
    loader = any_maker(range(8), batch_size=2, num_workers=2, worker_init_fn=broken_init_of_worker_1)
    first, second, *_ = events(loader)
    assert first.error is None
    assert (second.error, second.caught) == (RuntimeError, "RuntimeError")
    assert "worker 1 cannot start" in second.says


def test_worker_seeding_gives_batches_to_workers_in_turn() -> None:
    for make in (TORCH, MAKERS["worker"]):
        batches = list(make(Whereabouts(24), batch_size=2, num_workers=3))
        assert [batch[:, WORKER].tolist() for batch in batches] == [[place % 3] * 2 for place in range(12)]


# --- life ---------------------------------------------------------------------------------------------------


def test_workers_are_gone_after_the_epoch(any_maker: MakeLoader) -> None:
    before = children()
    loader = any_maker(Whereabouts(), batch_size=2, num_workers=2)
    first = pids(list(loader))
    assert_gone(first)
    assert_gone(children() - before)
    second = pids(list(loader))
    assert not first & second


def test_workers_are_gone_when_an_unfinished_iterator_is_dropped(any_maker: MakeLoader) -> None:
    before = children()
    iterator = iter(any_maker(Whereabouts(200), batch_size=2, num_workers=2))
    workers = pids([next(iterator)])
    assert all(psutil.pid_exists(pid) for pid in workers)
    del iterator
    assert_gone(workers)
    assert_gone(children() - before)


def test_workers_are_gone_after_a_break_in_the_loop(any_maker: MakeLoader) -> None:
    before = children()
    workers: set[int] = set()
    for batch in any_maker(Whereabouts(200), batch_size=2, num_workers=2):
        workers = pids([batch])
        break
    assert workers
    assert_gone(workers)
    assert_gone(children() - before)


def test_persistent_workers_and_their_iterator_stay(any_maker: MakeLoader, tmp_path: Path) -> None:
    data, diary = Whereabouts(), Diary(tmp_path)
    loader = any_maker(data, batch_size=2, num_workers=2, persistent_workers=True, worker_init_fn=diary)
    iterator = iter(loader)
    started = pids(list(iterator))
    data.generation = 1
    assert iter(loader) is iterator
    again = list(iterator)
    assert [batch[:, INDEX].tolist() for batch in again] == [[i, i + 1] for i in range(0, 12, 2)]
    assert {int(g) for batch in again for g in batch[:, GENERATION]} == {0}, "the workers got a new dataset"
    entries = await_entries(diary, 2)
    assert len(entries) == 2, "worker_init_fn ran again"
    everyone = {pid for pid, _ in entries}
    assert started | pids(again) <= everyone
    assert all(psutil.pid_exists(pid) for pid in everyone)
    del loader, iterator
    gc.collect()
    assert_gone(everyone)


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("persistent", [False, True], ids=["passing", "persistent"])
def test_workers_are_gone_with_the_last_reference_to_their_loader(persistent: bool, any_maker: MakeLoader) -> None:
    before = children()
    loader = any_maker(Whereabouts(200), batch_size=2, num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    next(iterator)
    workers = children() - before
    assert workers
    del iterator, loader
    assert_gone(workers)


def test_a_batch_that_waits_for_others_does_not_hold_them_up(any_maker: MakeLoader) -> None:
    assert sorted(int(batch) for batch in any_maker(Rendezvous(4), num_workers=4, timeout=60)) == [0, 1, 2, 3]


def test_a_persistent_iterator_can_be_restarted_midway(any_maker: MakeLoader) -> None:
    loader = any_maker(range(20), batch_size=2, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    for _ in range(3):
        assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        assert iter(loader) is iterator
    assert len(list(iterator)) == 10
    assert len(list(loader)) == 10


def test_new_workers_see_the_dataset_as_it_is_at_iter(any_maker: MakeLoader) -> None:
    data = Whereabouts()
    loader = any_maker(data, batch_size=2, num_workers=2)
    for generation in range(2):
        data.generation = generation
        batches = list(loader)
        assert {int(g) for batch in batches for g in batch[:, GENERATION]} == {generation}


def test_two_live_iterators_have_workers_of_their_own(any_maker: MakeLoader) -> None:
    loader = any_maker(Whereabouts(8), batch_size=2, num_workers=2)
    one, two = iter(loader), iter(loader)
    assert one is not two
    pairs = list(zip(one, two, strict=True))
    assert all(our[:, INDEX].tolist() == their[:, INDEX].tolist() for our, their in pairs)
    assert not pids([our for our, _ in pairs]) & pids([their for _, their in pairs])


def test_two_loaders_over_one_dataset_do_not_disturb_each_other(any_maker: MakeLoader) -> None:
    data = list(range(12))
    for one, two in zip(
        any_maker(data, batch_size=3, num_workers=2),
        any_maker(data, batch_size=3, num_workers=1),
        strict=True,
    ):
        assert one.tolist() == two.tolist()


def test_a_loader_can_be_iterated_inside_its_own_loop(any_maker: MakeLoader) -> None:
    loader = any_maker(range(6), batch_size=3, num_workers=1)
    assert [[b.tolist() for b in loader] for _ in loader] == [[[0, 1, 2], [3, 4, 5]]] * 2


# --- timeout ------------------------------------------------------------------------------------------------


def test_a_batch_that_takes_longer_than_the_timeout_is_an_error_that_names_it(any_maker: MakeLoader) -> None:
    iterator = iter(any_maker(Sleeps([0, 4, 0, 0]), num_workers=1, timeout=1))
    assert next(iterator).item() == 0
    with pytest.raises(RuntimeError, match="DataLoader timed out after 1 seconds"):
        next(iterator)


def test_the_timeout_applies_to_each_wait_separately(any_maker: MakeLoader) -> None:
    delays = [0.3] * 8  # one worker: 2.4 s in all
    assert len(list(any_maker(Sleeps(delays), num_workers=1, timeout=2))) == 8


# --- start methods ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_every_start_method_gives_the_same_batches(method: str) -> None:
    data = Samples(seeded, 10)

    def batches(make: MakeLoader, num_workers: int, **given: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(5)
        return list(make(data, batch_size=3, num_workers=num_workers, generator=generator, **given))

    by_name = batches(MAKERS["batch"], 2, multiprocessing_context=method)
    assert_identical(by_name, batches(MAKERS["batch"], 0))
    context = multiprocessing.get_context(method)
    by_context = batches(MAKERS["worker"], 2, multiprocessing_context=context, collate_fn=as_list)
    assert_identical(by_context, batches(TORCH, 2, collate_fn=as_list))


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_dataset_that_cannot_be_pickled_is_an_error_at_iter(method: str, any_maker: MakeLoader) -> None:
    before = children()
    loader = any_maker(Samples(lambda i: i, 4), num_workers=1, multiprocessing_context=method)
    # torch 2.6 has the error without the warning.
    warns = any_maker is not TORCH or "Got pickle error" in inspect.getsource(torch.utils.data.dataloader)
    with (
        pytest.warns(UserWarning, match="Got pickle error") if warns else contextlib.nullcontext(),
        pytest.raises(Exception, match=r"pickle|lambda"),
    ):
        iter(loader)
    infrastructure = {"resource_tracker", "forkserver"}
    left = [psutil.Process(pid) for pid in children() - before if psutil.pid_exists(pid)]
    assert not [child for child in left if not any(name in " ".join(child.cmdline()) for name in infrastructure)]
