"""A report as one self-contained HTML file: no script, no font, no network access.

In:  an ``Account``, plans to compare with.
Out: HTML.
Runs in: command line; pure.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property
from importlib import resources
from typing import Any

from penstock._version import __version__
from penstock.advice.verdict import Verdict, verdict
from penstock.charts.markup import Html, tag
from penstock.formatting import one_line
from penstock.report import sections
from penstock.report.account import Account
from penstock.report.predictions import HOW_TO_GET_ONE, Compared, Prediction, compare, has_plan
from penstock.report.stretches import AlertHistory, Epoch, Stall, alert_histories, epochs, stalls
from penstock.report.timelines import ReportChart, RunEvent, report_charts, run_events

_LONGEST_NAME = 120
_STYLE = (resources.files("penstock.report") / "report.css").read_text(encoding="utf-8")
_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_POLICY = f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'"
"""The browser lets the file use this style and nothing else."""


@dataclass(frozen=True)
class Report:
    """The report of one run."""

    account: Account
    plans: tuple[Prediction, ...]
    """Plans to compare with."""
    made_s: float
    """When the report was made, seconds since 1970."""

    @cached_property
    def verdict(self) -> Verdict:
        return verdict(self.account)

    @cached_property
    def compared(self) -> tuple[Compared, ...]:
        return compare(self.account, self.plans)

    @cached_property
    def stalls(self) -> tuple[Stall, ...]:
        return stalls(self.account)

    @cached_property
    def epochs(self) -> dict[int, tuple[Epoch, ...]]:
        """Loader -> passes over its dataset."""
        found = {number: epochs(self.account, number) for number in range(len(self.account.loaders))}
        return {number: each for number, each in found.items() if each}

    @cached_property
    def alerts(self) -> tuple[AlertHistory, ...]:
        return alert_histories(self.account)

    @cached_property
    def charts(self) -> tuple[ReportChart, ...]:
        return report_charts(self.account)

    @cached_property
    def events(self) -> tuple[RunEvent, ...]:
        return run_events(self.account)

    def html(self) -> str:
        """The whole file."""
        name = one_line(self.account.summary.name, _LONGEST_NAME) or self.account.summary.id
        head = tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("meta", name="referrer", content="no-referrer"),
            tag("title", f"{name}: penstock report"),
            tag("style", Html(_STYLE)),
        )
        return f"<!doctype html>\n{tag('html', head, tag('body', self._main(name), self._footer()), lang='en')}\n"

    def as_json(self) -> dict[str, Any]:
        """The report for programs, without the charts."""
        summary = self.account.summary
        return {
            "run": summary.id,
            "name": summary.name,
            "state": summary.state,
            "what": summary.what,
            "started_s": summary.started_s,
            "ended_s": summary.ended_s,
            "duration_s": self.account.length_s,
            "samples": summary.samples,
            "samples_per_s": summary.samples_per_s,
            "wait_fraction": summary.wait_fraction,
            "peak_bytes": summary.peak_bytes,
            "limit_bytes": summary.limit_bytes,
            "gpu_busy": self.account.gpu_busy(),
            "worker_restarts": summary.worker_restarts,
            "bottleneck": self.verdict.bottleneck,
            "headline": self.verdict.headline,
            "findings": [each.as_json() for each in self.verdict.findings],
            "predictions": [{**asdict(each), "error": each.error, "holds": each.holds} for each in self.compared],
            "stalls": [{**asdict(each), "wait_fraction": each.wait_fraction} for each in self.stalls],
            "epochs": [
                {"loader": self.account.name_of(number), **asdict(each)}
                for number, own in self.epochs.items()
                for each in own
            ],
            "alerts": [asdict(each) for each in self.alerts],
        }

    # -- inside -----------------------------------------------------------------------------

    def _main(self, name: str) -> Html:
        account = self.account
        parts = [
            sections.opening(account, name),
            tag("p", self.verdict.headline, class_=f"headline {self.verdict.bottleneck}"),
            sections.tiles(account),
            sections.section("Findings, and what to change", sections.findings(self.verdict)),
            sections.section("Over time", *(sections.figure(each) for each in self.charts))
            if self.charts
            else sections.section("Over time", tag("p", "Nothing was recorded.")),
            sections.section("Prediction and measurement", self._predictions()),
            sections.section("Settings tried", sections.tried(account)),
            sections.section("Waiting", sections.stalled(account, self.stalls)),
        ]
        if self.epochs:
            parts.append(sections.section("Passes over the dataset", sections.passes(account, self.epochs)))
        if self.alerts:
            parts.append(sections.section("Alerts", sections.alerts(self.alerts)))
        parts.append(sections.section("Events", sections.journal(account, self.events)))
        parts.append(sections.section("The run", sections.facts(account)))
        return tag("main", *parts)

    def _predictions(self) -> Html:
        rows = sections.predictions(self.compared)
        return rows if has_plan(self.compared) else tag("div", rows, tag("p", HOW_TO_GET_ONE, class_="about"))

    def _footer(self) -> Html:
        made = datetime.fromtimestamp(self.made_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
        running = " The run is still training; these are its figures at that time." if self.account.is_running else ""
        return tag("footer", f"Made by penstock {__version__} on {made}.{running}")
