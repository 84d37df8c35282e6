"""Iterations that are cut short at any moment, from any thread, by any exception: never a hang, and the same loader
iterates again."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import penstock
from penstock.errors import BudgetError
from penstock.loader.engine.integrity import IterationBroken
from penstock.loader.gauges import workers_now
from penstock.workers.process_worker import ProcessWorker
from support.faults import processes
from support.faults.leaks import no_leaks  # noqa: F401  (a fixture for every test here)

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, count: int, values: int = 1) -> None:
        self.count, self.values = count, values

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.values,), index)


class Blocked(Numbers):
    """Samples from ``first`` on come only when the test allows."""

    def __init__(self, count: int, first: int) -> None:
        super().__init__(count)
        self.first, self.allowed = first, torch.multiprocessing.get_context("fork").Event()

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.first:
            self.allowed.wait()
        return super().__getitem__(index)


# -- Ctrl-C ---------------------------------------------------------------------------------

KINDS = {"tiny": (Numbers(800), 8), "large": (Numbers(48, 1 << 16), 8)}


def strike(seed: int, trials: int) -> None:
    """Iterate ``trials`` loaders, each five times up to a random moment and then to the end."""
    # Python itself drops a Ctrl-C that strikes inside a weak reference's callback.
    sys.unraisablehook = lambda met: None if isinstance(met.exc_value, KeyboardInterrupt) else print(met)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    warnings.simplefilter("ignore")
    moments = random.Random(seed)
    struck = 0
    for trial in range(trials):
        dataset, batch_size = list(KINDS.values())[trial % 2]
        faulthandler.dump_traceback_later(120, exit=True)
        loader = penstock.DataLoader(
            dataset, batch_size=batch_size, num_workers=2, persistent_workers=trial % 4 < 2, memory="64MB"
        )
        began = time.monotonic()
        check_all(loader, len(dataset), batch_size)
        takes_s = time.monotonic() - began
        for _ in range(5):
            struck += interrupt(loader, moments, takes_s)
            began = time.monotonic()
            check_all(loader, len(dataset), batch_size)
            takes_s = time.monotonic() - began
        loader.close()
    faulthandler.cancel_dump_traceback_later()
    assert struck > trials


def check_all(loader: Any, count: int, batch_size: int) -> None:
    expected = 0
    for batch in loader:
        assert batch[:, 0].tolist() == list(range(expected, expected + batch_size))
        assert bool((batch == batch[:, :1]).all())
        expected += batch_size
    assert expected == count


def interrupt(loader: Any, moments: random.Random, within_s: float) -> int:
    """Begin an iteration and interrupt it; 1 if it was not over by then."""
    iterator: Any = None
    struck = 0
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.0001, within_s))
            iterator = iter(loader)
            for _ in iterator:
                pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        struck = 1
    if iterator is not None and moments.random() < 0.3:
        with contextlib.suppress(IterationBroken):
            next(iterator, None)
    return struck


def in_a_process(target: Any, *args: Any) -> None:
    """Run ``target`` in a process of its own, which must end well and print nothing."""
    with tempfile.TemporaryFile() as printed:

        def run() -> None:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            sys.stdout = sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
            target(*args)

        process = torch.multiprocessing.get_context("fork").Process(target=run)
        process.start()
        process.join()
        printed.seek(0)
        text = printed.read().decode()
        # In whole: where each thread hung.
        print(text)
        assert (process.exitcode, text) == (0, "")


def test_ctrl_c_at_random_moments_loses_no_batch_of_the_next_iteration_and_hangs_nothing() -> None:
    in_a_process(strike, 1, 4)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_ctrl_c_at_hundreds_of_random_moments_loses_no_batch_and_hangs_nothing(seed: int) -> None:
    in_a_process(strike, 10 + seed, 12)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_change_of_the_engine_that_was_cut_short_ends_the_iteration_but_not_the_loader(
    persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with penstock.DataLoader(Numbers(400), batch_size=4, num_workers=2, persistent_workers=persistent) as loader:
        iterator: Any = iter(loader)
        next(iterator)
        settlement = iterator.engine._settlement
        monkeypatch.setattr(settlement, "take_ready", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        monkeypatch.undo()
        for _ in range(2):
            with pytest.raises(IterationBroken, match="iterate the loader again"):
                next(iterator)
        assert [batch.flatten().tolist() for batch in loader] == [[i, i + 1, i + 2, i + 3] for i in range(0, 400, 4)]


# -- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_an_error_in_the_engines_own_thread_is_raised_by_next_and_the_loader_iterates_again(persistent: bool) -> None:
    with penstock.DataLoader(
        Blocked(40, first=8), batch_size=4, num_workers=2, persistent_workers=persistent
    ) as loader:
        iterator: Any = iter(loader)
        next(iterator)

        failed = threading.Event()

        def fails() -> bool:
            if threading.current_thread().name == "penstock-engine" and not failed.is_set():
                failed.set()
                raise OSError(5, "the device is gone")
            return False

        iterator.engine.watch_device(fails)
        loader.dataset.allowed.set()  # type: ignore[attr-defined]
        assert failed.wait(60)
        with pytest.raises(IterationBroken, match=r"iterate the loader again.*OSError: .*the device is gone") as caught:
            while True:
                next(iterator)
        assert isinstance(caught.value.__cause__, OSError)
        assert sum(len(batch) for batch in loader) == 40


def test_a_warning_that_is_an_error_is_raised_once_and_every_batch_still_comes() -> None:
    for collate in (None, stacked):
        loader = penstock.DataLoader(
            Numbers(24, 1 << 17), batch_size=8, num_workers=2, memory="1MB", collate_fn=collate
        )
        raised, firsts = 0, []
        with loader, warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            batches = iter(loader)
            while True:
                try:
                    firsts.append(int(next(batches)[0, 0]))
                except StopIteration:
                    break
                except RuntimeWarning as warning:
                    assert "batches pass one at a time" in str(warning)
                    raised += 1
        assert (raised, firsts) == (1, [0, 8, 16])


def test_a_warning_names_the_line_of_the_loop() -> None:
    with (
        penstock.DataLoader(Numbers(16, 1 << 17), batch_size=8, num_workers=1, memory="1MB") as loader,
        pytest.warns(RuntimeWarning, match="pass one at a time") as warned,
    ):
        assert len(list(loader)) == 2
    # Python 3.12 warns of forks too.
    assert [each.filename for each in warned if each.category is RuntimeWarning] == [__file__]


class Growing(Numbers):
    """Every batch is larger than the one before, so that each takes a segment of its own."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2000 + index // 8 * 3000,), index)


