"""The server of the page: routes, and how it starts and ends.

In:  a socket that listens already, a home, the rules of access.
Out: answers over HTTP until it is told to stop.
Runs in: command line. Needs starlette and uvicorn.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.web.access import HEADERS, Access
from penstock.web.answers import MOST_POINTS, POINTS, Answers, RequestError, encoded, listed
from penstock.web.blocking import Aside
from penstock.web.connections import patient_for
from penstock.web.events import EVERY_S, Events, LiveStates
from penstock.web.files import page_files

LONGEST_BODY_BYTES = 64 << 10
_MOST_CONNECTIONS = 256
_UNREAD_MS = 60_000
"""How long a client may leave what it was sent before it is hung up on."""
_PATIENCE_S = 10.0
"""How long it may take to send a request."""
_GRACE_S = 0.4
"""What answers under way get at the end; then they are cut off."""
_READERS, _ASKERS = 4, 8

_log = logging.getLogger("penstock.dash")


class PageServer:
    """Serves one home on one socket."""

    def __init__(
        self, *, listener: socket.socket, home: Path, access: Access, every_s: float = EVERY_S,
        unread_ms: int = _UNREAD_MS, patience_s: float = _PATIENCE_S,
    ) -> None:  # fmt: skip
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # The connections have it from the listener. Without it one that never reads stays for ever.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
        self._listener = listener
        self._routes = _Routes(home, every_s)
        config = uvicorn.Config(
            Guard(self._routes.app(), access),
            http=patient_for(patience_s), ws="none", loop="asyncio", lifespan="off",
            # No log of requests: addresses, and whoever puts a token into one, stay out of files.
            log_config=None, access_log=False, log_level="critical",
            proxy_headers=False, server_header=False, limit_concurrency=_MOST_CONNECTIONS,
        )  # fmt: skip
        self._server = _Uvicorn(config, self._routes.events.end)

    def run(self) -> None:
        """Until ``stop``, Ctrl-C or SIGTERM. The signals come again as they would without a server."""
        try:
            self._server.run(sockets=[self._listener])
        finally:
            self._routes.close()
            self._listener.close()

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._server.server_state.connections)

    def stop(self) -> None:
        """From any thread."""
        self._server.should_exit = True


class _Uvicorn(uvicorn.Server):
    """Ends streams when it ends: uvicorn waits for answers under way, and a stream never ends by itself."""

    def __init__(self, config: uvicorn.Config, end_streams: Callable[[], None]) -> None:
        super().__init__(config)
        self._end_streams = end_streams

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end_streams()
        hurry = asyncio.get_running_loop().call_later(_GRACE_S, self._hurry)
        try:
            await super().shutdown(sockets)
        finally:
            hurry.cancel()

    def _hurry(self) -> None:
        # Clients that do not read: what they were sent cannot be waited for.
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()
        for task in list(self.server_state.tasks):
            task.cancel()


class Guard:
    """Around everything: refuses what is not allowed, gives every answer its headers, and every failure an answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        has_begun = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                headers = list(message.get("headers", ()))
                headers += [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                if not any(name.lower() == b"cache-control" for name, _ in headers):
                    headers.append((b"cache-control", b"no-store"))
                message = {**message, "headers": headers}
            await send(message)

        refusal = self._access.refusal(scope["method"], scope["path"], scope["headers"])
        try:
            if refusal is None:
                await self._app(scope, receive, send_with_headers)
            else:
                answer = _refused(refusal.status, refusal.why, refusal.headers)
                await answer(scope, receive, send_with_headers)
        except ClientDisconnect:
            pass  # it has gone, and what it asked for with it
        except Exception:
            # Of the request nothing but its path, which holds no secret.
            _log.exception("penstock dash failed at %r", scope["path"][:200])
            if not has_begun:
                why = "the server failed; what at is on its terminal"
                await _refused(500, why)(scope, receive, send_with_headers)


class _Routes:
    """One method per address."""

    def __init__(self, home: Path, every_s: float) -> None:
        self._home = home
        self._answers = Answers(home)
        self._reading = Aside(_READERS, "penstock-dash-reading")
        self._asking = Aside(_ASKERS, "penstock-dash-asking")
        self._lives = LiveStates(self._answers, self._asking, every_s)
        self.events = Events(self._answers, self._reading, self._lives, every_s)
        self._files = page_files()

    def app(self) -> Starlette:
        def route(path: str, answer: Callable[[Request], Awaitable[Response]], method: str = "GET") -> Route:
            return Route(path, answer, methods=[method])

        app = Starlette(
            routes=[
                route("/", self._page),
                route("/static/{name}", self._file),
                route("/metrics", self._metrics),
                route("/api/runs", self._runs),
                route("/api/runs/{run}", self._run),
                route("/api/runs/{run}/points", self._points),
                route("/api/runs/{run}/set", self._set, "POST"),
                route("/api/events", self._events),
            ],
            exception_handlers={
                RequestError: _wrong,
                PenstockError: _wrong,
                HTTPException: _not_served,
            },
        )
        # A redirect would lead to whatever address the request was sent to.
        app.router.redirect_slashes = False
        return app

    def close(self) -> None:
        self._reading.close()
        self._asking.close()

    async def _page(self, request: Request) -> Response:
        return self._shown("index.html")

    async def _file(self, request: Request) -> Response:
        return self._shown(request.path_params["name"])

    def _shown(self, name: str) -> Response:
        found = self._files.get(name)
        if found is None:
            raise RequestError(404, "there is no such file")
        return Response(found.content, headers={"content-type": found.type, "cache-control": "no-cache"})

    async def _metrics(self, request: Request) -> Response:
        from penstock.monitor.export.prometheus import CONTENT_TYPE, exposition

        text = await self._reading.run(exposition, self._home)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def _runs(self, request: Request) -> Response:
        return _json(await self._reading.run(lambda: listed(self._home, encoded(self._answers.runs()))))

    async def _run(self, request: Request) -> Response:
        run_id = request.path_params["run"]
        found = await self._reading.run(self._answers.run, run_id)
        word = await self._lives.word(run_id) if found["summary"]["state"] == "running" else None
        trouble = None if word is None else word.get("trouble")
        live = None if trouble is not None else word
        return _json(await self._reading.run(encoded, {**found, "live": live, "trouble": trouble}))

    async def _points(self, request: Request) -> Response:
        run_id, since_s = request.path_params["run"], _number(request, "since")
        most = _number(request, "most")
        if most is not None and not 1 <= most <= MOST_POINTS:
            raise RequestError(400, f"most={most:g} must be from 1 to {MOST_POINTS}")
        wanted = POINTS if most is None else int(most)
        return _json(await self._reading.run(lambda: encoded(self._answers.points(run_id, since_s, wanted))))

    async def _set(self, request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # A form of another page can be sent without asking first; JSON cannot.
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
            raise RequestError(400, "this is no JSON") from None
        return _json(encoded(await self._asking.run(self._answers.turn, request.path_params["run"], wanted)))

    async def _events(self, request: Request) -> Response:
        run_id, since_s = request.query_params.get("run"), _number(request, "since")
        last = request.headers.get("last-event-id")
        if last:
            since_s = _finite_number("Last-Event-ID", last)
        if run_id is not None:
            # Before the answer begins: its status says that there is no such run.
            await self._reading.run(self._answers.find, run_id)
        return StreamingResponse(
            self.events.stream(run_id, since_s), headers={"content-type": "text/event-stream; charset=utf-8"}
        )


def _json(content: bytes) -> Response:
    return Response(content, headers={"content-type": "application/json"})


def _refused(status: int, why: str, headers: dict[str, str] | None = None) -> Response:
    content = encoded({"why": why})
    return Response(content, status, headers={"content-type": "application/json", **(headers or {})})


def _wrong(request: Request, problem: Exception) -> Response:
    if isinstance(problem, RequestError):
        return _refused(problem.status, problem.why)
    # A record that cannot be read now, as on a disk that is away.
    return _refused(503, str(problem))


def _not_served(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    why = "there is nothing at this address" if problem.status_code == 404 else str(problem.detail)
    allowed: dict[str, str] = {}
    if problem.status_code == 405:
        why = f"{request.method} is not served here"
        allowed = {"allow": "POST" if request.method == "GET" else "GET"}
    return _refused(problem.status_code, why, allowed)


def _number(request: Request, name: str) -> float | None:
    """A value of the query; None: there is none."""
    text = request.query_params.get(name)
    return None if text is None else _finite_number(name, text)


def _finite_number(name: str, text: str) -> float:
    with contextlib.suppress(ValueError):
        number = float(text)
        if math.isfinite(number) and abs(number) < 1e12:
            return number
    raise RequestError(400, f"{name}={text[:60]!r} is not a number")
