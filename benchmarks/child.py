"""One contender in a new process, so that nothing a loader leaves behind affects the next.

In:  a module to run and a request as JSON; lines from the child.
Out: events as JSON lines, one of them the result.
Runs in: ``Child`` in the harness, ``Harness`` in the child.

The child's real standard output carries events only. Output of libraries goes to its standard error, which is shown if
the child fails.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

_HERE = Path(__file__).parent
_END_S = 20.0
"""Time for a child to end after its result: it closes pools and removes segments."""


class Child:
    """Starts ``python -m MODULE REQUEST`` in its own session, and ends all processes of that session on exit."""

    def __init__(self, module: str, request: dict[str, Any], *, deadline_s: float) -> None:
        self._what = f"{module} {json.dumps(request)}"
        self._deadline_s = time.monotonic() + deadline_s
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__, with the child)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(request)],
            cwd=_HERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._events_fd = self._process.stdout.fileno()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._events_fd, selectors.EVENT_READ)
        self._unread = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def event(self) -> dict[str, Any]:
        """The child's next event. RuntimeError with its last output if it ends or is late."""
        while b"\n" not in self._unread:
            if time.monotonic() > self._deadline_s:
                raise RuntimeError(f"no event before the deadline from {self._what}\n{self._last_output()}")
            if not self._selector.select(0.5):
                continue
            some = os.read(self._events_fd, 65536)
            if not some:
                status = self._process.wait(timeout=5)
                raise RuntimeError(f"{self._what} ended with status {status}\n{self._last_output()}")
            self._unread += some
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def go(self) -> None:
        """Let a child that waits in ``Harness.ready`` continue."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                self._process.wait(timeout=_END_S)
            except subprocess.TimeoutExpired:
                print(f"{self._what} did not end by itself; ending it", file=sys.stderr)
        try:
            # The session belongs to the child: this ends it and the workers it left, and no other process.
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors, self._selector):
            if stream is not None:
                stream.close()

    def _last_output(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-4000:].decode(errors="replace")


class Harness:
    """The child's end of the connection."""

    def __init__(self) -> None:
        self.request: dict[str, Any] = json.loads(sys.argv[1])
        self._events = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def ready(self) -> None:
        """Report that everything is set up, and wait until the harness has taken its first sample."""
        self._send({"event": "ready"})
        if sys.stdin.readline() != "go\n":
            raise SystemExit("the harness has ended")

    def result(self, **figures: Any) -> None:
        """Send the figures to the harness."""
        self._send({"event": "result", **figures})

    def _send(self, event: dict[str, Any]) -> None:
        self._events.write(json.dumps(event) + "\n")
        self._events.flush()
