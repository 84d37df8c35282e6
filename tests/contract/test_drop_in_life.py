"""Life and death: leaving Python is silent, and no worker outlives its trainer, however that one ends."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from support.loaders import MAKERS, MakeLoader
from support.ready_python import ReadyProcess, ReadyPython

HERE = Path(__file__).parent
EXIT_S = 60.0
"""Leaving takes a moment; only a failing test waits this long."""

PROLOGUE = """
import os, sys, torch
from torch.utils.data import get_worker_info
import penstock
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        return torch.tensor([os.getpid(), index])
def loader(**given):
    return penstock.DataLoader(Data(), batch_size=4, num_workers=2, **given)
def tell(batch):
    print(*{int(pid) for pid in batch[:, 0]}, flush=True)
"""

ENDINGS = {
    "after a whole epoch": "for batch in loader(): tell(batch)",
    "after a break": """
        for batch in loader():
            tell(batch)
            break
        """,
    "with an iterator in a global": """
        iterator = iter(loader())
        kept = [next(iterator) for _ in range(5)]
        tell(kept[0])
        """,
    "with a persistent loader in a global": """
        training = loader(persistent_workers=True)
        for batch in training: pass
        for batch in training:
            tell(batch)
            break
        """,
    "with two loaders in a cycle": """
        class Trainer: pass
        trainer = Trainer()
        trainer.self, trainer.loaders = trainer, [loader(), loader(persistent_workers=True)]
        trainer.iterators = [iter(each) for each in trainer.loaders]
        trainer.batches = [next(each) for each in trainer.iterators]
        for batch in trainer.batches: tell(batch)
        """,
    "with an iterator that was never asked": "iterator = iter(loader())",
    "from a thread": """
        import threading
        def train():
            for batch in loader():
                tell(batch)
                break
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        """,
    "by sys.exit in the loop": """
        for batch in loader():
            tell(batch)
            sys.exit(0)
        """,
}


Start = Callable[[str], ReadyProcess]


@pytest.fixture
def start(python: ReadyPython) -> Start:
    return lambda script: python.start(PROLOGUE + textwrap.dedent(script), folder=HERE)


def assert_all_gone(pids: set[int]) -> None:
    alive = []
    for pid in pids:
        try:
            alive.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            pass
    _, alive = psutil.wait_procs(alive, timeout=EXIT_S)
    assert not alive


@pytest.mark.parametrize("ending", ENDINGS)
def test_python_ends_silently(ending: str, start: Start) -> None:
    with start(ENDINGS[ending]) as process:
        output, complaints = process.communicate()
    assert complaints == ""
    assert process.returncode == 0
    assert_all_gone({int(pid) for pid in output.split()})


def test_python_that_imports_torch_itself_ends_silently_too() -> None:
    script = PROLOGUE + textwrap.dedent(ENDINGS["with two loaders in a cycle"])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=HERE)
    assert (done.returncode, done.stderr) == (0, "")
    assert_all_gone({int(pid) for pid in done.stdout.split()})


def test_an_error_in_the_training_loop_is_all_that_is_printed(start: Start) -> None:
    script = "for batch in loader():\n    tell(batch)\n    raise LookupError('the loss is not a number')"
    with start(script) as process:
        output, complaints = process.communicate()
    assert process.returncode == 1
    assert complaints.count("Traceback") == 1
    assert complaints.strip().splitlines()[-1] == "LookupError: the loss is not a number"
    assert_all_gone({int(pid) for pid in output.split()})


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_workers_do_not_outlive_a_trainer_that_is_killed(death: signal.Signals, start: Start) -> None:
    script = """
        iterator = iter(loader(persistent_workers=True))
        next(iterator)
        import psutil, time
        print(*{child.pid for child in psutil.Process().children(recursive=True)}, flush=True)
        time.sleep(600)
        """
    with start(script) as process:
        workers = {int(pid) for pid in process.stdout.readline().split()}
        assert len(workers) >= 2
        process.send_signal(death)
        process.communicate()
    assert process.returncode != 0
    assert_all_gone(workers)


def leave_quietly() -> None:
    gc.collect()
    sys.exit(0)


def test_a_process_forked_from_the_trainer_takes_nothing_with_it(any_maker: MakeLoader) -> None:
    loader = any_maker(range(40), batch_size=4, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    kept = [next(iterator), next(iterator)]
    child = multiprocessing.get_context("fork").Process(target=leave_quietly)
    child.start()
    child.join(EXIT_S)
    assert child.exitcode == 0
    assert [batch.tolist() for batch in kept] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(list(iterator)) == 8
    assert len(list(loader)) == 10


def test_epochs_leave_no_processes_and_no_open_files_behind(any_maker: MakeLoader) -> None:
    me = psutil.Process()

    def epoch() -> tuple[int, int]:
        batches = list(any_maker(range(12), batch_size=4, num_workers=2))
        assert [len(batch) for batch in batches] == [4, 4, 4]
        del batches
        gc.collect()
        _, alive = psutil.wait_procs(me.children(recursive=True), timeout=0)
        return len(alive), me.num_fds()

    first = [epoch() for _ in range(2)][-1]
    last = [epoch() for _ in range(5)][-1]
    assert last[0] <= first[0]
    assert last[1] <= first[1] + 2


def test_closing_is_idempotent_and_ends_the_workers() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with MAKERS["batch"](range(400), batch_size=4, num_workers=2, persistent_workers=True) as loader:
        iterator = iter(loader)
        first = next(iterator)
        workers = {child.pid for child in psutil.Process().children(recursive=True)} - before
        assert len(workers) >= 2
        loader.close()
        loader.close()
    assert_all_gone(workers)
    assert first.tolist() == [0, 1, 2, 3]
    assert os.getpid() == psutil.Process().pid