def stacked(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples)


def run_out_of_descriptors() -> None:
    faulthandler.dump_traceback_later(120, exit=True)
    loader = penstock.DataLoader(Growing(400), batch_size=8, num_workers=2, collate_fn=stacked)
    batches = iter(loader)
    kept = [next(batches)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open("/dev/null", os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 20, hard))
    with contextlib.suppress(OSError):
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    refused = None
    while refused is None:
        try:
            kept.append(next(batches))
        except BudgetError as error:
            refused = str(error)
    assert "Too many open files" in refused and "ulimit -n" in refused
    for fd in held:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    kept += batches
    assert [int(batch[0, 0]) for batch in kept] == list(range(0, 400, 8))
    faulthandler.cancel_dump_traceback_later()


def test_running_out_of_descriptors_is_an_error_and_the_loop_goes_on_when_there_are_some_again() -> None:
    in_a_process(run_out_of_descriptors)


# -- closing ------------------------------------------------------------------------------------


@pytest.fixture
def exit_codes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int | None]]:
    """The exit codes of all workers that are reaped."""
    codes: list[int | None] = []
    reap = ProcessWorker.reap

    def noted(self: ProcessWorker, deadline_s: float) -> int | None:
        codes.append(reap(self, deadline_s))
        return codes[-1]

    monkeypatch.setattr(ProcessWorker, "reap", noted)
    yield codes


class Texts(Numbers):
    def __getitem__(self, index: int) -> Any:
        return "x" * self.values


