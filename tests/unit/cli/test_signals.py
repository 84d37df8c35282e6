"""Ctrl-C is raised when the command checks for it; a second press is raised at once."""

from __future__ import annotations

import os
import signal

import pytest

from penstock.cli.signals import ctrl_c_on_request


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_does_nothing_until_the_command_checks_for_it() -> None:
    after = ""
    with pytest.raises(KeyboardInterrupt), ctrl_c_on_request() as raise_if_pressed:
        raise_if_pressed()
        press()
        after = "still running"
        raise_if_pressed()
    assert after == "still running"


def test_ctrl_c_that_the_command_did_not_check_for_is_raised_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), ctrl_c_on_request():
        press()


def test_the_second_ctrl_c_is_raised_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), ctrl_c_on_request():
        press()
        press()
        pytest.fail("the second press was ignored")


def test_the_former_signal_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with ctrl_c_on_request():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
def test_a_forked_worker_ignores_ctrl_c() -> None:
    with ctrl_c_on_request():
        child = os.fork()
        if child == 0:
            try:
                press()
                press()
                os._exit(0)
            except BaseException:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
