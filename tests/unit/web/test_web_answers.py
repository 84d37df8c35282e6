"""What the page is answered, read from records."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.monitor.runs.format import Alert, Note, Point, RunOutcome
from penstock.monitor.runs.reader import Run
from penstock.monitor.runs.writer import RunRecord
from penstock.web import answers as answers_file
from penstock.web.answers import Answers, RequestError, StreamPosition, columns, encoded
from support.recorded_runs import begin_run, fill, point_at


def over(record: RunRecord) -> str:
    record.finish(RunOutcome(state="finished", t_s=time.time()))
    return record.id


def note(t_s: float, what: str) -> Note:
    return Note(t_s=t_s, who="loader", kind="restart", what=what)


def test_points_become_columns_with_null_for_unknown_values() -> None:
    points = [
        Point(1.0, 1.0, {"a": 1.0}),
        Point(2.0, 1.0, {"a": math.inf, "b": 5.0}),
        Point(3.5, 1.5, {"b": math.nan, "a": -0.5}),
    ]
    assert columns(points) == {
        "t_s": [1.0, 2.0, 3.5],
        "span_s": [1.0, 1.0, 1.5],
        "figures": {"a": [1.0, None, -0.5], "b": [None, 5.0, None]},
    }


def test_numbers_that_json_lacks_are_null_and_text_stays_on_one_line() -> None:
    value = {"a": [math.nan, 1.5, {"b": -math.inf}], "c": (1, math.inf), "d": "line\nline\u2028\ud800", "e": Path("/x")}
    text = encoded(value)
    assert json.loads(text) == {"a": [None, 1.5, {"b": None}], "c": [1, None], "d": "line\nline\u2028\ud800", "e": "/x"}
    assert text.isascii() and b"\n" not in text


def test_the_list_reads_ended_runs_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.time()
    ids = []
    for number in range(22):
        record = begin_run(home, f"run {number}", started_s=now_s - 100 + number)
        fill(record, 10, ended_s=now_s)
        ids.append(over(record))
    running = begin_run(home, "now", started_s=now_s)
    (home / "runs" / "broken.sqlite").write_bytes(b"no record")
    answers = Answers(home)
    first = answers.runs()
    assert [each["id"] for each in first] == [running.id, *reversed(ids)]
    assert first[0]["state"] == "running" and first[1]["state"] == "finished"
    (tried,) = first[1]["tried"]
    assert tried["samples_per_s"] == 640.0 and tried["wait_fraction"] == pytest.approx(0.1)
    opened: list[str] = []

    def counted(path: Path) -> Any:
        opened.append(path.name)
        return Run(path)

    monkeypatch.setattr(answers_file, "Run", counted)
    assert answers.runs() == first
    assert sorted(opened) == sorted(["broken.sqlite", f"{running.id}.sqlite"])
    over(running)
    (home / "runs" / f"{ids[0]}.sqlite").unlink()
    listed = answers.runs()
    assert len(listed) == 22 and (listed[0]["id"], listed[0]["state"]) == (running.id, "finished")


def test_a_list_of_a_home_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert Answers(tmp_path / "nowhere").runs() == []


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "🎉" * 5000, "\x00\x1b[31m\n\r\u202e", "x" * 10_000, "../.."]
)
def test_hostile_names_are_answered_unchanged(home: Path, name: str) -> None:
    run_id = over(begin_run(home, name))
    answers = Answers(home)
    assert json.loads(encoded(answers.runs()))[0]["name"] == name
    assert json.loads(encoded(answers.run(run_id)))["summary"]["name"] == name


def test_one_run_has_facts_without_its_socket_and_its_events(home: Path) -> None:
    record = begin_run(home, "x", socket="/secret/place", odd=math.nan)
    fill(record, 20, ended_s=time.time())
    found = json.loads(encoded(Answers(home).run(over(record))))
    assert found["facts"]["tree_measure"] == "pss" and found["facts"]["odd"] is None
    assert "socket" not in found["facts"] and "boot_id" not in found["facts"]
    assert [each["number"] for each in found["journal"]] == [1, 2] and found["alerts"][0]["state"] == "raised"
    assert found["tried"] == found["summary"]["tried"] != []


@pytest.mark.parametrize("run_id", ["", "last", "train.py", "../runs/x", "..", "a/b", "x\x00", "x" * 5000, "%2e", "é"])
def test_an_id_leads_to_a_record_or_nowhere(home: Path, run_id: str) -> None:
    over(begin_run(home, "train.py"))
    (home / "x.sqlite").write_bytes(b"")
    with pytest.raises(RequestError) as wrong:
        Answers(home).run(run_id)
    assert wrong.value.status == 404 and len(wrong.value.why) < 300


def test_a_day_of_points_costs_less_than_half_a_second(home: Path) -> None:
    now_s = time.time()
    record = begin_run(home, "day", started_s=now_s - 86_400)
    # As a day thins out: every minute, then every 10 s, then every second.
    times = [*range(-86_400, -10_800, 60), *range(-10_800, -600, 10), *range(-600, 0)]
    record.write([point_at(now_s + t_s, number) for number, t_s in enumerate(times)])
    run_id, answers = over(record), Answers(home)
    took_s, found = [], {"t_s": []}
    for _ in range(5):
        began_s = time.thread_time()
        found = json.loads(encoded(answers.points(run_id, None, 1500)))
        took_s.append(time.thread_time() - began_s)
        if took_s[-1] < 0.5:
            break
    assert 500 < len(found["t_s"]) <= 1500 and found["t_s"][-1] == pytest.approx(now_s - 1, abs=0.01)
    assert min(took_s) < 0.5, took_s
    assert len(answers.points(run_id, now_s - 60.5, 1500)["t_s"]) == 60
    assert len(answers.points(run_id, None, 7)["t_s"]) <= 7


def test_updates_contain_each_entry_once_even_late_ones(home: Path) -> None:
    now_s, answers = time.time(), Answers(home)
    record = begin_run(home, "x", started_s=now_s - 50)
    record.write([point_at(now_s - 40, 0)], notes=[note(now_s - 40.5, "old")])
    since_s = round(now_s - 39, 3)
    first = answers.news(record.id, StreamPosition(points_s=since_s))
    assert (first.journal, first.alerts, first.points, first.ended) == ([], [], None, None)
    # Written later than the last point's time, though it bears an earlier one.
    alert = Alert(t_s=now_s - 38, rule="memory", state="raised", what="full")
    record.write([point_at(now_s - 30, 1)], notes=[note(now_s - 39.5, "late")], alerts=[alert])
    second = answers.news(record.id, first.seen)
    assert [each["what"] for each in second.journal] == ["late"] and [each["what"] for each in second.alerts] == [
        "full"
    ]
    assert second.points is not None and second.points["t_s"] == [pytest.approx(now_s - 30, abs=0.001)]
    third = answers.news(record.id, second.seen)
    assert (third.journal, third.alerts, third.points, third.seen) == ([], [], None, second.seen)
    # However late it is written: its number is higher.
    record.write(notes=[note(now_s - 1000, "much too late")])
    late = answers.news(record.id, third.seen)
    assert [each["what"] for each in late.journal] == ["much too late"] and late.seen.last_note == 3
    record.write([point_at(now_s - 20, 2)])
    over(record)
    last = answers.news(record.id, late.seen)
    assert last.points is not None and last.ended is not None and last.ended["state"] == "finished"
    everything = answers.news(record.id, StreamPosition())
    assert [each["what"] for each in everything.journal] == ["old", "late", "much too late"]
    assert everything.points is not None and len(everything.points["t_s"]) == 3


@pytest.mark.parametrize(
    "wanted",
    [None, [], "x", 3, {}, {"loader": "train"}, {"colour": 1}, {"workers": "8"}, {"workers": 1.5}, {"workers": True},
     {"workers": -1}, {"depth": None}, {"depth": 1 << 40}, {"memory": 5}, {"memory": "much"}, {"memory": None},
     {"workers": 1, "loader": [1]}, {"workers": 1, "loader": True}, {"workers": 1, "do": "state"}],
)  # fmt: skip
def test_invalid_values_are_refused_before_a_training_is_asked(home: Path, wanted: Any) -> None:
    record = begin_run(home, "x")
    with pytest.raises(RequestError) as wrong:
        Answers(home).turn(record.id, wanted)
    assert wrong.value.status == 400 and wrong.value.why
    record.abandon()


def test_a_training_without_a_socket_does_not_answer_and_an_ended_one_refuses(home: Path) -> None:
    record, answers = begin_run(home, "x"), Answers(home)
    with pytest.raises(RequestError, match="no socket") as silent:
        answers.turn(record.id, {"workers": 1})
    assert silent.value.status == 503
    with pytest.raises(RequestError, match="is over") as refused:
        answers.turn(over(record), {"workers": 1})
    assert refused.value.status == 409