@pytest.mark.parametrize("text_bytes", [4_000, 100_000])
def test_workers_that_are_sending_texts_end_by_themselves_when_the_loop_is_left(
    text_bytes: int, exit_codes: list[int | None]
) -> None:
    for taken in (1, 3):
        batches = iter(penstock.DataLoader(Texts(10_000, text_bytes), batch_size=64, num_workers=2))
        for _ in range(taken):
            next(batches)
        del batches
    assert exit_codes == [0] * 4


class KeepsMuch(torch.utils.data.IterableDataset[Any]):
    """A stream whose state, which travels with every batch, is large."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10_000))

    def state_dict(self) -> dict[str, Any]:
        return {"buffer": os.urandom(1 << 20)}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def as_objects(samples: list[Any]) -> list[Any]:
    """A batch that is a large pickle."""
    return [{str(number): [number] * 20 for number in range(2000)} for _ in samples]


@pytest.mark.parametrize(
    "given",
    [{"dataset": KeepsMuch()}, {"dataset": Numbers(10_000), "collate_fn": as_objects}],
    ids=["state", "objects"],
)
def test_workers_that_are_sending_a_large_report_end_by_themselves_when_the_loop_is_left(
    given: dict[str, Any], exit_codes: list[int | None]
) -> None:
    for taken in (1, 3):
        batches = iter(penstock.DataLoader(**given, batch_size=8, num_workers=2))
        for _ in range(taken):
            next(batches)
        del batches
    assert exit_codes == [0] * 4


def when_it_waits(loader: Any, act: Callable[[], None]) -> None:
    """Iterate the loader, and ``act`` in another thread when the loop waits for a batch."""

    def watch() -> None:
        while loader._counters.waits_since_s is None:
            time.sleep(0.001)
        act()

    acting = threading.Thread(target=watch)
    acting.start()
    assert not list(loader)
    acting.join()


def close_in_a_handler(loader: Any) -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: loader.close())
    try:
        when_it_waits(loader, lambda: os.kill(os.getpid(), signal.SIGALRM))
    finally:
        signal.signal(signal.SIGALRM, before)


def close_in_a_thread(loader: Any) -> None:
    when_it_waits(loader, loader.close)


@pytest.mark.parametrize("close", [close_in_a_handler, close_in_a_thread])
def test_closing_a_loader_that_waits_for_a_batch_ends_its_loop(close: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Blocked(16, first=0)
    loader = penstock.DataLoader(dataset, batch_size=4, num_workers=2)
    stop = ProcessWorker.stop

    def stop_and_allow(self: ProcessWorker) -> None:
        stop(self)
        # A worker that is in the middle of a sample would be killed after seconds.
        dataset.allowed.set()

    monkeypatch.setattr(ProcessWorker, "stop", stop_and_allow)
    close(loader)
    assert not loader.state_dict()["finished"]


def test_a_handler_may_close_the_loader_in_the_middle_of_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = penstock.DataLoader(Numbers(400), batch_size=4, num_workers=2)
    batches: Any = iter(loader)
    next(batches)
    take_ready = batches.engine._settlement.take_ready

    def interrupted() -> Any:
        loader.set_memory("32MB")
        loader.close()
        return take_ready()

    monkeypatch.setattr(batches.engine._settlement, "take_ready", interrupted)
    assert not list(batches)


def test_an_error_that_ends_the_epoch_leaves_the_loader_usable() -> None:
    with penstock.DataLoader(Numbers(40), batch_size=4, num_workers=2, persistent_workers=True) as loader:
        iterator: Any = iter(loader)
        next(iterator)
        iterator.engine._admission.fail(BudgetError("no memory left"))
        with pytest.raises(BudgetError, match="no memory left"):
            for _ in iterator:
                pass
        assert sum(len(batch) for batch in loader) == 40


def test_an_error_of_an_epoch_that_was_left_while_workers_were_busy_is_not_raised_in_the_next_one() -> None:
    dataset = Blocked(40, first=8)
    with penstock.DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True) as loader:
        iterator: Any = iter(loader)
        next(iterator)
        processes.until(lambda: sum(now.doing == "fetching" for now in workers_now(loader)) == 2, 60)
        iterator.engine._admission.fail(BudgetError("no memory left"))
        allowing = threading.Timer(0.1, dataset.allowed.set)
        allowing.start()
        assert sum(len(batch) for batch in loader) == 40
        allowing.join()
