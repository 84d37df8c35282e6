"""The position of the batch that a thread is fetching, in the forecast of the batch's loader.

In:  the position of every task, from the code that fetches.
Out: the same position, for a cache that looks up a key during the fetch.
Runs in: both.
"""

from __future__ import annotations

import threading


class _FetchedNow(threading.local):
    position = 0


_now = _FetchedNow()


def begin(position: int) -> None:
    _now.position = position


def current() -> int:
    """The position of this thread's batch; 0 if this thread fetches no batch of a loader with a forecast."""
    return _now.position
