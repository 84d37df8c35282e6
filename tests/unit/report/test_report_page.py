"""The page of a report: one file that needs nothing, says everything as text, and stays small."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from penstock.charts.markup import Html, tag, text
from penstock.errors import DataError
from penstock.monitor.runs.format import Alert, Note, Point, RunOutcome
from penstock.monitor.runs.reader import open_run
from penstock.report.account import MOST_POINTS, gather
from penstock.report.page import Report
from penstock.report.predictions import read_plans
from support.recorded_runs import begin_run, fill, point_at
from support.run_accounts import BEGAN_S, GIB, account_of

VOID = {"meta", "br", "hr", "col"}
HOSTILE = '</title></style><script>alert(1)</script><img src=x onerror=alert(2)>"\' onload="x" 🎉 \x00\x1b[31m\ud800'


class Page(HTMLParser):
    """Elements and text of a page; fails on elements that are not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.style = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            self.style += data
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def page_of(account: Any, plans: Any = ()) -> tuple[str, Page]:
    html = Report(account, plans, BEGAN_S + 500).html()
    return html, Page(html)


def check_harmless(html: str, page: Page) -> None:
    """Nothing runs, nothing is fetched, nothing is styled from elsewhere."""
    allowed = {"html", "head", "meta", "title", "style", "body", "main", "header", "section", "h1", "h2", "h3", "p",
               "span", "b", "dl", "dt", "dd", "div", "ul", "li", "figure", "figcaption", "svg", "desc", "path", "g",
               "text", "details", "summary", "table", "caption", "thead", "tbody", "tr", "th", "td",
               "footer"}  # fmt: skip
    assert {name for name, _ in page.elements} <= allowed
    for _, attributes in page.elements:
        assert not [key for key in attributes if key.startswith("on") or key in ("style", "src", "href", "xlink:href")]
    assert "url(" not in page.style and "@import" not in page.style
    (policy,) = [str(each["content"]) for each in page.named("meta") if each.get("http-equiv")]
    digest = base64.b64encode(hashlib.sha256(page.style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in policy and policy.startswith("default-src 'none'")
    html.encode("utf-8")


def test_the_page_contains_all_results() -> None:
    note = Note(t_s=BEGAN_S + 40, who="terminal", kind="resize", what="train: workers 2 -> 4")
    alert = Alert(t_s=BEGAN_S + 60, rule="stall", state="raised", what="waits 40%")
    account = account_of(wait=0.4, busy=0.5, journal=[note], alerts=[alert], loader={"dataset_length": 30_000})
    html, page = page_of(account)
    check_harmless(html, page)
    for words in (
        "Loading is the bottleneck: the training loop waited", "raise num_workers from 4 to 8", "There is "
        "memory to spare",
        "train: workers 2 -> 4", "waits 40%", "Passes over the dataset", "Prediction and measurement",
        "No plan was made for this run", "at most 1.00 GiB", "kept: 68% of it", "4 workers, prefetch 2",
    ):  # fmt: skip
        assert words in page.text, words


def test_a_plan_is_shown_with_the_measurement_and_the_error() -> None:
    plan = {
        "name": "safe", "workers": 4, "batch_size": 32, "depth": 2, "wait": 0.0,
        "memory": {"low": 1.0 * GIB, "expected": 1.4 * GIB, "high": 2.0 * GIB},
        "samples_per_s": {"low": 600.0, "expected": 704.0, "high": 800.0},
    }  # fmt: skip
    _, page = page_of(account_of(), read_plans({"plans": [plan]}, "plan.json"))
    assert "704 (600 to 800) 640 +10% within the prediction" in page.text
    assert "outside the prediction" in page.text and "No plan was made" not in page.text


def test_the_name_of_a_run_stays_text() -> None:
    notes = [Note(t_s=BEGAN_S + 1, who=HOSTILE, kind=HOSTILE, what=HOSTILE)]
    alerts = [Alert(t_s=BEGAN_S + 2, rule=HOSTILE, state="raised", what=HOSTILE)]
    loader = {"name": HOSTILE, "dataset": HOSTILE, "arguments": {HOSTILE: HOSTILE}, "keys": {"num_workers": HOSTILE}}
    facts = {"command": [HOSTILE, HOSTILE], "folder": HOSTILE, "python": {HOSTILE: HOSTILE}, "tree_measure": HOSTILE}
    account = account_of(
        wait=0.5, name=HOSTILE, host=HOSTILE, state="failed", what=HOSTILE, journal=notes, alerts=alerts, loader=loader,
        facts={**facts, "gpus": [{"name": HOSTILE}]},
    )  # fmt: skip
    html, page = page_of(account)
    check_harmless(html, page)
    assert "<script>alert(1)</script>" in page.text and "\x1b" not in html and "\x00" not in html


def test_names_of_ten_kilobytes_do_not_make_the_page_large() -> None:
    long = "🎉<b>" * 4000
    loader = {"name": long, "dataset": long, "arguments": {"memory": long}}
    notes = [Note(t_s=BEGAN_S + number, who=long, kind="restart", what=long) for number in range(1000)]
    html, _ = page_of(account_of(name=long, host=long, loader=loader, journal=notes, facts={"command": [long] * 200}))
    assert len(html.encode()) < 400_000


@pytest.mark.parametrize("facts", [{}, {"machine": None, "gpus": None, "command": None, "python": None}])
def test_facts_that_are_missing_leave_a_page(facts: dict[str, Any]) -> None:
    html, page = page_of(account_of(facts=facts))
    check_harmless(html, page)


def test_figures_have_captions_tables_and_words_for_screen_readers() -> None:
    _, page = page_of(account_of(busy=0.9))
    figures = len(page.named("figure"))
    assert figures == 5 == len(page.named("figcaption")) == len(page.named("details"))
    charts = [each for each in page.named("svg") if each.get("role") == "img"]
    assert len(charts) == figures and all(each.get("aria-label") for each in charts)
    assert len(page.named("caption")) == len(page.named("table"))
    assert all(each.get("scope") in ("col", "row") for each in page.named("th"))
    assert page.named("html")[0]["lang"] == "en" and len(page.named("h1")) == len(page.named("main")) == 1
    assert "prefers-color-scheme:dark" in page.style and "@media print" in page.style


def test_json_says_the_same() -> None:
    account = account_of(wait=0.4, state="failed", what=HOSTILE, loader={"dataset_length": 30_000})
    answer = json.loads(json.dumps(Report(account, (), BEGAN_S).as_json()))
    assert answer["bottleneck"] == "loading" and answer["findings"][0]["id"] == "failed"
    assert answer["epochs"][0]["loader"] == "train" and answer["predictions"][0]["holds"] is True


def test_only_text_that_was_made_as_markup_is_markup() -> None:
    assert tag("p", "<b>", Html("<i></i>"), class_='"x') == '<p class="&quot;x">&lt;b&gt;<i></i></p>'
    assert text("a\x00b") == "a b" and text(5) == "5"


# -- runs as they are recorded ---------------------------------------------------------------


def read(home: Path) -> tuple[str, Page, Any]:
    with open_run(home, "last") as run:
        account = gather(run)
    html, page = page_of(account)
    check_harmless(html, page)
    return html, page, account


def test_a_week_is_a_page_below_half_a_megabyte(home: Path) -> None:
    now_s = time.time()
    began_s = now_s - 7 * 86400
    record = begin_run(home, "week", started_s=began_s)
    points = [point_at(began_s + 240 * number, number, span_s=240.0) for number in range(1, 2520)]
    notes = [Note(t_s=point.t_s, who="governor", kind="decision", what="depth 3 -> 4 " * 40) for point in points[:2000]]
    record.write(points, notes=notes)
    record.finish(RunOutcome(state="finished", t_s=now_s))
    html, page, account = read(home)
    assert len(html.encode()) < 500_000 and len(account.points) <= MOST_POINTS
    assert "less important entries are left out" in page.text and "6d 00:00" in page.text


@pytest.mark.parametrize("state", ["finished", "failed", "killed", "running"])
def test_a_run_in_any_state_has_a_report(home: Path, state: str) -> None:
    record = begin_run(home, started_s=time.time() - 100)
    fill(record, 100, ended_s=time.time())
    if state == "killed":
        record.abandon()
    elif state != "running":
        record.finish(RunOutcome(state=state, t_s=time.time(), what="OSError: gone" if state == "failed" else None))  # type: ignore[arg-type]
    try:
        _, page, account = read(home)
    finally:
        record.abandon()
    assert account.summary.state == state and state in page.text
    assert ("The run is still training" in page.text) == (state == "running")
    assert ("OSError: gone" in page.text) == (state == "failed")


@pytest.mark.parametrize("points", [[], [{}], [{"tree_bytes": 5.0}], [{"loader.0.samples": 0.0}]])
def test_an_almost_empty_run_has_a_report(home: Path, points: list[dict[str, float]]) -> None:
    record = begin_run(home, loaders=[], machine=None, gpus=None)
    record.write([Point(time.time(), 0.0, figures) for figures in points])
    record.finish(RunOutcome(state="finished", t_s=time.time()))
    _, page, _ = read(home)
    assert "The bottleneck is unknown: the monitor has no loader." in page.text


@pytest.mark.parametrize("facts", [{"loaders": {"a": 1}}, {"rank": [1]}, {"gpus": 5}, {"command": 7}, {"host": []}])
def test_a_foreign_record_gives_one_clear_error(home: Path, facts: dict[str, Any]) -> None:
    record = begin_run(home, started_s=time.time() - 50, **facts)
    record.finish(RunOutcome(state="finished", t_s=time.time()))
    with pytest.raises(DataError, match="cannot be read as the record of a run"):
        read(home)


def test_a_clock_that_was_set_back_makes_no_chart_of_negative_width(home: Path) -> None:
    record = begin_run(home, started_s=time.time() + 5000)
    fill(record, 30, ended_s=time.time())
    record.finish(RunOutcome(state="finished", t_s=time.time()))
    html, _, _ = read(home)
    assert not re.search(r'd="[^"]*(nan|inf|-\d{3})', html)
