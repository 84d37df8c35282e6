"""Decides whether the page's server answers a request: Host, Origin and token are checked before anything else.

In:  method, path and headers of a request; the token; the address that the server listens on.
Out: a ``Refusal`` or None; the headers of every answer.
Runs in: command line.

The figures of a training belong to its user. Requests of strangers can come from four places: from another machine, if
the address is not loopback (the request has no token); from a foreign web page in this user's browser (its Origin
differs); from a web page whose name was made to point at this address (its Host differs); and from another user of this
machine, who can read the figures on loopback but change nothing (the request has no token).
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from starlette.datastructures import Headers

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
SHORTEST_TOKEN = 16
"""The fewest characters of a token: other machines or, on loopback, other users of this machine can try to guess it."""

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
"""Headers of every answer. There is no CORS header among them, so that no other page may read an answer."""

_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{1,512}")
"""Characters that can stand unchanged both in a header and in the fragment of an address."""
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:/@\s]+)(?::[0-9]{1,5})?")
GUARDED = ("/api/", "/metrics")
"""Beginnings of the paths at which the server answers with figures."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why the server does not answer a request."""

    status: int
    why: str
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Access:
    """The rules for requests to one address."""

    token: str
    is_loopback: bool
    """Whether only this machine can connect: then reading needs no token."""
    names: frozenset[str]
    """Host headers that are accepted, without the port: a tunnel has another port."""
    takes_any_address: bool = False
    """The server listens on every address, so any numeric address in a Host header may be its own. A name must be one
    of ``names``."""

    @classmethod
    def to(cls, host: str, address: str, token: str) -> Self:
        """The rules for a server that listens on ``address``, which the user wrote as ``host``."""
        bound = ipaddress.ip_address(address.partition("%")[0])
        own = {host.lower(), str(bound)} | ({socket.gethostname().lower()} if bound.is_unspecified else set())
        return cls(
            token=token,
            is_loopback=bound.is_loopback,
            names=LOOPBACK_NAMES | own,
            takes_any_address=bound.is_unspecified,
        )

    def refusal(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> Refusal | None:
        """Why a request is refused; None if it may go on."""
        sent = Headers(raw=list(headers))
        host = _only(sent, "host")
        if host is None or not self._is_own(host):
            return Refusal(
                status=403,
                why="this server does not have that name; open the address that penstock dash printed",
            )
        if method not in ("GET", "POST"):
            return Refusal(status=405, why=f"{method[:20]} is not served here", headers={"allow": "GET"})
        is_change = method == "POST"
        if not is_change and not path.startswith(GUARDED):
            return None
        # A request with a foreign Origin comes from a foreign page, which could not read the answer anyway.
        if is_change or "origin" in sent:
            origin = _only(sent, "origin")
            if origin is None:
                return Refusal(
                    status=403, why="a change must come from the page itself, with exactly one Origin header"
                )
            if origin.lower() != f"http://{host.lower()}":
                return Refusal(
                    status=403, why="this request comes from another page; only this server's page may send it"
                )
        return self._token_refusal(sent, is_needed=is_change or not self.is_loopback)

    def _token_refusal(self, sent: Headers, *, is_needed: bool) -> Refusal | None:
        if "authorization" in sent:
            kind, _, token = (_only(sent, "authorization") or "").partition(" ")
            # Tokens are compared in constant time: otherwise the time of a refusal shows how much of a guess was right.
            if kind.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self.token.encode()):
                return None
            why = "this token is wrong; penstock dash prints the token behind #token= and makes a new one at each start"
        elif is_needed:
            why = "a token is needed; it is in the address that penstock dash printed, behind #token="
        else:
            return None
        return Refusal(status=401, why=why, headers={"www-authenticate": "Bearer"})

    def _is_own(self, host: str) -> bool:
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return False
        name = match.group(1).strip("[]").rstrip(".")
        if name in self.names or not self.takes_any_address:
            return name in self.names
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False  # the owner of a name can make it point here; a numeric address cannot be redirected
        return True


def new_token() -> str:
    return secrets.token_urlsafe(32)


def token_problem(token: str) -> str | None:
    """Why a token that the user chose cannot be used; None if it can be used."""
    if not _TOKEN.fullmatch(token):
        return "a token consists of 1 to 512 letters, digits and the signs . _ ~ + / = -"
    if len(token) < SHORTEST_TOKEN:
        return (
            f"a token of {len(token)} characters can be guessed by other users and machines; use at least "
            f"{SHORTEST_TOKEN}, or leave it out to get a new one at each start"
        )
    return None


def _only(headers: Headers, name: str) -> str | None:
    """The value of a header that was sent exactly once: programs disagree on which of two values is valid."""
    values = headers.getlist(name)
    return values[0].strip() if len(values) == 1 else None
