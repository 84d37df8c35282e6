"""The process in which an explanation is measured: it has nothing else in memory, and can be ended at any moment.

In:  a ``Job``.
Out: ``Explained``, or an error in one line.
Runs in: command line, which starts the child, reads its messages and ends it; the child.
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
    an exception from it ends the child and all processes that the child started."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(theirs, job))
    with ctrl_c_blocked():
        child.start()
    theirs.close()
    try:
        progress: tuple[str, float] = (f"starting {job.target}", 0.0)
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
                progress = content
            on_progress(*progress)
    except EOFError:
        child.join(_LEAVE_WITHIN_S)
        raise PenstockError(
            f"the process that measured {job.target} ended with exit code {child.exitcode}"
            + (
                ": killed, probably because memory ran out; lower --batch-size or --workers"
                if child.exitcode == -9
                else ""
            )
        ) from None
    finally:
        # The child finds the pipe closed at its next batch. A child that hangs in the user's code is killed, and its
        # workers with it.
        ours.close()
        child.join(_LEAVE_WITHIN_S)
        if child.is_alive():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid or 0, signal.SIGKILL)
            child.kill()
        child.join()


class _PipeClosed(BaseException):
    """The command line closed the pipe."""


class _ProgressPipe:
    """Sends the child's messages."""

    def __init__(self, line: Connection) -> None:
        self._line = line
        self._sent_s = 0.0

    def send(self, kind: str, content: Any) -> None:
        try:
            self._line.send((kind, content))
        except OSError:
            raise _PipeClosed from None

    def progress(self, what: str, done: float) -> None:
        # A message for each of thousands of batches a second would be too many.
        now_s = time.monotonic()
        if now_s - self._sent_s > 0.05:
            self._sent_s = now_s
            self.send("progress", (what, done))


def _child(line: Connection, job: Job) -> None:
    if hasattr(os, "setsid"):
        # Ctrl-C reaches only the command line, which ends this process group if it does not end by itself.
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # Workers start as they would in the user's own program, and not by spawn as this process did.
    multiprocessing.set_start_method(None, force=True)
    # Output of the user's code must not end up in the answer.
    os.dup2(2, 1)
    pipe = _ProgressPipe(line)
    try:
        from penstock.lab.explain.measure import measure_here

        pipe.send("done", measure_here(job, pipe.progress))
    except _PipeClosed:
        return
    except click.BadParameter as wrong:
        _send_error(pipe, "wrong", wrong.message)
    except TargetError as error:
        _send_error(pipe, "failed", str(error))
    except Exception as error:
        _send_error(pipe, "failed", str(unreadable(job.target, error, has_collate=job.collate is not None)))


def _send_error(pipe: _ProgressPipe, kind: str, content: str) -> None:
    with suppress(_PipeClosed):
        pipe.send(kind, content)
