"""The server of the page: routes, and how it starts and ends.

In:  a socket that already listens, a home, the rules of access.
Out: answers over HTTP until the server is stopped.
Runs in: command line. Needs starlette and uvicorn.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import mimetypes
import socket
import sys
import traceback
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.errors import PenstockError
from penstock.formatting import visible
from penstock.monitor.export.prometheus import CONTENT_TYPE, exposition
from penstock.monitor.figures import as_json
from penstock.monitor.runs.reader import record_files
from penstock.web.access import GUARDED, HEADERS, Access
from penstock.web.answers import MOST_POINTS, POINTS, Answers, RequestError, encoded, listed
from penstock.web.events import EVERY_S, Events

LONGEST_BODY_BYTES = 64 << 10
MOST_CONNECTIONS = 256
"""The most connections. If there are more connections, the oldest connection that awaits a request is closed."""
MOST_WITHOUT_TOKEN = 64
"""The most requests for figures, streams among them, that are answered at once for clients without the token. Any user
of the machine can send such requests; requests of the owner have the token and are not counted."""
_UNREAD_MS = 60_000
"""How long a client may leave an answer unread before its connection is closed."""
_PATIENCE_S = 10.0
"""How long a client may take to send a request."""
_GRACE_S = 1
"""How long answers in progress may continue when the server ends; then they are cancelled."""
_FILES = Path(__file__).parent / "static"

# The machine's own table of types may have another type for scripts, and browsers refuse to run scripts of that type.
mimetypes.add_type("text/javascript", ".js")


class PageServer:
    """Serves one home on one socket."""

    def __init__(
        self, *, listener: socket.socket, home: Path, access: Access, every_s: float = EVERY_S,
        unread_ms: int = _UNREAD_MS, patience_s: float = _PATIENCE_S,
    ) -> None:  # fmt: skip
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Connections inherit this option from the listener. Without it, a client that never reads would keep its
            # connection open forever.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
        self._listener = listener
        routes = _Routes(Answers(home), self, every_s)
        config = uvicorn.Config(
            Guard(routes.app(), access),
            http=_patient(patience_s, MOST_CONNECTIONS), ws="none", loop="asyncio", lifespan="off",
            # Requests are not logged, so that neither addresses nor a token in one of them reach a file.
            log_config=None, access_log=False, log_level="critical",
            proxy_headers=False, server_header=False, limit_concurrency=2 * MOST_CONNECTIONS,
            timeout_graceful_shutdown=_GRACE_S,
        )  # fmt: skip
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        """Serve until ``stop``, Ctrl-C or SIGTERM. Afterwards these signals are raised again, as if there were no
        server."""
        try:
            self._server.run(sockets=[self._listener])
        finally:
            self._listener.close()

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._server.server_state.connections)

    @property
    def is_ending(self) -> bool:
        return self._server.should_exit

    def stop(self) -> None:
        """End the server; may be called from any thread."""
        self._server.should_exit = True


class Guard:
    """Wraps every request: refuses what is not allowed or too much, and adds the headers to every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access
        self._without_token = 0
        """The number of requests for figures in progress that have no token."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self._access.refusal(scope["method"], scope["path"], scope["headers"])
        if refusal is not None:
            await _refused(refusal.status, refusal.why, refusal.headers)(scope, receive, send_with_headers)
            return
        # A request with a wrong token was refused above.
        has_token = any(name == b"authorization" for name, _ in scope["headers"])
        if has_token or not scope["path"].startswith(GUARDED):
            await self._app(scope, receive, send_with_headers)
            return
        if self._without_token >= MOST_WITHOUT_TOKEN:
            why = "too many clients without the token are being served; open the address that penstock dash printed"
            await _refused(503, why, {"connection": "close"})(scope, receive, send_with_headers)
            return
        self._without_token += 1
        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            self._without_token -= 1


class _Routes:
    """One method per address."""

    def __init__(self, answers: Answers, server: PageServer, every_s: float) -> None:
        self._answers = answers
        self._events = Events(answers, lambda: server.is_ending, every_s)
        self._reading = self._events.reading
        self._shown: set[str] = set()
        """Failures that were written to the terminal: a stream may fail in the same way every second."""

    def app(self) -> Starlette:
        app = Starlette(
            routes=[
                Route("/", self._page),
                Route("/static/figures.js", self._figures),
                Mount("/static", StaticFiles(directory=_FILES)),
                Route("/metrics", self._metrics),
                Route("/api/runs", self._runs),
                Route("/api/runs/{run}", self._run),
                Route("/api/runs/{run}/points", self._points),
                Route("/api/runs/{run}/set", self._set, methods=["POST"]),
                Route("/api/events", self._stream),
            ],
            exception_handlers={
                RequestError: _wrong,
                PenstockError: _wrong,
                HTTPException: _not_served,
                ClientDisconnect: lambda *_: Response(),  # no client is left to read the answer
                Exception: self._failed,
            },
        )
        # A redirect would lead to the address that the request named.
        app.router.redirect_slashes = False
        return app

    async def _page(self, request: Request) -> Response:
        return FileResponse(_FILES / "index.html")

    async def _figures(self, request: Request) -> Response:
        """The table of figures as a JavaScript module of the page."""
        script = b"export const FIGURES = " + encoded(as_json()) + b";"
        return Response(script, headers={"content-type": "text/javascript; charset=utf-8"})

    async def _metrics(self, request: Request) -> Response:
        text = await self._reading.run(exposition, self._answers.home)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def _runs(self, request: Request) -> Response:
        return _json(await self._reading.run(self._listed))

    async def _run(self, request: Request) -> Response:
        run_id = request.path_params["run"]
        found = await self._reading.run(self._answers.run, run_id)
        live = await self._events.live(run_id) if found["summary"]["state"] == "running" else None
        trouble = None if live is None else live.get("trouble")
        return _json(await self._reading.run(encoded, {**found, "live": None if trouble else live, "trouble": trouble}))

    async def _points(self, request: Request) -> Response:
        run_id, since_s = request.path_params["run"], _number(request, "since")
        most = _number(request, "most")
        if most is not None and not 1 <= most <= MOST_POINTS:
            raise RequestError(400, f"most={most:g} must be from 1 to {MOST_POINTS}")
        wanted = POINTS if most is None else int(most)
        return _json(await self._reading.run(lambda: encoded(self._answers.points(run_id, since_s, wanted))))

    async def _set(self, request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # A browser sends the form of another page without asking this server first, but not JSON.
        if kind != "application/json":
            raise RequestError(400, "send Content-Type: application/json")
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > LONGEST_BODY_BYTES:
                raise RequestError(413, f"a request has at most {LONGEST_BODY_BYTES:,} bytes")
        try:
            wanted = json.loads(body)
        except (ValueError, RecursionError):
            raise RequestError(400, "the body is not JSON") from None
        return _json(encoded(await self._events.asking.run(self._answers.turn, request.path_params["run"], wanted)))

    async def _stream(self, request: Request) -> Response:
        run_id, since_s = request.query_params.get("run"), _number(request, "since")
        # The folder is read before the answer begins, so that the status can report a folder that cannot be read.
        await self._reading.run(record_files, self._answers.home)
        last = request.headers.get("last-event-id")
        if last:
            since_s = _finite_number("Last-Event-ID", last)
        if run_id is not None:
            # The status also reports a run that does not exist.
            await self._reading.run(self._answers.find, run_id)
        return StreamingResponse(
            self._events.stream(run_id, since_s), headers={"content-type": "text/event-stream; charset=utf-8"}
        )

    def _listed(self) -> bytes:
        runs = encoded(self._answers.runs())
        return listed(self._answers.home, runs, self._answers.unreadable)

    def _failed(self, request: Request, problem: Exception) -> Response:
        """The answer to an unexpected error, which is written to the terminal once."""
        if repr(problem) not in self._shown:
            self._shown.add(repr(problem))
            # Of the request only the path is shown, which contains no secret.
            told = f"penstock dash failed at {request.url.path[:200]!r}\n{''.join(traceback.format_exception(problem))}"
            with contextlib.suppress(OSError, ValueError):  # the terminal is closed
                print(visible(told), file=sys.stderr, flush=True)
        return _refused(500, "the server failed; its terminal shows the error")


# -- answers --------------------------------------------------------------------------------


def _json(content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(content, status, headers={"content-type": "application/json", **(headers or {})})


def _refused(status: int, why: str, headers: dict[str, str] | None = None) -> Response:
    return _json(encoded({"why": why}), status, headers)


def _wrong(request: Request, problem: Exception) -> Response:
    # Any PenstockError means that a record cannot be read at the moment, as on a disk that does not answer.
    return _refused(problem.status if isinstance(problem, RequestError) else 503, str(problem))


def _not_served(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    if problem.status_code == 404:
        return _refused(404, "there is nothing at this address")
    if problem.status_code == 405:
        allowed = "POST" if request.method == "GET" else "GET"
        return _refused(405, f"{request.method} is not served here", {"allow": allowed})
    return _refused(problem.status_code, str(problem.detail))


def _number(request: Request, name: str) -> float | None:
    """A number from the query; None if the query does not have it."""
    text = request.query_params.get(name)
    return None if text is None else _finite_number(name, text)


def _finite_number(name: str, text: str) -> float:
    with contextlib.suppress(ValueError):
        number = float(text)
        if math.isfinite(number) and abs(number) < 1e12:
            return number
    raise RequestError(400, f"{name}={text[:60]!r} is not a number")


# -- connections ----------------------------------------------------------------------------


def _patient(patience_s: float, most: int) -> type[H11Protocol]:
    """The class of connections that are closed unless a complete request arrives in time, first after they are opened,
    then after each answer. If there are more than ``most`` connections, the oldest connection that awaits a request is
    closed.

    uvicorn limits the time only between two requests, and refuses new connections above its limit of connections.
    Without this, a few hundred connections that any user of the machine opens and leaves idle would lock out the owner
    of the page.
    """
    opened: dict[H11Protocol, None] = {}
    """The open connections, in the order in which they came."""

    def is_answering(connection: H11Protocol) -> bool:
        cycle = connection.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    class Connection(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect_request()
            opened[self] = None
            if len(opened) > most:
                idle = next((each for each in opened if each is not self and not is_answering(each)), None)
                if idle is not None:
                    del opened[idle]
                    idle.transport.close()

        def on_response_complete(self) -> None:
            # This comes first, because the next line may begin to answer the next request.
            self._expect_request()
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            opened.pop(self, None)
            if self._deadline is not None:
                self._deadline.cancel()
            super().connection_lost(exc)

        def _expect_request(self) -> None:
            # The time counts from now on even if bytes arrive, because a client could send one byte a second for ever.
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline = self.loop.call_later(patience_s, self._close_unless_answering)

        def _close_unless_answering(self) -> None:
            if not is_answering(self):
                # close() still sends the last answer.
                self.transport.close()

    return Connection
