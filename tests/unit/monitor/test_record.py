"""What is written of a run is what is read of it, for any length, any text, any ending."""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from pathlib import Path

import pytest

from penstock.errors import DataError, PenstockError
from penstock.monitor.runs.format import MOST_ENTRIES, THINNING, Note, Point, RunOutcome, pack, unpack
from penstock.monitor.runs.reader import Run, delete_run, list_runs, open_run
from penstock.monitor.runs.writer import RunRecord, new_id
from support.recorded_runs import GIB, begin_run, fill, point_at

HOSTILE = [
    "<script>alert(1)</script>",
    "🎉" * 5000,
    "../../etc/passwd",
    "a\x1b[31mred\nline\0nul",
    "'; DROP TABLE facts",
]


def test_points_journal_and_outcome_come_back_as_they_were_written(tmp_path: Path) -> None:
    points = [point_at(1000.0 + number, number) for number in range(5)]
    with begin_run(tmp_path, started_s=1000.0) as record:
        record.write(points[:3], notes=[Note(t_s=1001.0, who="training", kind="moment", what="now", details={"a": 1})])
        # Figures that turn up later, as a GPU's do, do not disturb what was written before.
        later = [point._replace(figures={**point.figures, "gpu.1.used_bytes": 7.0}) for point in points[3:]]
        record.write(later)
    with open_run(tmp_path, record.id) as run:
        assert run.points() == [*points[:3], *later]
        assert run.points(since=1002.0) == later and run.latest == later[-1]
        (note,) = run.journal()
        assert (note.who, note.what, note.details, note.number) == ("training", "now", {"a": 1}, 1)
        assert run.journal(since=1001.0) == []
        assert run.journal(after=1) == [] and run.journal(after=0) == [note]
        assert run.outcome is not None and run.outcome.state == "finished"


def test_an_unknown_figure_is_left_out_and_never_zero() -> None:
    places = {"a": 0, "b": 1, "c": 2}
    assert unpack(pack({"b": 2.0}, places), ["a", "b", "c"]) == {"b": 2.0}
    assert unpack(pack({"a": 1.0}, {"a": 0}), ["a", "b", "c"]) == {"a": 1.0}


@pytest.mark.parametrize("name", HOSTILE)
def test_any_name_is_kept_as_text_and_is_in_no_path(tmp_path: Path, name: str) -> None:
    with begin_run(tmp_path, name) as record:
        pass
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.suffix == ".sqlite"] == [f"{record.id}.sqlite"]
    with open_run(tmp_path, name) as run:
        assert run.id == record.id and run.facts["name"] == name
    assert [each.name for each in list_runs(tmp_path)] == [name]


def test_old_points_are_thinned_and_keep_sums_and_peaks(tmp_path: Path) -> None:
    now_s = 10_000_000.0
    record = begin_run(tmp_path, started_s=now_s - 20_000)
    peak_s = round(now_s - 15_000)
    for start in range(0, 20_000, 1000):
        points = [
            Point(now_s - 20_000 + number, 1.0, {"tree_bytes": 5.0, "samples_per_s": 100.0, "samples": 100.0 * number})
            for number in range(start + 1, start + 1001)
        ]
        record.write([p._replace(figures={**p.figures, "tree_bytes": 9.0}) if p.t_s == peak_s else p for p in points])
    with open_run(tmp_path, "last") as run:
        points = run.points(most=10**6)
        assert sum(point.span_s for point in points) == 20_000
        assert max(point.figures["tree_bytes"] for point in points) == 9.0
        assert all(point.figures["samples_per_s"] == pytest.approx(100.0) for point in points)
        assert points[-1].figures["samples"] == 2_000_000
        spans = {point.span_s for point in points if point.t_s < now_s - THINNING[1].after_s - 120}
        assert spans <= {60.0, 40.0, 20.0, 59.0}, "older than three hours: a minute each, but for the edges"
        assert all(point.span_s == 1.0 for point in points if point.t_s > now_s - THINNING[0].after_s)
    record.abandon()


def test_a_day_of_points_is_small_and_cheap_to_read(tmp_path: Path) -> None:
    ended_s = time.time()
    record = begin_run(tmp_path, started_s=ended_s - 24 * 3600)
    fill(record, 24 * 3600, ended_s=ended_s)
    record.finish(RunOutcome(state="finished", t_s=ended_s))
    assert record.path.stat().st_size < 5 << 20
    began_s = time.process_time()
    with open_run(tmp_path, "last") as run:
        points = run.points(most=2000)
        assert 1000 < len(points) <= 2000
        assert sum(point.span_s for point in points) == pytest.approx(24 * 3600)
        assert len(run.points(most=50)) <= 50
    assert time.process_time() - began_s < 1.0


def test_the_journal_is_bounded_and_forgets_the_oldest(tmp_path: Path) -> None:
    with begin_run(tmp_path) as record:
        notes = [Note(t_s=float(n), who="governor", kind="decision", what="x" * 5000) for n in range(MOST_ENTRIES + 10)]
        record.write(notes=notes)
        with open_run(tmp_path, "last") as run:
            kept = run.journal()
    assert len(kept) == MOST_ENTRIES and kept[-1].number == MOST_ENTRIES + 10
    assert all(len(note.what) <= 2000 for note in kept)


