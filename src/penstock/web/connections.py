"""Connections of the page's server, which are hung up on when nobody asks for anything through them.

In:  how long a client may take to send a request.
Out: the class that uvicorn makes for each connection.
Runs in: command line, in the server's loop.

There is room for a number of connections only. Without this a few hundred that were opened and left so, by any user of
the machine, would lock out the page's owner for as long as they please.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


def patient_for(patience_s: float) -> type[H11Protocol]:
    """Connections that wait so long for a complete request, the first and each one after an answer."""

    class Connection(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect_request()

        def on_response_complete(self) -> None:
            # Before what follows: it may begin to answer the next request.
            self._expect_request()
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
            super().connection_lost(exc)

        def _expect_request(self) -> None:
            # From now on, whatever comes: a byte every second is no request either.
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline = self.loop.call_later(patience_s, self._hang_up_unless_answering)

        def _hang_up_unless_answering(self) -> None:
            is_answering = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
            if not is_answering:
                # What was answered last may still be on its way.
                self.transport.close()

    return Connection
