"""Which kernels may kill a worker when its trainer has ended."""

from __future__ import annotations

import fcntl
import os
import sys

import pytest

from penstock.workers.lifeline import Lifeline

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux sends a chosen signal at a pipe's end")


@pytest.mark.parametrize("release", ["4.18.0-553.el8_10.x86_64", "5.4.0-150-generic", "5.5", "3.10"])
def test_kernels_that_would_kill_all_workers_when_one_ends_are_not_asked_to_kill_any(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(fcntl, "fcntl", lambda fd, what, *more: asked.append(what))
    line = Lifeline()
    assert not line.tie().hold(release)
    assert not asked
    line.close()


@pytest.mark.parametrize("release", ["5.6.0", "5.15.0-1-amd64", "6.1", "10.0.1", "unknown"])
def test_other_kernels_are_asked(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(fcntl, "fcntl", lambda fd, what, *more: asked.append(fd))
    line = Lifeline()
    assert line.tie().hold(release)
    os.close(asked[0])
    line.close()
