"""The page's server over real sockets: answers, refusals, streams, clients that misbehave."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from penstock.monitor.runs.format import Note, RunOutcome
from penstock.monitor.runs.home import socket_path
from penstock.monitor.runs.writer import RunRecord
from penstock.web.answers import Answers
from penstock.web.events import RunList
from penstock.web.server import LONGEST_BODY_BYTES, MOST_CONNECTIONS, MOST_WITHOUT_TOKEN
from support.recorded_runs import begin_run, fill, point_at
from support.served_page import LONG_S, TOKEN, FakeTraining, Served, serve

BEARER = f"Bearer {TOKEN}"


@pytest.fixture
def served(home: Path) -> Iterator[Served]:
    with serve(home) as found:
        yield found


@pytest.fixture
def live(home: Path) -> Iterator[tuple[RunRecord, FakeTraining]]:
    record = begin_run(home, "frames")
    training = FakeTraining(socket_path(home, record.id))
    record.set_fact("socket", str(training.path))
    record.write([point_at(time.time(), 1)])
    yield record, training
    record.abandon()
    training.close()


@pytest.fixture
def running(live: tuple[RunRecord, FakeTraining]) -> RunRecord:
    return live[0]


@pytest.fixture
def training(live: tuple[RunRecord, FakeTraining]) -> FakeTraining:
    return live[1]


def finished(home: Path, name: str = "done", seconds: int = 20) -> str:
    record = begin_run(home, name, started_s=time.time() - seconds)
    fill(record, seconds, ended_s=time.time())
    record.finish(RunOutcome(state="finished", t_s=time.time()))
    return record.id


def test_every_answer_has_strict_headers_and_none_lets_other_pages_in(served: Served, home: Path) -> None:
    run_id = finished(home)
    for path in ("/", "/static/nothing.js", "/api/runs", f"/api/runs/{run_id}", "/nowhere", "/metrics"):
        for sent in ({}, {"Authorization": "Bearer wrong"}):
            headers = served.ask(path, **sent).headers
            assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; style-src ")
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
            assert not [name for name in headers if name.startswith("access-control")] and "server" not in headers
    for path in ("/api/runs", f"/api/runs/{run_id}/points", "/api/nothing"):
        assert served.ask(path).headers["cache-control"] == "no-store"


def test_the_page_comes_from_the_package_and_nothing_else_does(served: Served) -> None:
    page = served.ask("/")
    assert page.status == 200 and page.headers["content-type"] == "text/html; charset=utf-8" and b"<html" in page.body
    assert served.ask("/static/index.html").body == page.body
    for path in (
        "/static/",
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/..%2fserver.py",
        "//",
        "/static",
    ):
        assert served.ask(path).status == 404, path


def test_the_answer_for_a_run_contains_the_state_of_its_process(served: Served, running: RunRecord, home: Path) -> None:
    (listed,) = served.ask("/api/runs").value["runs"]
    assert listed["id"] == running.id and listed["state"] == "running"
    found = served.ask(f"/api/runs/{running.id}").value
    assert found["live"]["step"] == 7 and found["live"]["figures"] == {"odd": None} and found["trouble"] is None
    points = served.ask(f"/api/runs/{running.id}/points").value
    assert points["figures"]["loader.0.workers"] == [4.0] and len(points["t_s"]) == 1
    over = served.ask(f"/api/runs/{finished(home)}").value
    assert over["live"] is None and over["trouble"] is None and over["summary"]["state"] == "finished"


def test_valves_turn_with_token_and_origin_and_the_training_gets_the_source(
    served: Served, running: RunRecord, training: FakeTraining, home: Path
) -> None:
    answer = served.turn(running.id, {"loader": "train", "workers": 8})
    assert answer.status == 200 and answer.value == {"now": {"loader": "train", "workers": 8}}
    assert training.asked == [{"do": "set", "who": "page", "loader": "train", "workers": 8}]
    refusals = [
        (served.turn(running.id, {"workers": 99}), 409, "more than 64"),
        (served.turn(finished(home), {"workers": 1}), 409, "is over"),
        (served.turn("261116-000000-aaaa", {"workers": 1}), 404, "no run"),
        (served.turn(running.id, {"workers": 1}, Authorization=None), 401, "token"),
        (served.turn(running.id, {"workers": 1}, Authorization="Bearer x"), 401, "this token is wrong"),
        (served.turn(running.id, {"workers": 1}, Origin=None), 403, "Origin"),
        (served.turn(running.id, {"workers": 1}, Origin="http://evil.example"), 403, "another page"),
        (served.turn(running.id, {"workers": 1}, Host="evil.example"), 403, "name"),
        (served.turn(running.id, {"workers": 1}, **{"Content-Type": "text/plain"}), 400, "application/json"),
        (served.turn(running.id, b'{"workers": '), 400, "not JSON"),
        (served.turn(running.id, b"[" * 60_000), 400, "not JSON"),
        (served.turn(running.id, b" " * (LONGEST_BODY_BYTES + 1)), 413, "65,536 bytes"),
        (served.turn(running.id, {"workers": "8"}), 400, "whole number"),
    ]
    for answer, status, why in refusals:
        assert answer.status == status and why in answer.value["why"], (answer, status)
    assert len(training.asked) == 2, "the refused ones never got there, but for the one it refused itself"


def test_invalid_requests_are_refused_with_the_reason(served: Served, home: Path) -> None:
    run_id = finished(home)
    for query in (
        "since=x",
        "since=nan",
        "since=inf",
        "since=",
        "most=0",
        "most=5001",
        "most=many",
        "most=-1",
        "since=1e99",
    ):
        answer = served.ask(f"/api/runs/{run_id}/points?{query}")
        assert answer.status == 400 and answer.value["why"], query
    for path in (f"/api/events?run={run_id}&since=soon", "/api/events?since=nan"):
        assert served.ask(path).status == 400
    assert served.ask("/api/events", **{"Last-Event-ID": "x"}).status == 400
    for path in (
        "/api/events?run=nobody",
        "/api/runs/nobody",
        "/api/runs/nobody/points",
        "/api/runs/../x",
        "/api/runs/",
    ):
        assert served.ask(path).status == 404, path
    for method, path in (("HEAD", "/"), ("OPTIONS", "/api/runs"), ("DELETE", f"/api/runs/{run_id}"), ("PUT", "/")):
        answer = served.ask(path, method)
        assert answer.status == 405 and answer.headers["allow"] == "GET", (method, path)
    assert served.ask(f"/api/runs/{run_id}/set").headers["allow"] == "POST"
    assert served.ask("/api/runs", "POST", Origin=served.origin, Authorization=BEARER).status == 405


def test_another_address_than_loopback_needs_the_token_for_all_figures(home: Path) -> None:
    run_id = finished(home)
    with serve(home, host="0.0.0.0") as served:
        for path in ("/api/runs", f"/api/runs/{run_id}", "/api/events", "/metrics"):
            assert served.ask(path).status == 401
        assert served.ask("/").status == 200
        assert served.ask("/api/runs", Authorization=BEARER).status == 200
        assert served.ask("/metrics", Authorization=BEARER).headers["content-type"].startswith("text/plain")


def test_a_stream_sends_what_there_is_then_what_comes_then_the_end(served: Served, running: RunRecord) -> None:
    with served.follow(f"?run={running.id}") as events:
        assert events.response.getheader("content-type") == "text/event-stream; charset=utf-8"
        listed, _ = events.until("runs")
        assert listed["runs"][0]["id"] == running.id and abs(listed["now_s"] - time.time()) < LONG_S
        points, _ = events.until("points")
        assert len(points["t_s"]) == 1 and float(events.last_id) == points["t_s"][0]
        live, _ = events.until("live")
        assert live["step"] == 7
        t_s = time.time()
        running.write([point_at(t_s, 2)], notes=[Note(t_s=t_s - 1, who="page", kind="resize", what="<b>2 -> 4</b>")])
        (note,), _ = events.until("journal")
        assert note["what"] == "<b>2 -> 4</b>"
        points, _ = events.until("points")
        assert points["figures"]["step"] == [40.0]
        running.finish(RunOutcome(state="failed", t_s=time.time(), what="RuntimeError: x"))
        ended, passed = events.until("ended")
        assert ended["state"] == "failed" and ended["what"] == "RuntimeError: x" and "points" not in passed
        _, passed = events.until("", holds=lambda words: words == "keep")
        assert set(passed) <= {"runs"}, "of a run that is over nothing more comes"
    assert served.ask("/api/runs").value["runs"][0]["state"] == "failed"


def test_a_resumed_stream_continues_after_the_last_point(served: Served, home: Path) -> None:
    run_id = finished(home, seconds=30)
    with served.follow(f"?run={run_id}") as events:
        points, _ = events.until("points")
    since = repr(points["t_s"][19])
    with served.follow(f"?run={run_id}&since=0", Last_Event_ID=since) as events:
        later, passed = events.until("points")
        assert later["t_s"] == points["t_s"][20:] and "journal" not in passed
    with served.follow(f"?run={run_id}&since={points['t_s'][-1]!r}") as events:
        _, passed = events.until("ended")
        assert "points" not in passed


def test_a_record_that_vanishes_ends_neither_the_stream_nor_the_server(served: Served, running: RunRecord) -> None:
    with served.follow(f"?run={running.id}") as events:
        events.until("live")
        for path in running.path.parent.iterdir():
            path.unlink()
        wanted = {"live", "runs"}
        while wanted:  # in any order
            name, value = events.next()
            is_live_of_removed = name == "live" and "removed" in value.get("trouble", "")
            if is_live_of_removed or (name == "runs" and value["runs"] == []):
                wanted.discard(name)
    assert served.ask(f"/api/runs/{running.id}").status == 404


def test_a_training_that_does_not_answer_is_asked_less_often(
    home: Path, running: RunRecord, training: FakeTraining
) -> None:
    training.is_silent = True
    with serve(home, every_s=0.1) as served, served.follow(f"?run={running.id}") as events:
        began_s = time.monotonic()
        for _ in range(4):
            word, _ = events.until("live")
            assert "closed the connection without an answer" in word["trouble"]
        assert served.ask(f"/api/runs/{running.id}").value["trouble"]
        assert len(training.asked) <= 1 + (time.monotonic() - began_s) / 0.5, "every fifth time"
        training.is_silent = False
        events.until("live", holds=lambda word: word.get("step") == 7)


def test_thirty_clients_share_one_request_to_the_training(
    home: Path, running: RunRecord, training: FakeTraining
) -> None:
    went_well: list[bool] = []

    def follow(served: Served) -> None:
        with served.follow(f"?run={running.id}") as events:
            events.until("points")
            for _ in range(2):
                events.until("live")
            went_well.append(True)

    with serve(home, every_s=0.5) as served:
        began_s = time.monotonic()
        threads = [threading.Thread(target=follow, args=(served,)) for _ in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
        took_s = time.monotonic() - began_s
    assert len(went_well) == 30
    assert len(training.asked) <= 2 + took_s / 0.45, "once for all of them, not once for each"


def test_a_client_that_never_reads_delays_no_other_and_is_disconnected(home: Path, running: RunRecord) -> None:
    # Enough to fill any buffer between here and there, several times.
    big = [finished(home, "x" * 20_000, seconds=1) for _ in range(3)]
    number = 0
    with serve(home, unread_ms=500) as served, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", served.port))
        deaf.sendall(f"GET /api/events?run={running.id} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        with served.follow(f"?run={running.id}") as events:
            for number in range(15):
                running.write([point_at(time.time(), number)])
                events.until("points")
        assert len(served.ask("/api/runs").value["runs"]) == len(big) + 1
        deadline_s = time.monotonic() + LONG_S
        while served.server.connections and hasattr(socket, "TCP_USER_TIMEOUT"):
            assert time.monotonic() < deadline_s, "it is still served"
            # The list changes, and there is always something to say.
            number += 1
            running.write([point_at(time.time(), number)], totals={"step": float(number)})
            time.sleep(0.05)


def test_the_server_ends_while_streams_are_open_and_unread(home: Path) -> None:
    run_id = finished(home, "x" * 20_000, seconds=1500)
    with serve(home) as served:
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", served.port))
        for _ in range(5):
            deaf.sendall(f"GET /api/runs/{run_id}/points HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        with served.follow() as events:
            events.until("runs")
            began_s = time.monotonic()
            served.server.stop()
            # In an orderly way, or cut off where the machine is too busy for that.
            with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
                events.response.read()
            with pytest.raises(OSError):
                while time.monotonic() < began_s + LONG_S:
                    socket.create_connection(("127.0.0.1", served.port), timeout=1).close()
                    time.sleep(0.02)
    # serve() asserts that the server has ended; without a limit the unread answer would keep it forever.
    deaf.close()


def test_requests_that_are_not_http_do_no_harm(served: Served, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    finished(home)
    two_hosts = b"GET /api/runs HTTP/1.1\r\nHost: a\r\nHost: localhost\r\n\r\n"
    no_host = b"GET / HTTP/1.1\r\n\r\n"
    for rubbish in (b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"x" * 200_000, no_host, two_hosts):
        with socket.create_connection(("127.0.0.1", served.port), timeout=LONG_S) as line:
            answer = b""
            # It may be hung up on while it still sends.
            with contextlib.suppress(OSError):
                line.sendall(rubbish)
                line.shutdown(socket.SHUT_WR)
                while piece := line.recv(4096):
                    answer += piece
            assert not answer or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 403")), answer
    assert len(json.loads(served.ask("/api/runs", Upgrade="websocket", Connection="Upgrade").body)["runs"]) == 1
    assert capfd.readouterr() == ("", "")


def test_a_client_of_one_run_gets_the_list_when_runs_change_and_figures_less_often(
    home: Path, running: RunRecord
) -> None:
    every_s = 0.05
    began_s = time.monotonic()
    with serve(home, every_s=every_s) as served, served.follow(f"?run={running.id}") as events:
        lists = 0
        for number in range(25):
            running.write([point_at(time.time(), number)], totals={"step": float(number)})
            _, passed = events.until("points")
            lists += passed.count("runs")
        assert 1 <= lists <= 1 + (time.monotonic() - began_s) / (10 * every_s), "the figures of a list are not pressing"
        run_id = finished(home, "another")
        events.until("runs", holds=lambda value: any(each["id"] == run_id for each in value["runs"]))


def test_a_list_is_sent_when_a_run_appears_disappears_or_changes_its_name_or_state() -> None:
    told = RunList(number=1, names=(("a", "frames", "running"),), runs=b"1")
    for names in ((), (("a", "frames", "failed"),), (("a", "other", "running"),), (("b", "x", "running"), *told.names)):
        assert RunList(number=2, names=names, runs=b"2").is_news_to(told, 0.0, figures_every_s=10.0)
    moved = RunList(number=2, names=told.names, runs=b"2")
    assert not moved.is_news_to(told, 9.9, figures_every_s=10.0) and moved.is_news_to(told, 10.0, figures_every_s=10.0)
    assert moved.is_news_to(told, 0.0, figures_every_s=0.0), "to who sees nothing but the list"
    assert not told.is_news_to(told, 1e9, figures_every_s=0.0) and told.is_news_to(None, 0.0, figures_every_s=10.0)


def test_idle_connections_are_closed_and_answered_ones_are_not(home: Path, running: RunRecord) -> None:
    head = f"POST /api/runs/{running.id}/set HTTP/1.1\r\nHost: localhost\r\n".encode()
    asked = f"Origin: http://localhost\r\nAuthorization: {BEARER}\r\nContent-Type: application/json\r\n".encode()
    begun = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "
    answered_then_begun = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nG"
    half_a_body = head + asked + b"Content-Length: 90\r\n\r\n{"
    patience_s = 1.0
    with serve(home, patience_s=patience_s) as served, contextlib.ExitStack() as left:

        def connected(sent: bytes) -> socket.socket:
            line = left.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=LONG_S))
            line.sendall(sent)
            return line

        with served.follow(f"?run={running.id}") as events:
            began_s = time.monotonic()
            silent = [connected(sent) for sent in (b"", b"GET / HT", begun, half_a_body, answered_then_begun)]
            slow = connected(begun)
            with pytest.raises(ConnectionError):
                while time.monotonic() < began_s + LONG_S:
                    # A byte now and then is no request either.
                    slow.sendall(b"x")
                    events.until("live")
            for line in silent:
                with contextlib.suppress(ConnectionError):
                    while line.recv(1 << 16):
                        pass
            while time.monotonic() < began_s + 1.5 * patience_s:
                events.until("live")
            assert served.server.connections == 1, "the stream, which is older than the others came to be"


def test_a_failure_inside_the_server_is_shown_on_its_terminal_once(
    served: Served, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Answers) -> None:
        raise ValueError("a defect\x1b]0;title\x07")

    monkeypatch.setattr(Answers, "runs", fail)
    for _ in range(2):
        answer = served.ask("/api/runs")
        assert answer.status == 500 and "terminal shows" in answer.value["why"]
    shown = capfd.readouterr().err
    assert shown.count("penstock dash failed at '/api/runs'") == 1 and shown.count("Traceback") == 1
    assert "ValueError: a defect" in shown and "\x1b" not in shown


def test_clients_without_the_token_cannot_keep_the_owner_out(home: Path) -> None:
    asks = b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serve(home) as served, contextlib.ExitStack() as left:

        def connected(sent: bytes) -> socket.socket:
            line = left.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=LONG_S))
            line.sendall(sent)
            return line

        first = [connected(asks).recv(12) for _ in range(MOST_WITHOUT_TOKEN)]
        assert first == [b"HTTP/1.1 200"] * len(first)
        assert connected(asks).recv(12) == b"HTTP/1.1 503"
        idle = [connected(b"") for _ in range(MOST_CONNECTIONS)]
        assert served.ask("/api/runs").status == 503
        for path in ("/api/runs", "/metrics"):
            assert served.ask(path, Authorization=BEARER).status == 200
        assert served.ask("/").status == 200
        with served.follow("", Authorization=BEARER) as events:
            events.until("runs")
        assert idle[0].recv(1) == b"", "the one that came first was closed for the owner"


def test_the_page_counts_the_records_that_cannot_be_read(served: Served, home: Path) -> None:
    finished(home)
    with served.follow() as events:
        listed, _ = events.until("runs")
        assert listed["unreadable"] == 0
        (home / "runs" / "261116-000000-aaaa.sqlite").write_text("no record")
        listed, _ = events.until("runs", holds=lambda value: value["unreadable"] == 1)
        assert len(listed["runs"]) == 1
    assert served.ask("/api/runs").value["unreadable"] == 1


def test_a_home_that_cannot_be_entered_is_told_with_its_reason() -> None:
    with serve(Path("/" + "long" * 100)) as served:
        for path in ("/api/runs", "/metrics", "/api/events", "/api/runs/261116-000000-aaaa"):
            answer = served.ask(path)
            assert answer.status == 503 and "File name too long" in answer.value["why"], path
