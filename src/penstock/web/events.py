"""The stream of events: what is new in the list of runs and in one of them, every second.

In:  ``Answers``, read in threads; how far the client had come.
Out: pieces of a ``text/event-stream``: runs, journal, alerts, points, live, ended.
Runs in: command line, in the server's loop.

Each client has a stream of its own that remembers only how far it has come, and reads on when what it wrote has been
taken: one that does not read stands still with one piece in hand, and gets what it missed, made fewer, when it goes on.
What costs most is made once for all of them: the list of runs, and the word of each training.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from penstock.errors import PenstockError
from penstock.web.answers import Answers, RequestError, RunUpdate, StreamPosition, encoded, listed
from penstock.web.blocking import Aside

EVERY_S = 1.0
"""Between two looks at a run. What follows is in such looks."""
_LIST_EVERY, _KEEP_EVERY = 2.0, 10.0
_FIGURES_EVERY = 10.0
"""How often who follows a run gets a list in which nothing but figures has changed: it can be long, and its own run is
told each second anyway."""
_FRESH_FOR = 0.9
"""How old the word of a training may be that a second client gets."""
_ASKED_AGAIN = 5.0
"""How long a training that does not answer is left alone."""


@dataclass(frozen=True, kw_only=True)
class RunList:
    """The list of runs at one moment."""

    number: int
    """Goes up when anything has changed."""
    names: tuple[tuple[str, str, str], ...]
    """Id, name and state of each."""
    runs: bytes

    def is_news_to(self, told: RunList | None, age_s: float, *, figures_every_s: float) -> bool:
        """Whether it is to be told to somebody who was told the other one so long ago."""
        if told is None or self.names != told.names:
            return True
        return self.number != told.number and age_s >= figures_every_s


class RunListReader:
    """The list of runs, read at most every two seconds however many ask."""

    def __init__(self, answers: Answers, aside: Aside, every_s: float) -> None:
        self._answers = answers
        self._aside = aside
        self._every_s = _LIST_EVERY * every_s
        self._latest = RunList(number=0, names=(), runs=b"")
        self._due_s = 0.0
        self._lock = asyncio.Lock()

    async def latest(self) -> RunList:
        async with self._lock:
            if time.monotonic() >= self._due_s:
                self._latest = await self._aside.run(self._read, self._latest)
                self._due_s = time.monotonic() + self._every_s
            return self._latest

    def _read(self, before: RunList) -> RunList:
        found = self._answers.runs()
        runs = encoded(found)
        if runs == before.runs:
            return before
        names = tuple((each["id"], each["name"], each["state"]) for each in found)
        return RunList(number=before.number + 1, names=names, runs=runs)


class LiveStates:
    """The word of each training, asked for at most once a second however many listen."""

    def __init__(self, answers: Answers, aside: Aside, every_s: float = EVERY_S) -> None:
        self._answers = answers
        self._aside = aside
        self._every_s = every_s
        self._words: dict[str, tuple[float, dict[str, Any]]] = {}
        """By run: until when it will do, and the word."""
        self._asking: dict[str, asyncio.Task[dict[str, Any]]] = {}

    async def word(self, run_id: str) -> dict[str, Any]:
        """Its state, or ``{"trouble": why there is none}``."""
        until_s, word = self._words.get(run_id, (0.0, {}))
        if time.monotonic() < until_s:
            return word
        task = self._asking.get(run_id)
        if task is None:
            task = self._asking[run_id] = asyncio.create_task(self._ask(run_id))
            task.add_done_callback(lambda _: self._asking.pop(run_id, None))
        # A client that leaves must not take the answer away from the others.
        return await asyncio.shield(task)

    async def _ask(self, run_id: str) -> dict[str, Any]:
        try:
            word, looks = await self._aside.run(self._answers.state, run_id), _FRESH_FOR
        except (PenstockError, RequestError) as silent:
            word, looks = {"trouble": str(silent)}, _ASKED_AGAIN
        now_s = time.monotonic()
        # Runs come and go while a server stays: words that have lost their worth are not kept.
        self._words = {key: kept for key, kept in self._words.items() if kept[0] > now_s}
        self._words[run_id] = (now_s + looks * self._every_s, word)
        return word


class Events:
    """Makes the streams."""

    def __init__(self, answers: Answers, aside: Aside, lives: LiveStates, every_s: float = EVERY_S) -> None:
        self._answers = answers
        self._aside = aside
        self._lives = lives
        self._every_s = every_s
        self._listing = RunListReader(answers, aside, every_s)
        self._ended = asyncio.Event()

    def end(self) -> None:
        """Ends all streams. In the server's loop."""
        self._ended.set()

    async def stream(self, run_id: str | None, since_s: float | None) -> AsyncIterator[bytes]:
        """What is there now, then what comes, until the server ends or nobody listens."""
        known, seen, followed = None, StreamPosition(points_s=since_s), run_id
        said_s = known_s = time.monotonic()
        figures_every_s = 0.0 if run_id is None else _FIGURES_EVERY * self._every_s
        while not self._ended.is_set():
            pieces: list[bytes] = []
            listing = await self._listing.latest()
            if listing.is_news_to(known, time.monotonic() - known_s, figures_every_s=figures_every_s):
                known, known_s = listing, time.monotonic()
                pieces.append(b"event: runs\ndata: " + listed(self._answers.home, listing.runs) + b"\n\n")
            if followed is not None:
                try:
                    news, told = await self._aside.run(self._read, followed, seen)
                except RequestError as wrong:
                    pieces.append(_event("live", {"trouble": wrong.why}))
                    # Removed: nothing more will come of it. What cannot be read now may be readable again.
                    followed = None if wrong.status == 404 else followed
                else:
                    seen = news.seen
                    pieces += told
                    if news.ended is None:
                        pieces.append(_event("live", await self._lives.word(followed)))
                    else:
                        followed = None
            now_s = time.monotonic()
            if pieces or now_s - said_s >= _KEEP_EVERY * self._every_s:
                said_s = now_s
                yield b"".join(pieces) or b": keep\n\n"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), self._every_s)

    def _read(self, run_id: str, seen: StreamPosition) -> tuple[RunUpdate, list[bytes]]:
        """RunUpdate, and the events that tell them: a day of points takes a while to write out. Raises RequestError."""
        try:
            news = self._answers.news(run_id, seen)
        except PenstockError as unreadable:
            raise RequestError(503, str(unreadable)) from None
        return news, _told(news)


def _told(news: RunUpdate) -> list[bytes]:
    pieces = []
    # Entries before points: whoever is cut off in between goes on from the last point, and must not have lost them.
    if news.journal:
        pieces.append(_event("journal", news.journal))
    if news.alerts:
        pieces.append(_event("alerts", news.alerts))
    if news.points is not None:
        pieces.append(_event("points", news.points, number=news.points["t_s"][-1]))
    if news.ended is not None:
        pieces.append(_event("ended", news.ended))
    return pieces


def _event(name: str, value: Any, *, number: float | None = None) -> bytes:
    head = f"event: {name}\n" if number is None else f"event: {name}\nid: {number!r}\n"
    return head.encode() + b"data: " + encoded(value) + b"\n\n"
