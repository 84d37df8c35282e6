"""A program on a terminal of its own: what it prints, keys pressed, a window that changes its size."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from types import TracebackType
from typing import Any, Self

ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[()][A-Z0-9]|[=>])")


class Terminal:
    """Runs ``command`` on a pty; everything it has written is in ``raw``."""

    def __init__(self, command: list[str], env: dict[str, str], *, columns: int = 80, rows: int = 24) -> None:
        self._side, inside = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(inside)
        self._inside = inside
        self.raw = ""

        def take_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            command, stdin=inside, stdout=inside, stderr=inside, env=env, start_new_session=True,
            preexec_fn=take_terminal,
        )  # fmt: skip

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._side, keys.encode())

    def read(self, within_s: float = 0.1) -> None:
        ready, _, _ = select.select([self._side], [], [], within_s)
        if ready:
            with contextlib.suppress(OSError):
                self.raw += os.read(self._side, 1 << 16).decode("utf-8", "replace")

    def wait_for(self, pattern: str, within_s: float = 20.0) -> str:
        """What was printed from here on, up to where the pattern is; without escapes."""
        start, deadline_s = len(self.raw), time.monotonic() + within_s
        while not re.search(pattern, text := ESCAPES.sub("", self.raw[start:])):
            assert time.monotonic() < deadline_s, f"no {pattern!r} in {text[-4000:]}"
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {text[-4000:]}"
            self.read()
        return text

    def wait(self, within_s: float = 20.0) -> int:
        """The exit status; what is still printed is read."""
        deadline_s = time.monotonic() + within_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline_s, self.raw[-2000:]
            self.read(0.05)
        self.read(0.0)
        return self.process.returncode

    @property
    def settings(self) -> list[Any]:
        """Of the terminal, as they are now."""
        return termios.tcgetattr(self._inside)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._side)
        os.close(self._inside)
