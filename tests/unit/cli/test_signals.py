"""Ctrl-C waits for the command to ask, but not for ever."""

from __future__ import annotations

import os
import signal

import pytest

from penstock.cli.signals import ctrl_c_on_request


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_nothing_happens_until_the_command_asks() -> None:
    after = ""
    with pytest.raises(KeyboardInterrupt), ctrl_c_on_request() as raise_if_pressed:
        raise_if_pressed()
        press()
        after = "still running"
        raise_if_pressed()
    assert after == "still running"


def test_a_press_that_the_command_did_not_ask_about_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt), ctrl_c_on_request():
        press()


def test_pressed_twice_it_does_not_wait() -> None:
    with pytest.raises(KeyboardInterrupt), ctrl_c_on_request():
        press()
        press()
        pytest.fail("the second press was ignored")


def test_the_former_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with ctrl_c_on_request():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
def test_a_forked_worker_is_left_to_its_parent() -> None:
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
