"""Records that somebody made up or damaged: each is shown without what makes no sense, and costs the others nothing."""

from __future__ import annotations

import io
import json
import shutil
import socket
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from penstock.cli.runs.command import _plain, _tried
from penstock.cli.runs.view import comparison, listing
from penstock.cli.top.trainings import opened
from penstock.cli.top.view import Page
from penstock.errors import PenstockError
from penstock.monitor.control.client import ask, own_socket
from penstock.monitor.export.prometheus import exposition
from penstock.monitor.runs.format import FACTS, TOTALS, RunOutcome
from penstock.monitor.runs.home import socket_path
from penstock.monitor.runs.reader import Run, RunSummary, delete_run, list_runs, open_run
from penstock.monitor.runs.writer import RunRecord
from penstock.report.account import gather
from penstock.report.page import Report
from penstock.web.answers import Answers, StreamPosition, encoded
from support.recorded_runs import begin_run, fill

FACT_NAMES = sorted(set(FACTS) - {"format", "id", "boot_id"})
COLUMNS = {
    "figures": ["name"],
    "points": ["t_ms", "span_s", "body"],
    "journal": ["number", "t_s", "who", "kind", "what", "details"],
    "alerts": ["number", "t_s", "rule", "state", "what", "details"],
    "configurations": [
        "loader", "configuration", "began_s", "ended_s", "active_s", "samples", "wait_s", "peak_bytes",
    ],
    "totals": ["value"],
    "outcome": ["state", "t_s", "what"],
}  # fmt: skip
PLACES = [("facts", name) for name in FACT_NAMES]
PLACES += [(table, column) for table, columns in COLUMNS.items() for column in columns]
DEEP = "[" * 20_000
NESTED = "[" * 500 + "]" * 500
JSONS = [
    "7", "-1e400", "NaN", "1e-320", "1e300", "9" * 400, '"abc"', '"\\ud800"', "{}", "[1, null, [2]]",
    '[{"name": [], "arguments": 5, "keys": 3, "dataset_length": 1e300}, "x"]',
    '{"memory_limit_bytes": "much", "cpu_usable": [], "rank": {}, "world_size": "x", "a": NaN}',
    '[{"name": {}, "arguments": {"memory": [], "cache_bytes": "x", "num_workers": {}}, "prediction": []}]',
    '{"threshold": [1], "memory": {}, "cache_bytes": "x", "workers": []}', "", DEEP, NESTED,
]  # fmt: skip
VALUES: list[Any] = ["abc", b"\xff\x00", -1, 0, 1 << 62, 1e300, float("inf"), -5.5, 5e-324, *JSONS]


@pytest.fixture(scope="module")
def beside() -> Iterator[tuple[Path, str]]:
    """A home with a run that is in order, and its id."""
    home = Path(tempfile.mkdtemp(prefix="ps-"))
    with begin_run(home, "good") as record:
        fill(record, 3, ended_s=time.time())
    yield home, record.id
    shutil.rmtree(home)


@contextmanager
def running_run(home: Path) -> Iterator[RunRecord]:
    record = begin_run(home, "hostile", started_s=time.time() - 5)
    fill(record, 5, ended_s=time.time())
    try:
        yield record
    finally:
        record.abandon()
        for path in record.path.parent.glob(f"{record.id}*"):
            path.unlink()


def tamper(record: RunRecord, table: str, column: str, value: Any) -> None:
    """As far as the schema lets it through."""
    with closing(sqlite3.connect(record.path)) as db:
        if table == "facts":
            db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (column, value))
        else:
            if table == "outcome":
                db.execute("INSERT OR IGNORE INTO outcome VALUES (1, 'finished', 5.0, NULL)")
            try:
                db.execute(f"UPDATE OR IGNORE {table} SET {column} = ?", (value,))
            except sqlite3.Error:
                return  # the schema does not take it
        db.commit()


def show_in_lists(beside: tuple[Path, str]) -> list[RunSummary]:
    """Nothing may fall over, and the run that is in order must be there."""
    home, good_id = beside
    summaries = list_runs(home)
    assert good_id in [each.id for each in summaries]
    console = Console(file=io.StringIO(), width=120)
    console.print(listing(summaries))
    rows = [row for each in summaries for row in _tried(each)]
    console.print(comparison(rows))
    json.dumps([[_plain(each) for each in summaries], rows], allow_nan=False)
    assert good_id in [each["id"] for each in json.loads(encoded(Answers(home).runs()))]
    assert b'penstock_run_state{run="' + good_id.encode() in exposition(home)
    return summaries


