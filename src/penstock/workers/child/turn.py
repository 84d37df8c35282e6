"""Which batch of which loader's plan is being fetched here: what a cache asks when it is asked for a key.

In:  the turn of every task, from whoever fetches.
Out: the turn of the task this thread is at.
Runs in: both.
"""

from __future__ import annotations

import threading


class _Here(threading.local):
    turn = 0


_here = _Here()


def begin(turn: int) -> None:
    _here.turn = turn


def current() -> int:
    """0 where nobody has said."""
    return _here.turn
