"""Python processes that have imported torch and penstock before they start: forked from one that did so.

In:  code, or a command of penstock, with its folder, environment and standard streams.
Out: how it ended, or the process while it runs.
Runs in: test process; ``serve`` in the process that is forked from.

Importing torch takes 1.5 s of processor time, and most tests that start Python are not about that. Such a process is
its own in pid, signals, streams, session, ``__main__`` and the interpreter's exit. Tests of imports, of memory and of
start-up start Python itself.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

_SERVER = """
import support.ready_python
code = support.ready_python.serve({fd})
del support
exec(compile(code, "<string>", "exec"))
"""

_COMMAND = "import sys; from penstock.cli import main; sys.path.remove(''); sys.exit(main())"

_OF_A_SHELL = ("COLUMNS", "NO_COLOR", "TERM")
"""Commands run as in a pipe of a plain environment, wherever the tests run."""


class ReadyPython:
    """Starts processes; one that is not waited for before the next ``start`` runs beside it."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair()
        command = [sys.executable, "-c", _SERVER.format(fd=theirs.fileno())]
        with theirs:
            # The process that serves is a child of this one's child, which ends: tests count their own children.
            nowhere = subprocess.DEVNULL
            subprocess.run(command, check=True, pass_fds=[theirs.fileno()], stdin=nowhere, stdout=nowhere)

    def close(self) -> None:
        self._line.close()

    def start(
        self,
        code: str,
        *arguments: str,
        folder: Path | None = None,
        environment: dict[str, str] | None = None,
        own_session: bool = False,
        stdin: bool = False,
    ) -> ReadyProcess:
        """As ``python -c code arguments``, with pipes for its output and, if asked for, its input."""
        order = {
            "code": code,
            "arguments": ["-c", *arguments],
            "folder": str(folder or Path.cwd()),
            "environment": dict(os.environ if environment is None else environment),
            "own session": own_session,
        }
        with contextlib.ExitStack() as stack:
            if stdin:
                input_read, input_write = os.pipe()
            else:
                input_read, input_write = os.open(os.devnull, os.O_RDONLY), None
            out_read, out_write = os.pipe()
            err_read, err_write = os.pipe()
            theirs = [input_read, out_write, err_write]
            for fd in theirs:
                stack.callback(os.close, fd)
            body = json.dumps(order).encode()
            socket.send_fds(self._line, [b"%12d" % len(body)], theirs)
            self._line.sendall(body)
            pid = self._answer()
        return ReadyProcess(self, pid, input_write, out_read, err_read)

    def run(self, code: str, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run ``code`` to its end."""
        with self.start(code, *arguments, **more) as process:
            out, err = process.communicate()
        assert process.returncode is not None
        return subprocess.CompletedProcess(["python", "-c", code, *arguments], process.returncode, out, err)

    def start_command(self, *arguments: str, environment: dict[str, str] | None = None, **more: Any) -> ReadyProcess:
        """As ``penstock arguments``; ``environment`` is in addition to the test's own."""
        kept = {name: value for name, value in os.environ.items() if name not in _OF_A_SHELL}
        code = f"import sys; sys.argv = {['penstock', *arguments]!r}\n{_COMMAND}"
        return self.start(code, environment=kept | (environment or {}), **more)

    def run_command(self, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
        with self.start_command(*arguments, **more) as process:
            out, err = process.communicate()
        assert process.returncode is not None
        return subprocess.CompletedProcess(["penstock", *arguments], process.returncode, out, err)

    def status(self, pid: int, *, wait: bool) -> int | None:
        """The exit status as ``subprocess`` has it; None while the process runs."""
        self._line.sendall(b"%12d" % (-pid if wait else -(1 << 32) - pid))
        answer = self._answer()
        return None if answer == _RUNS else answer

    def _answer(self) -> int:
        answer = b""
        while len(answer) < 12:
            piece = self._line.recv(12 - len(answer))
            assert piece, "the process that others are forked from has ended"
            answer += piece
        return int(answer)


class ReadyProcess:
    """A running process, with what tests use of ``subprocess.Popen``."""

    def __init__(self, python: ReadyPython, pid: int, stdin: int | None, stdout: int, stderr: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._python = python
        self.stdin: IO[str] | None = None if stdin is None else os.fdopen(stdin, "w")
        self.stdout: IO[str] = os.fdopen(stdout)
        self.stderr: IO[str] = os.fdopen(stderr)

    def __enter__(self) -> ReadyProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing of a test that failed goes on running."""
        if self.poll() is None:
            if exc[0] is not None:
                self.kill()
            self.wait()
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._python.status(self.pid, wait=False)
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = self._python.status(self.pid, wait=True)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, text: str = "") -> tuple[str, str]:
        """What it printed until it and all that hold its streams have closed them, after it was sent a short text."""
        if self.stdin is not None:
            self.stdin.write(text)
            self.stdin.close()
        pieces: dict[IO[str], list[bytes]] = {self.stdout: [], self.stderr: []}
        with selectors.DefaultSelector() as selector:
            for stream in pieces:
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    assert not isinstance(key.fileobj, int)
                    if piece := os.read(key.fd, 1 << 16):
                        pieces[key.fileobj].append(piece)  # type: ignore[index]
                    else:
                        selector.unregister(key.fileobj)
        self.wait()
        return b"".join(pieces[self.stdout]).decode(), b"".join(pieces[self.stderr]).decode()


# -- the process that is forked from ---------------------------------------------------------------

_RUNS = 1000
"""No exit status: the process has not ended."""


def serve(fd: int) -> str:
    """Fork a process for every order until the line closes; returns in each of them, with its code."""
    if os.fork():
        os._exit(0)
    os.setsid()
    import numpy  # noqa: F401
    import psutil  # noqa: F401
    import torch  # noqa: F401

    import penstock

    _ = penstock.DataLoader
    with contextlib.suppress(ImportError):
        import click  # noqa: F401
        import rich.console  # noqa: F401
    # Collections, the last one at the interpreter's exit above all, would copy every page of the modules.
    gc.collect()
    gc.freeze()
    line = socket.socket(fileno=fd)
    while True:
        head, streams, _, _ = socket.recv_fds(line, 12, 3)
        if not head:
            os._exit(0)
        number = int(head)
        if number < 0:
            waits = number > -(1 << 32)
            pid = -number if waits else -number - (1 << 32)
            ended, status = os.waitpid(pid, 0 if waits else os.WNOHANG)
            line.sendall(b"%12d" % (os.waitstatus_to_exitcode(status) if ended else _RUNS))
            continue
        body = b""
        while len(body) < number:
            body += line.recv(number - len(body))
        pid = os.fork()
        if pid == 0:
            line.close()
            return _become(json.loads(body), streams)
        for stream in streams:
            os.close(stream)
        line.sendall(b"%12d" % pid)


def _become(order: dict[str, Any], streams: list[int]) -> str:
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    # The interpreter's own streams remember what was open before.
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    if order["own session"]:
        os.setsid()
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv[:] = order["arguments"]
    return order["code"]
