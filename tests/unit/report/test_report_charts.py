"""The charts of a report: to scale, with gaps where nothing is known, marks that do not pile up, tables behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.charts.plane import ticks
from penstock.charts.timeline import Series, Timeline, time_ticks
from penstock.monitor.runs.format import Alert, Note
from penstock.report.timelines import MOST_MARKS, report_charts, run_events
from support.run_accounts import BEGAN_S, GIB, account_of


def chart(values: list[float | None], *, unit: Any = "1/s", times: list[float] | None = None, **more: Any) -> Timeline:
    times_s = times or [float(number + 1) for number in range(len(values))]
    series = [Series(name="a", look="speed", values=values)]
    return Timeline(
        title="T", summary="S", unit=unit, times_s=times_s, spans_s=[1.0] * len(values), length_s=times_s[-1],
        lines=series, **more,
    )  # fmt: skip


def coordinates(svg: str, look: str) -> list[list[tuple[float, float]]]:
    """The pieces of a line as drawn."""
    (path,) = re.findall(rf'<path class="[a-z]+ {look}" d="([^"]*)"', svg)
    pieces = [piece.strip("Z") for piece in path.split("M") if piece]
    return [[(float(x), float(y)) for x, y in (at.split() for at in piece.split("L"))] for piece in pieces]


def test_values_are_drawn_to_scale_inside_the_frame() -> None:
    drawn = chart([0.0, 50.0, 100.0])
    plane = drawn.plane
    ((first, middle, last),) = coordinates(drawn.svg(), "speed")
    assert last[0] == plane.width - plane.right and plane.left < first[0] < middle[0]
    assert first[1] - middle[1] == pytest.approx(middle[1] - last[1], abs=0.2)
    assert plane.top <= last[1] < middle[1] < first[1] <= plane.height


def test_a_line_breaks_at_unknown_values_and_at_gaps_in_time() -> None:
    assert [len(piece) for piece in coordinates(chart([1.0, 2.0, None, 3.0, 4.0]).svg(), "speed")] == [2, 2]
    gap = chart([1.0, 2.0, 3.0, 4.0], times=[1.0, 2.0, 60.0, 61.0])
    assert [len(piece) for piece in coordinates(gap.svg(), "speed")] == [2, 2]


def test_a_near_bound_is_drawn_and_a_far_one_is_only_named() -> None:
    far = Series(name="limit", look="limit", values=[1000.0] * 3)
    near = Series(name="budget", look="budget", values=[120.0] * 3)
    drawn = chart([90.0, 95.0, 100.0], bounds=[far, near])
    assert drawn.far_away() == [far] and 'class="line limit"' not in drawn.svg()
    assert all(
        drawn.plane.top < y < drawn.plane.height for piece in coordinates(drawn.svg(), "budget") for _, y in piece
    )


def test_stacked_layers_touch() -> None:
    account = account_of(seconds=3)
    svg = report_charts(account)[0].timeline.svg()
    arena, workers = coordinates(svg, "arena")[0], coordinates(svg, "workers")[0]
    assert arena[:3] == workers[3:][::-1]


@pytest.mark.parametrize("values", [[0.0], [0.0, 0.0], [1e-9, 1e-9], [1e18, 1.0], [None, None]])
def test_any_values_make_a_chart_of_finite_numbers(values: list[float | None]) -> None:
    for unit in ("bytes", "1/s", "share"):
        svg = chart(values, unit=unit).svg()
        assert "nan" not in svg and "inf" not in svg and svg.count("<text") >= 2


def test_axes_have_a_few_round_numbers() -> None:
    for top in (0.003, 1.0, 7.0, 99.0, 12_345.0, 3.3e9):
        assert 3 <= len(ticks(top, "1/s")) <= 7 and 3 <= len(ticks(max(1.0, top) * 1024, "bytes")) <= 8
    for length_s in (1.0, 46.0, 3600.0, 86400.0, 7 * 86400.0, 400 * 86400.0):
        assert 2 <= len(time_ticks(length_s)) <= 9


def test_there_is_a_chart_for_each_kind_of_figure_that_was_recorded() -> None:
    assert [each.id for each in report_charts(account_of())] == ["memory", "speed", "waiting"]
    cached = account_of(
        busy=0.5, figures=lambda second: {"cache_hit_rate": 0.5, "cache_hits": 1.0, "cache_misses": 1.0}
    )
    assert [each.id for each in report_charts(cached)] == [
        "memory",
        "speed",
        "waiting",
        "gpu-busy",
        "gpu-memory",
        "cache",
    ]
    assert report_charts(account_of(seconds=0)) == ()


def test_the_table_behind_a_chart_keeps_peaks_and_means() -> None:
    account = account_of(
        seconds=160,
        figures=lambda second: {"used_bytes": (8.0 if second == 75 else 4.0) * GIB, "samples_per_s": second},
    )
    memory, speed, _ = report_charts(account)
    assert len(memory.rows) == 16
    column = memory.headings.index("in use, all processes")
    assert [row[column] for row in memory.rows].count("8.00 GiB") == 1
    assert speed.rows[0] == ["0:10", "4.5"] and speed.rows[-1][0] == "2:40"


def test_events_are_numbered_by_time_and_the_important_ones_are_kept() -> None:
    notes = [Note(t_s=BEGAN_S + number, who="training", kind="moment", what=f"m{number}") for number in range(500)]
    telling = Note(t_s=BEGAN_S + 5.5, who="terminal", kind="resize", what="workers 1 -> 2")
    alert = Alert(t_s=BEGAN_S + 7.5, rule="memory", state="raised", what="full")
    found = run_events(account_of(journal=[*notes, telling], alerts=[alert]))
    assert len(found) == MOST_MARKS and [each.number for each in found] == list(range(1, MOST_MARKS + 1))
    assert [each.t_s for each in found] == sorted(each.t_s for each in found)
    assert {"workers 1 -> 2", "full", "m499"} <= {each.what for each in found}
    many = [Note(t_s=BEGAN_S + number, who="loader", kind="restart", what="x") for number in range(300)]
    assert len(run_events(account_of(journal=[*notes, *many]))) == MOST_MARKS


def test_marks_are_on_every_chart_and_their_numbers_do_not_overlap() -> None:
    notes = [Note(t_s=BEGAN_S + at, who="training", kind="moment", what=f"at {at}") for at in (50, 50.1, 50.2, 90)]
    for each in report_charts(account_of(journal=notes)):
        (marks,) = re.findall(r'<g class="marks"[^>]*>.*</g>', each.timeline.svg())
        assert marks.count("<path") == 4 and "<title>2: moment: at 50.1</title>" in marks
        assert re.findall(r">(\d+)</text>", marks) == ["1", "4"]


def test_a_part_of_memory_has_one_colour_in_the_report_and_on_the_page() -> None:
    """In the light scheme, then in the dark one."""
    root = Path(penstock.__file__).parent
    page = (root / "web/static/page.css").read_text()
    report = (root / "report/report.css").read_text()
    layers = re.findall(r'\["(\w+)_bytes", "(\w+)"\]', (root / "web/static/run_charts.js").read_text())
    assert [part for part, _ in layers] == ["trainer", "workers", "arena", "cache", "other"]
    for part, colour in layers:
        here = re.findall(rf"--{part}:(#\w+)", report)
        assert len(here) == 2 and here == re.findall(rf"--{colour}: (#\w+)", page), part