def test_a_run_is_found_by_id_beginning_name_and_last(tmp_path: Path) -> None:
    records = [begin_run(tmp_path, name, started_s=1_700_000_000.0 + 100 * n) for n, name in enumerate("aab")]
    for record in records:
        record.finish(RunOutcome(state="finished", t_s=1.0))

    def found(which: str) -> str:
        with open_run(tmp_path, which) as run:
            return run.id

    assert found("last") == found("b") == found(records[2].id) == records[2].id
    assert found("a") == records[1].id, "of two with one name, the newer"
    assert found(records[0].id[:-1]) == records[0].id
    with pytest.raises(PenstockError, match="ids of 3 runs begin with"):
        open_run(tmp_path, records[0].id[:6])
    with pytest.raises(PenstockError, match=r"no run in .* has the name 'nobody'"):
        open_run(tmp_path, "nobody")
    with pytest.raises(PenstockError, match="no run is recorded"):
        open_run(tmp_path / "empty", "last")


def test_of_two_runs_of_one_second_the_last_is_the_one_that_began_later(tmp_path: Path) -> None:
    first = RunRecord(tmp_path, {"started_s": 1_700_000_000.1}, run_id="231114-221320-zzzz")
    second = RunRecord(tmp_path, {"started_s": 1_700_000_000.9}, run_id="231114-221320-aaaa")
    with open_run(tmp_path, "last") as run:
        assert run.id == second.id
    first.abandon()
    second.abandon()


def test_a_run_without_an_outcome_whose_process_is_gone_was_killed(tmp_path: Path) -> None:
    record = begin_run(tmp_path)
    record.write([point_at(time.time(), 1)], totals={"t_s": 1234.5})
    with open_run(tmp_path, "last") as run:
        assert run.outcome is None and run.state == "running"
        record.abandon()
        assert run.outcome == RunOutcome(state="killed", t_s=1234.5)
    assert [each.state for each in list_runs(tmp_path)] == ["killed"]
    with sqlite3.connect(record.path) as db:
        assert db.execute("SELECT state FROM outcome").fetchall() == [("killed",)], "the first reader writes it down"
    db.close()


def test_a_run_of_another_machine_counts_as_running_while_it_writes(tmp_path: Path) -> None:
    for heard_s, state in ((time.time(), "running"), (time.time() - 3600, "killed")):
        record = begin_run(tmp_path, started_s=heard_s, host="elsewhere", boot_id="other")
        record.write(totals={"t_s": heard_s})
        with open_run(tmp_path, record.id) as run:
            assert run.state == state
        record.abandon()


def test_an_outcome_stored_outside_the_database_is_found(tmp_path: Path) -> None:
    record = begin_run(tmp_path)
    record.keep_outcome(RunOutcome(state="failed", t_s=5.0, what="OutOfMemoryError: no room 🎉"))
    record.abandon()
    with open_run(tmp_path, "last") as run:
        assert run.outcome == RunOutcome(state="failed", t_s=5.0, what="OutOfMemoryError: no room 🎉")
        assert run.summary().what == "OutOfMemoryError: no room 🎉"


def test_a_finished_run_is_one_private_file_and_its_lock(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with begin_run(home) as record:
        record.write([point_at(time.time(), 1)])
    assert sorted(path.name for path in (home / "runs").iterdir()) == [f"{record.id}.alive", f"{record.id}.sqlite"]
    for path in (home, home / "runs", *(home / "runs").iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_only_an_ended_run_can_be_removed_and_all_its_files_go(tmp_path: Path) -> None:
    record = begin_run(tmp_path)
    with open_run(tmp_path, "last") as run:
        with pytest.raises(PenstockError, match="is running"):
            delete_run(run)
        record.abandon()
        delete_run(run)
    assert list((tmp_path / "runs").iterdir()) == []


def test_files_that_are_not_records_are_skipped_in_lists_and_named_in_errors(tmp_path: Path) -> None:
    with begin_run(tmp_path, "good"):
        pass
    (tmp_path / "runs" / "000000-000000-junk.sqlite").write_bytes(os.urandom(8192))
    (tmp_path / "runs" / "000000-000000-none.sqlite").touch()
    newer = begin_run(tmp_path, "newer", format=99)
    newer.abandon()
    assert [each.name for each in list_runs(tmp_path)] == ["good"]
    for name in ("000000-000000-junk", "000000-000000-none"):
        with pytest.raises(DataError, match="cannot be read as the record of a run"):
            open_run(tmp_path, name)
    with pytest.raises(DataError, match="format 99"):
        Run(newer.path)


def test_a_summary_gives_rates_over_the_time_a_loader_was_read(tmp_path: Path) -> None:
    with begin_run(tmp_path) as record:
        fill(record, 100, ended_s=time.time())
    (summary,) = list_runs(tmp_path)
    assert summary.samples_per_s == 640 and summary.wait_fraction == pytest.approx(0.1)
    assert summary.peak_bytes == 7 * GIB and summary.limit_bytes == 16 * GIB
    (tried,) = summary.tried
    assert tried.samples_per_s == 640 and tried.configuration["workers"] == 4


def test_ids_sort_by_time() -> None:
    ids = [new_id(1_700_000_000.0 + seconds) for seconds in (0, 1, 61, 3700, 90_000)]
    assert ids == sorted(ids) and len(set(map(len, ids))) == 1
