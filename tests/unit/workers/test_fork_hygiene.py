"""Ctrl-C while a process is started."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from penstock.workers.fork_hygiene import ctrl_c_blocked, ctrl_c_held_back

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("block", [ctrl_c_held_back, ctrl_c_blocked])
def test_ctrl_c_inside_the_block_is_raised_once_at_its_end(block: type) -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), block():
        for step in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            steps.append(step)
    assert steps == [0, 1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_users_is_called_at_the_end_of_the_block() -> None:
    calls: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    with ctrl_c_blocked():
        os.kill(os.getpid(), signal.SIGINT)
        assert calls == []
    assert calls == [signal.SIGINT]


def test_ctrl_c_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ctrl_c_blocked():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_child_forked_inside_has_the_handler_of_its_parent() -> None:
    with ctrl_c_blocked():
        pid = os.fork()
        if not pid:
            os._exit(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)
    assert os.waitpid(pid, 0)[1] == 0


def test_other_threads_hold_nothing_back() -> None:
    handlers = []

    def look() -> None:
        with ctrl_c_held_back():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
