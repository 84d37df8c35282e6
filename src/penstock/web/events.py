"""The stream of events: what is new in the list of runs and in one run, every second.

In:  ``Answers``, read in threads; how much the client already has.
Out: pieces of a ``text/event-stream``: runs, journal, alerts, points, live, ended.
Runs in: command line, in the server's loop.

Each client has its own stream, which stores only the client's position and reads on after the client has taken the
last piece. A client that does not read therefore costs one piece; when it reads again it gets what it missed, merged
into fewer points. The expensive parts are made once for all clients: the list of runs and each training's live state.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from anyio import CapacityLimiter, to_thread

from penstock.errors import PenstockError
from penstock.web.answers import Answers, RequestError, RunUpdate, StreamPosition, encoded, listed

EVERY_S = 1.0
"""Time between two samples of a run. The constants below are multiples of this time."""
_LIST_EVERY, _KEEP_EVERY = 2.0, 10.0
_FIGURES_EVERY = 10.0
"""How often a client that follows a run gets a list in which only figures have changed: the list can be long, and the
client gets the figures of its own run each second."""
_FRESH_FOR = 0.9
"""Age up to which a training's live state is sent to another client."""
_ASKED_AGAIN = 5.0
"""How long the server waits before it again asks a training that did not answer."""
_T = TypeVar("_T")


class WorkThreads:
    """A limited number of anyio's threads, for work that waits for files or trainings."""

    def __init__(self, most: int) -> None:
        self._limiter = CapacityLimiter(most)

    async def run(self, function: Callable[..., _T], *arguments: Any) -> _T:
        # Without abandon_on_cancel a training that does not answer would hold up the end of the server.
        return await to_thread.run_sync(function, *arguments, limiter=self._limiter, abandon_on_cancel=True)