def show_everywhere(beside: tuple[Path, str], record: RunRecord) -> None:
    assert record.id in [each.id for each in show_in_lists(beside)]
    answers = Answers(beside[0])
    encoded(answers.run(record.id))
    encoded(answers.points(record.id, None, 3))
    answers.news(record.id, StreamPosition(points_s=1.0))
    with Run(record.path) as run:
        report = Report(gather(run), (), time.time())
        json.dumps(report.as_json(), allow_nan=False)
        report.html().encode()
        assert all(isinstance(each.details, dict) for each in (*run.journal(), *run.alerts()))
    training = opened(record.path)
    if training is not None:
        console = Console(file=io.StringIO(), width=120)
        console.print(Page(console, has_keys=False).once({}, [training.look(in_detail=True)], ""))
        training.close()


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_a_value_that_makes_no_sense_in_every_place_of_a_record_is_passed_over(
    beside: tuple[Path, str], value: Any
) -> None:
    with running_run(beside[0]) as record:
        for table, column in PLACES:
            if table != "outcome":
                tamper(record, table, column, value)
        show_everywhere(beside, record)
        for column in COLUMNS["outcome"]:
            tamper(record, "outcome", column, value)
        (shown,) = [each for each in show_in_lists(beside) if each.id == record.id]
        assert shown.state != "running"


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "memory", "rank"]), inner),
    max_leaves=6,
).map(json.dumps)


@settings(max_examples=10, derandomize=True, deadline=None, database=None)
@given(changes=st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(VALUES) | ANY_JSON), min_size=1, max_size=3))
def test_any_few_places_of_a_record_may_hold_anything(
    beside: tuple[Path, str], changes: list[tuple[tuple[str, str], Any]]
) -> None:
    with running_run(beside[0]) as record:
        for (table, column), value in changes:
            tamper(record, table, column, value)
        show_everywhere(beside, record)


@pytest.mark.parametrize("total", ["t_s", "step", "samples", "active_s", "wait_s", "peak_tree_bytes"])
def test_a_total_that_is_no_number_is_not_known(home: Path, total: str) -> None:
    assert total in TOTALS
    with running_run(home) as record:
        tamper(record, "facts", "started_s", '"abc"')
        with closing(sqlite3.connect(record.path)) as db:
            db.execute("UPDATE totals SET value = 'much' WHERE name = ?", (total,))
            db.commit()
        with open_run(home, record.id) as run:
            assert total not in run.totals and len(run.totals) == 6
            assert run.summary().started_s == 0.0


@pytest.mark.parametrize("word", ["[" * 4096, '{"state": 5, "t_s": "x", "what": []}', '{"state": {}, "t_s": NaN}'])
def test_a_last_word_that_makes_no_sense_is_none(home: Path, word: str) -> None:
    record = begin_run(home)
    record.write(totals={"t_s": 1234.5})
    record.abandon()
    record.path.with_suffix(".alive").write_text(word)
    with open_run(home, "last") as run:
        assert run.outcome == RunOutcome(state="killed", t_s=1234.5)


# -- paths that a record names -----------------------------------------------------------------


def killed(home: Path, said: str) -> RunRecord:
    record = begin_run(home, socket=said)
    record.abandon()
    return record


def test_no_file_that_a_record_names_is_removed_but_its_own_socket(home: Path) -> None:
    precious = home / "precious"
    precious.write_text("mine")
    other = socket_path(home, "261116-000000-aaaa")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(other))
        for said in (str(precious), str(other), "precious", str(home / "sockets" / ".." / "precious"), "\x00", ""):
            with open_run(home, killed(home, said).id) as run:
                assert run.state == "killed" and own_socket(run) is None
        # Called as a run is, and where sockets go, but no socket: a file, and a link to another's socket.
        for make in (Path.touch, lambda path: path.symlink_to(other)):
            record = killed(home, str(other))
            make(socket_path(home, record.id))
            with open_run(home, record.id) as run:
                assert run.state == "killed"
                delete_run(run)
            assert socket_path(home, record.id).is_symlink() or socket_path(home, record.id).is_file()
        assert precious.read_text() == "mine" and other.is_socket()


def test_the_socket_that_a_killed_run_left_is_removed(home: Path) -> None:
    record = begin_run(home)
    left = socket_path(home, record.id)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(left))
        record.set_fact("socket", str(left))
        with open_run(home, record.id) as run:
            assert own_socket(run) == left and run.state == "running" and left.exists()
            record.abandon()
            assert run.state == "killed"
    assert not left.exists()


def test_nobody_is_asked_but_the_run_itself(home: Path) -> None:
    other = home / "agent"
    with running_run(home) as record, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(other))
        listener.listen(1)
        listener.setblocking(False)
        record.set_fact("socket", str(other))
        with Run(record.path) as run, pytest.raises(PenstockError, match="cannot be reached"):
            ask(run, {"do": "state"}, timeout_s=1.0)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_short_place_for_sockets_serves_a_long_home_whatever_the_environment_says(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = home / "run"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    long_home = home / ("long" * 30)
    with running_run(long_home) as record, socket.socket(socket.AF_UNIX) as listener:
        path = socket_path(long_home, record.id)
        assert path.is_relative_to(runtime)
        listener.bind(str(path))
        record.set_fact("socket", str(path))
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        with Run(record.path) as run:
            assert own_socket(run) == path
            path.parent.chmod(0o755)
            assert own_socket(run) is None, "others can put sockets there"
