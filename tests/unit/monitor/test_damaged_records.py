"""Files that are not intact records of a run: one clear error each, and the other runs are shown all the same."""

from __future__ import annotations

import gc
import os
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from penstock.errors import DataError, PenstockError
from penstock.monitor.control.client import ask, own_socket
from penstock.monitor.export.prometheus import exposition
from penstock.monitor.runs.format import RunOutcome
from penstock.monitor.runs.home import socket_path
from penstock.monitor.runs.reader import Run, delete_run, list_runs, open_run
from penstock.monitor.runs.writer import RunRecord
from penstock.web.answers import Answers
from support.recorded_runs import begin_run, fill

DAMAGED = "261116-000000-aaaa"


def recorded(home: Path) -> RunRecord:
    with begin_run(home, "intact") as record:
        fill(record, 3, ended_s=time.time())
    return record


def changed(statement: str, *values: object) -> Callable[[Path], None]:
    """An intact record in which one statement was executed."""

    def make(path: Path) -> None:
        path.write_bytes(recorded(path.parent.parent).path.read_bytes())
        with closing(sqlite3.connect(path)) as db:
            db.execute(statement, values)
            db.commit()

    return make


def fact(name: str, value: str) -> Callable[[Path], None]:
    return changed("INSERT OR REPLACE INTO facts VALUES (?, ?)", name, value)


def of_another_program(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE songs (title TEXT)")
        db.commit()


def with_a_table_named_in_no_utf_8(path: Path) -> None:
    whole = recorded(path.parent.parent).path.read_bytes()
    name = whole.index(b"tablepointspoints") + len(b"tablepo")
    path.write_bytes(whole[:name] + b"\x90" + whole[name + 1 :])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "text": lambda path: (path.write_text("not a database " * 100), None)[1],
    "empty": Path.touch,
    "error text that is no UTF-8": with_a_table_named_in_no_utf_8,
    "cut": lambda path: (path.write_bytes(recorded(path.parent.parent).path.read_bytes()[:5000]), None)[1],
    "of another program": of_another_program,
    "another format": fact("format", "2"),
    "broken JSON": fact("loaders", "[{"),
    "deep JSON": fact("loaders", "[" * 20_000),
    "fact of another type": fact("loaders", '{"a": 1}'),
    "list of another type": fact("gpus", '["NVIDIA H200"]'),
    "time as text": fact("started_s", '"yesterday"'),
    "total as text": changed("UPDATE totals SET value = 'much'"),
    "endless total": changed("UPDATE totals SET value = 9e999"),
    "missing table": changed("DROP TABLE configurations"),
}


@pytest.mark.parametrize("make", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_or_foreign_file_is_one_clear_error_and_the_other_runs_are_shown(
    home: Path, make: Callable[[Path], None]
) -> None:
    intact = recorded(home)
    path = home / "runs" / f"{DAMAGED}.sqlite"
    make(path)
    with pytest.raises(DataError) as error, open_run(home, DAMAGED) as run:
        run.summary()
    assert str(path) in str(error.value)
    assert intact.id in (shown := [each.id for each in list_runs(home)]) and DAMAGED not in shown
    assert intact.id in (shown := [each["id"] for each in Answers(home).runs()]) and DAMAGED not in shown
    assert intact.id in exposition(home).decode()
    assert [file.name for file in list_runs(home).unreadable] == [path.name]
    (answers := Answers(home)).runs()
    assert answers.unreadable == 1


def test_a_damaged_file_stays_open_in_no_process(home: Path) -> None:
    path = home / "runs" / f"{DAMAGED}.sqlite"
    with_a_table_named_in_no_utf_8(path)
    gc.disable()
    try:
        for _ in range(5):
            list_runs(home)
            open_here = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
            assert str(path) not in open_here
    finally:
        gc.enable()


@pytest.mark.parametrize("command", [["runs"], ["top", DAMAGED, "--once"], ["report", DAMAGED]], ids=str)
def test_commands_print_the_error_without_a_traceback(home: Path, command: list[str]) -> None:
    path = home / "runs" / f"{DAMAGED}.sqlite"
    recorded(home)
    fact("loaders", "[{")(path)
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *command], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PENSTOCK_HOME": str(home)},
    )  # fmt: skip
    assert "Traceback" not in done.stderr and done.returncode == (0 if command == ["runs"] else 1)
    assert command == ["runs"] or "cannot be read as the record of a run" in done.stderr


def test_entries_that_cannot_be_read_are_an_error_and_no_crash(home: Path) -> None:
    path = home / "runs" / f"{DAMAGED}.sqlite"
    changed("UPDATE journal SET details = '{'")(path)
    with open_run(home, DAMAGED) as run, pytest.raises(DataError, match="cannot be read"):
        run.journal()
    with pytest.raises(PenstockError, match="cannot be read"):
        Answers(home).run(DAMAGED)


@pytest.mark.parametrize("kept", ["[" * 4096, '{"state": "finished"', "5", "\n" * 100])
def test_a_run_whose_kept_outcome_cannot_be_read_was_killed(home: Path, kept: str) -> None:
    record = begin_run(home)
    record.write(totals={"t_s": 1234.5})
    record.abandon()
    record.path.with_suffix(".alive").write_text(kept)
    with open_run(home, "last") as run:
        assert run.outcome == RunOutcome(state="killed", t_s=1234.5)


def test_values_that_other_programs_cannot_read_or_print_are_recorded_as_ones_they_can(home: Path) -> None:
    loader = {"name": "broken \ud800 name", "arguments": {"timeout": float("inf"), "memory": float("nan")}}
    with begin_run(home, loaders=[loader]) as record, Run(record.path) as run:
        (found,) = run.facts["loaders"]
        assert found == {"name": "broken ? name", "arguments": {"timeout": None, "memory": None}}


# -- the socket of a run ------------------------------------------------------------------------


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


def test_only_the_socket_of_the_run_itself_is_asked(home: Path) -> None:
    other = home / "agent"
    with begin_run(home) as record, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(other))
        listener.listen(1)
        listener.setblocking(False)
        record.set_fact("socket", str(other))
        with Run(record.path) as run, pytest.raises(PenstockError, match="cannot be reached"):
            ask(run, {"do": "state"}, timeout_s=1.0)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_home_with_a_long_path_uses_a_short_folder_for_sockets_in_any_environment(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = home / "run"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    long_home = home / ("long" * 30)
    with begin_run(long_home) as record, socket.socket(socket.AF_UNIX) as listener:
        path = socket_path(long_home, record.id)
        assert path.is_relative_to(runtime)
        listener.bind(str(path))
        record.set_fact("socket", str(path))
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        with Run(record.path) as run:
            assert own_socket(run) == path
            path.parent.chmod(0o755)
            assert own_socket(run) is None, "others can put sockets there"
