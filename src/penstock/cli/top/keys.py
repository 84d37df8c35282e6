"""Keys pressed on a terminal, one at a time, without Enter; the terminal's settings are restored.

In:  stdin.
Out: names of keys: "up", "+", "q".
Runs in: command line.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time
from typing import Any, Protocol, Self

_ARROWS = {"A": "up", "B": "down", "C": "right", "D": "left"}
_SEQUENCE = re.compile(r"\x1b[\[O]([0-9;]*)([A-Za-z~])")
_UNFINISHED = re.compile(r"\x1b(?:[\[O][0-9;]*)?$")


class Keys(Protocol):
    """A source of keys."""

    is_there: bool

    def read(self, within_s: float) -> list[str] | None:
        """The keys that were pressed, after waiting at most ``within_s`` for the first key; None if the terminal is
        gone."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


class NoKeys:
    """The source of keys if stdin is not a terminal: no key is ever pressed."""

    is_there = False

    def read(self, within_s: float) -> list[str]:
        time.sleep(within_s)
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


class TerminalKeys:
    """Keys of the terminal behind a descriptor."""

    is_there = True

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._before: list[Any] = []
        self._unread = ""

    def __enter__(self) -> Self:
        import termios
        import tty

        self._before = termios.tcgetattr(self._fd)
        # Ctrl-C stays a signal. Ctrl-Z must not stay a signal: the shell would continue on the alternate screen.
        tty.setcbreak(self._fd)
        now = termios.tcgetattr(self._fd)
        now[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(self._fd, termios.TCSADRAIN, now)
        return self

    def __exit__(self, *_: object) -> None:
        import termios

        termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def read(self, within_s: float) -> list[str] | None:
        ready, _, _ = select.select([self._fd], [], [], within_s)
        if not ready:
            # An unfinished sequence means that the Escape key was pressed.
            self._unread = ""
            return []
        try:
            piece = os.read(self._fd, 256)
        except OSError:
            return None
        if not piece:
            return None
        keys, self._unread = parsed(self._unread + piece.decode("utf-8", "replace"))
        return keys


def parsed(text: str) -> tuple[list[str], str]:
    """The names of the keys in the characters from a terminal, and the unfinished sequence at their end."""
    unfinished = _UNFINISHED.search(text)
    rest = "" if unfinished is None else unfinished.group()
    text = text[: len(text) - len(rest)]
    keys: list[str] = []
    place = 0
    while place < len(text):
        sequence = _SEQUENCE.match(text, place)
        if sequence is not None:
            if sequence.group(2) in _ARROWS:
                keys.append(_ARROWS[sequence.group(2)])
            place = sequence.end()
            continue
        keys.append(text[place])
        place += 1
    return keys, rest


def terminal_keys() -> Keys:
    """The keys of stdin, if it is a terminal."""
    try:
        import termios  # noqa: F401 - absent on Windows
    except ImportError:
        return NoKeys()
    return TerminalKeys(sys.stdin.fileno()) if sys.stdin is not None and sys.stdin.isatty() else NoKeys()
