"""A run is kept whatever its disk, its sinks and its clock do; warnings come once per crossing."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from penstock.monitor.gauges import GaugeSample
from penstock.monitor.recorder import Recorder, WallClock
from penstock.monitor.runs.format import Alert, Point, RunOutcome
from penstock.monitor.runs.reader import open_run
from support.recorded_runs import begin_run

GIB = 1 << 30


class PaperClock:
    def __init__(self) -> None:
        self.now_s, self.wall_s = 100.0, 1_700_000_000.0

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.wall_s

    def go(self, seconds: float) -> None:
        self.now_s, self.wall_s = self.now_s + seconds, self.wall_s + seconds


class PaperGauges:
    """A machine of 10 GiB with as much in use as a test says."""

    def __init__(self, clock: PaperClock) -> None:
        self.clock, self.used = clock, 5.0

    def read(self, step: int, *, in_haste: bool = False) -> GaugeSample:
        levels = {"used_bytes": self.used * GIB, "limit_bytes": 10.0 * GIB, "tree_bytes": 2.0 * GIB}
        return GaugeSample(self.clock.now_s, step, levels, ())


class Kept:
    """A recorder on paper: ``tick`` is one second."""

    def __init__(self, home: Path, **options: Any) -> None:
        self.clock = PaperClock()
        self.gauges = PaperGauges(self.clock)
        clock = WallClock(self.clock.wall, self.clock.monotonic)
        self.recorder = Recorder((), self.gauges, clock=clock, warn_at=0.9, **options)  # type: ignore[arg-type]
        self.recorder.record = begin_run(home, started_s=self.clock.wall_s)

    def tick(self, used: float | None = None) -> Point:
        self.clock.go(1.0)
        self.gauges.used = self.gauges.used if used is None else used
        return self.recorder.tick()


def test_a_warning_comes_once_per_crossing_and_again_after_memory_was_calm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept(tmp_path)
    for used in (5.0, 9.1, 9.5, 8.9, 9.1, 8.6, 9.2, 8.4, 9.3, 9.9):
        kept.tick(used)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "memory is 91.0% full" in caplog.messages[0] and "memory is 93.0% full" in caplog.messages[1]
    kept.recorder.close(RunOutcome(state="finished", t_s=1.0))
    with open_run(tmp_path, "last") as run:
        assert [note.kind for note in run.journal()] == ["warning"] * 2
        assert len(run.points()) == 11


class Sink:
    def __init__(self, fails: bool = False) -> None:
        self.fails, self.written, self.closed = fails, 0, 0

    def write(self, step: int, figures: dict[str, float]) -> None:
        self.written += 1
        if self.fails:
            raise OSError("no TensorBoard today")

    def close(self) -> None:
        self.closed += 1


def test_a_failing_sink_is_not_called_again_and_the_others_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = Sink(), Sink(fails=True)
    kept = Kept(tmp_path, sinks=(bad, good))
    for _ in range(3):
        kept.tick()
    kept.recorder.close(RunOutcome(state="finished", t_s=1.0))
    assert (bad.written, good.written, good.closed) == (1, 4, 1)
    assert len(caplog.messages) == 1 and "Sink failed and is not called again" in caplog.messages[0]


def test_an_observer_gets_every_point_and_its_alerts_are_recorded(tmp_path: Path) -> None:
    class Watcher:
        def observe(self, point: Point, recorder: Recorder) -> None:
            recorder.alert(Alert(t_s=point.t_s, rule="memory", state="raised", what="full"))

        def close(self) -> None: ...

    kept = Kept(tmp_path)
    kept.recorder.watch_with(Watcher())
    points = [kept.tick(), kept.tick()]
    kept.recorder.close(RunOutcome(state="finished", t_s=1.0))
    with open_run(tmp_path, "last") as run:
        assert [alert.t_s for alert in run.alerts()][:2] == [point.t_s for point in points]


def test_a_full_disk_stops_recording_with_one_warning_and_the_outcome_is_still_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path)
    kept.tick()
    record = kept.recorder.record
    assert record is not None

    def full(*_: Any, **__: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(record, "write", full)
    for _ in range(3):
        kept.tick()
    assert len(caplog.messages) == 1 and "recording of this run has stopped, training goes on" in caplog.messages[0]
    kept.recorder.close(RunOutcome(state="failed", t_s=7.0, what="x"))
    with open_run(tmp_path, "last") as run:
        assert run.outcome == RunOutcome(state="failed", t_s=7.0, what="x") and len(run.points()) == 1


def test_a_database_that_is_locked_for_a_while_loses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept(tmp_path)
    kept.tick()
    assert kept.recorder.record is not None
    blocker = sqlite3.connect(kept.recorder.record.path, isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    for number in range(3):
        kept.recorder.note("training", "moment", f"moment {number}")
        kept.tick()
    blocker.execute("ROLLBACK")
    blocker.close()
    kept.tick()
    kept.recorder.close(RunOutcome(state="finished", t_s=1.0))
    with open_run(tmp_path, "last") as run:
        assert len(run.points()) == 6
        assert [note.what for note in run.journal()] == ["moment 0", "moment 1", "moment 2"]
    assert caplog.messages == []


def test_a_removed_record_causes_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept(tmp_path)
    kept.tick()
    assert kept.recorder.record is not None
    kept.recorder.record.path.unlink()
    for _ in range(25):
        kept.tick()
    assert kept.recorder.record is None and len(caplog.messages) == 1 and "is gone" in caplog.messages[0]
    kept.recorder.close(RunOutcome(state="finished", t_s=1.0))


def test_time_never_goes_back_and_follows_a_clock_that_jumps_ahead() -> None:
    clock = PaperClock()
    wall = WallClock(clock.wall, clock.monotonic)
    first = wall()
    clock.wall_s -= 3600
    clock.now_s += 1
    assert wall() == first + 1
    clock.wall_s += 3600 + 1 + 600
    assert wall() == pytest.approx(first + 601)
