"""Who may ask the page's server for what, decided before anything else is looked at.

In:  method, path and headers of a request; the token; the address listened on.
Out: a ``Refusal``, or nothing; the headers every answer carries.
Runs in: command line.

The figures of a training are its user's. Four strangers can send requests here: another machine, where the address is
not loopback (it has no token); a web page of somebody else's in this user's browser (its Origin is another); such a
page whose name was made to point at this address (its Host is another); and another user of this machine, who can read
the figures on loopback, but change nothing (no token).
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

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
SHORTEST_TOKEN = 16
"""Characters of a token: others can try to guess it, on loopback the other users of this machine."""

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
"""Of every answer. There is no CORS header among them: no other page may read anything."""

_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{1,512}")
"""What fits both a header and the fragment of an address as it is."""
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:/@\s]+)(?::[0-9]{1,5})?")
_GUARDED = ("/api/", "/metrics")


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a request is not served."""

    status: int
    why: str
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Access:
    """The rules for one address."""

    token: str
    is_loopback: bool
    """Whether only this machine can connect: then reading needs no token."""
    names: frozenset[str]
    """What a Host header may say, without the port: a tunnel has another one."""
    takes_any_address: bool = False
    """Listens on every address: any number may be its own. A name cannot be, unless it is in ``names``."""

    @classmethod
    def to(cls, host: str, address: str, token: str) -> Self:
        """For a server that listens on ``address``, which ``host`` stands for."""
        bound = ipaddress.ip_address(address.partition("%")[0])
        own = {host.lower(), str(bound)}
        if bound.is_unspecified:
            own.add(socket.gethostname().lower())
        return cls(
            token=token,
            is_loopback=bound.is_loopback,
            names=LOOPBACK_NAMES | own,
            takes_any_address=bound.is_unspecified,
        )

    def refusal(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> Refusal | None:
        """None: it may go on."""
        said = _Headers(headers)
        host = said.only("host")
        if host is None or not self._is_own(host):
            return Refusal(
                status=403, why="this server does not go by that name; ask for the address that penstock dash printed"
            )
        if method not in ("GET", "POST"):
            return Refusal(status=405, why=f"{method[:20]} is not served here", headers={"allow": "GET"})
        is_change = method == "POST"
        if not is_change and not path.startswith(_GUARDED):
            return None
        origin = said.only("origin")
        # Whatever comes with a foreign Origin is a page of somebody else's: it could not read the answer anyway.
        if is_change or origin is not None or "origin" in said:
            if origin is None:
                return Refusal(status=403, why="a change must come from the page itself: no single Origin was sent")
            if origin.lower() != f"http://{host.lower()}":
                return Refusal(status=403, why="this request comes from another page; only this server's own may ask")
        return self._token_refusal(said, is_needed=is_change or not self.is_loopback)

    def _token_refusal(self, said: _Headers, *, is_needed: bool) -> Refusal | None:
        if "authorization" not in said:
            if not is_needed:
                return None
            why = "a token is needed; it is in the address that penstock dash printed, behind #token="
        else:
            kind, _, sent = (said.only("authorization") or "").partition(" ")
            # In constant time, or how long a refusal takes tells how much of a guess was right.
            if kind.lower() == "bearer" and hmac.compare_digest(sent.strip().encode(), self.token.encode()):
                return None
            why = "this is not the token; penstock dash printed it behind #token=, and makes a new one at each start"
        return Refusal(status=401, why=why, headers={"www-authenticate": "Bearer"})

    def _is_own(self, host: str) -> bool:
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return False
        name = match.group(1).strip("[]").rstrip(".")
        if name in self.names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        # A name can be made to point here by whoever owns it; a number cannot.
        return self.takes_any_address


def new_token() -> str:
    return secrets.token_urlsafe(32)


def token_problem(token: str) -> str | None:
    """Why a token that somebody chose will not do; None: it will."""
    if not _TOKEN.fullmatch(token):
        return "a token has 1 to 512 letters, digits and . _ ~ + / = - and nothing else"
    if len(token) < SHORTEST_TOKEN:
        return (
            f"a token of {len(token)} characters can be guessed by other users and machines; take at least "
            f"{SHORTEST_TOKEN}, or leave it out and a new one is made"
        )
    return None


class _Headers:
    """Headers by name, with those that were sent twice known as such: which of two counts is a matter of taste."""

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in headers:
            self._values.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1").strip())

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def only(self, name: str) -> str | None:
        values = self._values.get(name, [])
        return values[0] if len(values) == 1 else None
