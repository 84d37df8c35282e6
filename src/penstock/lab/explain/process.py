"""The process that measures for an explanation. It has nothing else in memory and can be ended at any moment.

In:  a ``Job``.
Out: ``Explained``, or an error of one line.
Runs in: the command line, which starts the child, reads the child's messages and ends the child; the child itself.
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
    """Run the job in a child process. ``on_progress`` gets the current step and the share of the work that is done, at
    least every 0.2 s. An exception from ``on_progress`` ends the child and all processes that the child started."""
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
                ": it was killed, probably because memory ran out; lower --batch-size or --workers"
                if child.exitcode == -9
                else ""
            )
        ) from None
    finally:
        # The child notices at its next batch that the pipe is closed. A child that hangs in the user's code is killed
        # together with its workers.
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
    """The pipe through which the child sends its messages."""

    def __init__(self, line: Connection) -> None:
        self._line = line
        self._sent_s = 0.0

    def send(self, kind: str, content: Any) -> None:
        try:
            self._line.send((kind, content))
        except OSError:
            raise _PipeClosed from None

    def progress(self, what: str, done: float) -> None:
        # Progress is sent only now and then: with thousands of batches per second, a message for each would be too
        # many.
        now_s = time.monotonic()
        if now_s - self._sent_s > 0.05:
            self._sent_s = now_s
            self.send("progress", (what, done))


def _child(line: Connection, job: Job) -> None:
    if hasattr(os, "setsid"):
        # In a session of its own the child gets no Ctrl-C. The command line gets it, and ends the child's process group
        # if the child does not end by itself.
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # Workers start as in the user's own program; this process itself was started by spawn.
    multiprocessing.set_start_method(None, force=True)
    # Output of the user's code must not mix with the command's answer.
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
