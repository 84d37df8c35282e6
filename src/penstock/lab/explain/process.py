"""The process that measures for an explanation: it has nothing else in memory, and can be ended at any time.

In:  a ``Job``.
Out: ``Explained``, or an error in one line.
Runs in: command line, which starts the child, listens to it and ends it; the child.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import click

from penstock.cli.target import TargetError, unreadable
from penstock.errors import PenstockError
from penstock.lab.explain.job import Explained, Job
from penstock.workers.fork_hygiene import ctrl_c_blocked

_LEAVE_WITHIN_S = 5.0


def measure(job: Job, on_progress: Callable[[str, float], None]) -> Explained:
    """Run the job in a child. ``on_progress`` gets the current step and the share that is done, at least every 0.2 s;
    an exception it raises ends the child and all processes that the child started."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(theirs, job))
    with ctrl_c_blocked():
        child.start()
    theirs.close()
    try:
        told: tuple[str, float] = (f"starting {job.target}", 0.0)
        while True:
            if ours.poll(0.2):
                kind, content = ours.recv()
                if kind == "done":
                    child.join(_LEAVE_WITHIN_S)
                    return content
                if kind == "wrong":
                    raise click.BadParameter(content, param_hint="TARGET")
                if kind == "failed":
                    raise PenstockError(content)
                told = content
            on_progress(*told)
    except EOFError:
        child.join(_LEAVE_WITHIN_S)
        raise PenstockError(
            f"the process that measured {job.target} ended with exit code {child.exitcode}"
            + (
                ": killed, most likely because memory ran out; lower --batch-size or --workers"
                if child.exitcode == -9
                else ""
            )
        ) from None
    finally:
        # The child notices the closed pipe at its next batch; a child that is stuck in the user's code is killed with
        # its workers.
        ours.close()
        child.join(_LEAVE_WITHIN_S)
        if child.is_alive():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid or 0, signal.SIGKILL)
            child.kill()
        child.join()


class _Left(BaseException):
    """The command line no longer listens."""


class _ProgressPipe:
    """What the child says."""

    def __init__(self, line: Connection) -> None:
        self._line = line
        self._said_s = 0.0

    def say(self, kind: str, content: Any) -> None:
        try:
            self._line.send((kind, content))
        except OSError:
            raise _Left from None

    def progress(self, what: str, done: float) -> None:
        # With thousands of batches a second, not every batch is reported.
        now_s = time.monotonic()
        if now_s - self._said_s > 0.05:
            self._said_s = now_s
            self.say("progress", (what, done))


def _child(line: Connection, job: Job) -> None:
    if hasattr(os, "setsid"):
        # Ctrl-C goes to the command line alone, which ends this whole group if it must.
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # Workers start with the start method of the user's own program, not with that of this process.
    multiprocessing.set_start_method(None, force=True)
    # Output of the user's code must not become part of the answer.
    os.dup2(2, 1)
    said = _ProgressPipe(line)
    try:
        from penstock.lab.explain.measure import measure_here

        said.say("done", measure_here(job, said.progress))
    except _Left:
        return
    except click.BadParameter as wrong:
        _last_words(said, "wrong", wrong.message)
    except TargetError as error:
        _last_words(said, "failed", str(error))
    except Exception as error:
        _last_words(said, "failed", str(unreadable(job.target, error, has_collate=job.collate is not None)))


def _last_words(said: _ProgressPipe, kind: str, content: str) -> None:
    with suppress(_Left):
        said.say(kind, content)