class SharedValues(Generic[_T]):
    """Values that many clients need: each value is made once for all clients and kept for a while."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, _T]] = {}
        """The time until which each value may be used."""
        self._making: dict[str, asyncio.Task[_T]] = {}

    async def get(self, key: str, make: Callable[[], Awaitable[tuple[_T, float]]]) -> _T:
        """The value; ``make`` returns it and the seconds for which it may be used."""
        kept = self._kept.get(key)
        if kept is not None and time.monotonic() < kept[0]:
            return kept[1]
        if key not in self._making:
            task = self._making[key] = asyncio.create_task(self._make(key, make))
            task.add_done_callback(lambda _: self._making.pop(key, None))
        # A client that leaves must not cancel the work for the others.
        return await asyncio.shield(self._making[key])

    async def _make(self, key: str, make: Callable[[], Awaitable[tuple[_T, float]]]) -> _T:
        value, for_s = await make()
        now_s = time.monotonic()
        # Runs come and go while the server stays: values that are no longer used are removed.
        self._kept = {name: kept for name, kept in self._kept.items() if kept[0] > now_s}
        self._kept[key] = (now_s + for_s, value)
        return value


@dataclass(frozen=True, kw_only=True)
class RunList:
    """The list of runs at one moment."""

    number: int
    """Increases with every change."""
    names: tuple[tuple[str, str, str], ...]
    """Id, name and state of each run."""
    runs: bytes
    unreadable: int = 0
    """Records that cannot be read."""

    def is_news_to(self, sent: RunList | None, age_s: float, *, figures_every_s: float) -> bool:
        """Whether to send this list to a client that got the list ``sent`` ``age_s`` seconds ago."""
        if sent is None or self.names != sent.names or self.unreadable != sent.unreadable:
            return True
        return self.number != sent.number and age_s >= figures_every_s


class Events:
    """Makes the streams; ``is_ending`` returns true once the server ends."""

    def __init__(self, answers: Answers, is_ending: Callable[[], bool], every_s: float = EVERY_S) -> None:
        self._answers = answers
        self._is_ending = is_ending
        self._every_s = every_s
        self.reading, self.asking = WorkThreads(4), WorkThreads(8)
        """The threads that read files, and the threads that ask trainings through their control sockets."""
        self._list = RunList(number=0, names=(), runs=b"")
        self._lists: SharedValues[RunList] = SharedValues()
        self._states: SharedValues[dict[str, Any]] = SharedValues()

    async def live(self, run_id: str) -> dict[str, Any]:
        """The state of a training, or ``{"trouble": why there is none}``."""

        async def make() -> tuple[dict[str, Any], float]:
            try:
                return await self.asking.run(self._answers.state, run_id), _FRESH_FOR * self._every_s
            except (PenstockError, RequestError) as silent:
                return {"trouble": str(silent)}, _ASKED_AGAIN * self._every_s

        return await self._states.get(run_id, make)

    async def stream(self, run_id: str | None, since_s: float | None) -> AsyncIterator[bytes]:
        """Yields the current state, then every change, until the server ends or the client leaves."""
        sent, seen, followed = None, StreamPosition(points_s=since_s), run_id
        spoke_s = sent_s = time.monotonic()
        figures_every_s = 0.0 if run_id is None else _FIGURES_EVERY * self._every_s
        while not self._is_ending():
            pieces: list[bytes] = []
            listing = await self._lists.get("", self._make_list)
            if listing.is_news_to(sent, time.monotonic() - sent_s, figures_every_s=figures_every_s):
                sent, sent_s = listing, time.monotonic()
                runs = listed(self._answers.home, listing.runs, listing.unreadable)
                pieces.append(b"event: runs\ndata: " + runs + b"\n\n")
            if followed is not None:
                try:
                    news, events = await self.reading.run(self._read, followed, seen)
                except RequestError as wrong:
                    pieces.append(_event("live", {"trouble": wrong.why}))
                    # A removed run sends nothing more. A run that cannot be read now may be readable later.
                    followed = None if wrong.status == 404 else followed
                else:
                    seen = news.seen
                    pieces += events
                    if news.ended is None:
                        pieces.append(_event("live", await self.live(followed)))
                    else:
                        followed = None
            now_s = time.monotonic()
            if pieces or now_s - spoke_s >= _KEEP_EVERY * self._every_s:
                spoke_s = now_s
                yield b"".join(pieces) or b": keep\n\n"
            await asyncio.sleep(self._every_s)

    async def _make_list(self) -> tuple[RunList, float]:
        self._list = await self.reading.run(self._read_list, self._list)
        return self._list, _LIST_EVERY * self._every_s

    def _read_list(self, before: RunList) -> RunList:
        try:
            found = self._answers.runs()
        except PenstockError:
            # The folder cannot be read now. Streams keep the last list; a new request gets the reason.
            return before
        runs, unreadable = encoded(found), self._answers.unreadable
        if runs == before.runs and unreadable == before.unreadable:
            return before
        names = tuple((each["id"], each["name"], each["state"]) for each in found)
        return RunList(number=before.number + 1, names=names, runs=runs, unreadable=unreadable)

    def _read(self, run_id: str, seen: StreamPosition) -> tuple[RunUpdate, list[bytes]]:
        """The update and its events: encoding a day of points takes a while. Raises RequestError."""
        try:
            news = self._answers.news(run_id, seen)
        except PenstockError as unreadable:
            raise RequestError(503, str(unreadable)) from None
        events = []
        # Entries are sent before points: a client whose connection breaks in between resumes after its last point, and
        # would otherwise miss the entries.
        if news.journal:
            events.append(_event("journal", news.journal))
        if news.alerts:
            events.append(_event("alerts", news.alerts))
        if news.points is not None:
            events.append(_event("points", news.points, number=news.points["t_s"][-1]))
        if news.ended is not None:
            events.append(_event("ended", news.ended))
        return news, events


def _event(name: str, value: Any, *, number: float | None = None) -> bytes:
    head = f"event: {name}\n" if number is None else f"event: {name}\nid: {number!r}\n"
    return head.encode() + b"data: " + encoded(value) + b"\n\n"
