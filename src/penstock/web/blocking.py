"""Threads for what blocks: files and sockets are waited for here, never in the loop that serves everybody.

In:  functions.
Out: what they return, awaited.
Runs in: command line.

The threads are daemons. Those of the standard library's executors are waited for when a program ends, and one that
waits for a training that is stopped would hold up Ctrl-C for seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


class Aside:
    """A few threads. They start with the first work."""

    def __init__(self, threads: int, name: str) -> None:
        self._most = threads
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = 0

    async def run(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """The function's result, or what it raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()

        def settle(result: Any, problem: BaseException | None) -> None:
            if future.cancelled():
                return  # who asked has gone
            if problem is None:
                future.set_result(result)
            else:
                future.set_exception(problem)

        def work() -> None:
            result, problem = None, None
            try:
                result = function(*arguments)
            except Exception as raised:
                problem = raised
            # The server may have ended meanwhile, and its loop with it.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, result, problem)

        if self._started < self._most:
            self._started += 1
            threading.Thread(target=self._serve, name=f"{self._name}-{self._started}", daemon=True).start()
        self._work.put(work)
        return await future

    def close(self) -> None:
        """The threads end after what they have in hand. Nobody waits for them."""
        for _ in range(self._started):
            self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
