"""Who may ask the page's server for what."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("starlette")

from penstock.web.access import Access, new_token, token_problem

TOKEN = "the-right-token"
LOCAL = Access.to("127.0.0.1", "127.0.0.1", TOKEN)
OPEN = Access.to("0.0.0.0", "0.0.0.0", TOKEN)
NAMED = Access.to("gpu-box", "192.0.2.7", TOKEN)
BEARER = ("authorization", f"Bearer {TOKEN}")


def status(
    access: Access, method: str, path: str, *headers: tuple[str, str], host: str | None = "127.0.0.1:8787"
) -> int:
    sent = [*([] if host is None else [("host", host)]), *headers]
    refusal = access.refusal(method, path, [(name.encode(), value.encode("latin-1")) for name, value in sent])
    return 200 if refusal is None else refusal.status


@pytest.mark.parametrize("path", ["/api/runs", "/api/events", "/metrics", "/api/runs/x/points"])
def test_reading_needs_the_token_from_everywhere_but_loopback(path: str) -> None:
    assert status(LOCAL, "GET", path) == 200
    assert status(OPEN, "GET", path) == 401
    assert status(OPEN, "GET", path, BEARER) == 200
    assert status(NAMED, "GET", path, host="gpu-box") == 401


@pytest.mark.parametrize("path", ["/", "/static/page.js", "/nothing"])
def test_the_page_itself_holds_nothing_and_needs_no_token(path: str) -> None:
    assert status(OPEN, "GET", path) == 200


@pytest.mark.parametrize(
    "sent", ["Bearer wrong", "Bearer", "Bearer ", "", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer \xe9\xff"]
)
def test_a_wrong_token_is_refused_even_where_none_is_needed(sent: str) -> None:
    for access in (LOCAL, OPEN):
        assert status(access, "GET", "/api/runs", ("authorization", sent)) == 401
    refusal = LOCAL.refusal("GET", "/api/runs", [(b"host", b"localhost"), (b"authorization", sent.encode("latin-1"))])
    assert refusal is not None and TOKEN not in refusal.why and refusal.headers == {"www-authenticate": "Bearer"}


def test_a_token_sent_twice_is_refused() -> None:
    assert status(LOCAL, "GET", "/api/runs", BEARER, BEARER) == 401


def test_a_change_needs_token_and_own_origin_on_loopback_too() -> None:
    own = ("origin", "http://127.0.0.1:8787")
    assert status(LOCAL, "POST", "/api/runs/x/set", BEARER, own) == 200
    assert status(LOCAL, "POST", "/api/runs/x/set", own) == 401
    assert status(LOCAL, "POST", "/api/runs/x/set", BEARER) == 403
    assert status(LOCAL, "POST", "/api/runs/x/set", BEARER, own, own) == 403
    assert status(LOCAL, "POST", "/", own) == 401, "whatever the address"


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "http://127.0.0.1:8788", "http://127.0.0.1", "https://127.0.0.1:8787", "null", "",
     "http://localhost:8787", "http://127.0.0.1:8787.evil.example", "http://evil.example#http://127.0.0.1:8787"],
)  # fmt: skip
def test_other_pages_can_neither_change_nor_read(origin: str) -> None:
    for method, path in (("POST", "/api/runs/x/set"), ("GET", "/api/runs"), ("GET", "/metrics")):
        assert status(LOCAL, method, path, BEARER, ("origin", origin)) == 403


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:9000", "localhost:8787", "LOCALHOST", "[::1]:8787", "localhost."]
)
def test_loopback_accepts_its_names_through_any_tunnel(host: str) -> None:
    for access in (LOCAL, OPEN, NAMED):
        assert status(access, "GET", "/", host=host) == 200


@pytest.mark.parametrize(
    "host",
    [None, "", "evil.example", "evil.example:8787", "127.0.0.1.evil.example", "localhost.evil.example", "192.0.2.9",
     "127.0.0.1:8787@evil.example", "evil.example/127.0.0.1", "[::1", "127.0.0.1:", ":8787", "a b", "127.0.0.1:80:80"],
)  # fmt: skip
def test_a_name_that_was_made_to_point_here_is_refused(host: str | None) -> None:
    for path in ("/", "/api/runs"):
        assert status(LOCAL, "GET", path, BEARER, host=host) == 403
        assert status(NAMED, "GET", path, BEARER, host=host) == 403


def test_a_server_on_all_addresses_accepts_any_number_and_only_its_own_name() -> None:
    assert status(OPEN, "GET", "/", host="192.0.2.9:8787") == 200
    assert status(OPEN, "GET", "/", host="[2001:db8::1]:8787") == 200
    assert status(OPEN, "GET", "/", host=f"{socket.gethostname()}:8787") == 200
    assert status(OPEN, "GET", "/", host="evil.example:8787") == 403


def test_a_server_on_one_address_accepts_that_and_its_given_name() -> None:
    assert status(NAMED, "GET", "/", host="gpu-box:8787") == 200
    assert status(NAMED, "GET", "/", host="192.0.2.7:8787") == 200
    assert not NAMED.is_loopback and LOCAL.is_loopback and Access.to("::1", "::1", TOKEN).is_loopback


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "BREW"])
def test_other_methods_are_refused(method: str) -> None:
    for path in ("/", "/api/runs", "/api/runs/x/set"):
        assert status(LOCAL, method, path, BEARER) == 405


def test_new_tokens_are_long_and_chosen_ones_are_checked() -> None:
    assert new_token() != new_token() and len(new_token()) >= 40
    assert token_problem(new_token()) is None and token_problem("x" * 16) is None
    assert "can be guessed" in str(token_problem("x" * 15))
    for wrong in ("", "two words", "line\n", "é" * 20, "x" * 513, "a&b" * 9, "a#b" * 9):
        assert "a token consists of" in str(token_problem(wrong))
