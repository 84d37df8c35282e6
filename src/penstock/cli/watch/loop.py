"""The loop of `penstock watch`: look, next_state, act, wait.

In:  a subject, rules.
Out: news to the report; actions begun.
Runs in: command line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock.cli.watch.subjects import Subject
from penstock.cli.watch.view import Report
from penstock.errors import PenstockError
from penstock.monitor.alerts.rules import (
    AlertRule,
    AlertState,
    Command,
    Transition,
    WatchedValue,
    Webhook,
    in_words,
    next_state,
)

_LAST_ACTIONS_S = 40.0
"""How long the end waits for commands and webhooks, which have time limits of their own."""


def watch_on(
    subject: Subject, rules: Sequence[AlertRule], report: Report, *, every_s: float, sleep: Callable[[float], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:  # fmt: skip
    """Until what is watched has ended."""
    watched = [WatchedValue(rule) for rule in rules]
    standings = [AlertState()] * len(rules)
    due_s = clock()
    while True:
        seen = subject.look()
        if isinstance(seen, str):
            report.end(seen)
            report.performer.close(_LAST_ACTIONS_S)
            return
        now_s = clock()
        for number, rule in enumerate(rules):
            value, threshold = watched[number].value(seen, now_s), watched[number].threshold(seen)
            standings[number], news = next_state(standings[number], rule, value, threshold, now_s)
            if news is not None and value is not None and threshold is not None:
                _tell(subject, rule, news, value, threshold, seen, report)
        report.status(seen, rules, is_raised=any(each.is_raised for each in standings))
        # A look that was missed, in a machine that slept or swaps, is not made up for.
        due_s = max(due_s + every_s, clock())
        sleep(max(0.0, due_s - clock()))


def look_once(
    subject: Subject, rules: Sequence[AlertRule], report: Report, *, every_s: float, twice: bool
) -> bool:  # fmt: skip
    """Whether anything is over its line."""
    watched = [WatchedValue(rule) for rule in rules]
    if twice:
        seen = subject.look()
        if not isinstance(seen, str):
            now_s = time.monotonic()
            for each in watched:
                each.value(seen, now_s)
        time.sleep(every_s)
    seen = subject.look()
    if isinstance(seen, str):
        raise PenstockError(seen)
    found: list[dict[str, Any]] = []
    for rule, each in zip(rules, watched, strict=True):
        value, threshold = each.value(seen, time.monotonic()), each.threshold(seen)
        if value is not None and threshold is not None and value >= threshold:
            found.append(_tell(subject, rule, "raised", value, threshold, seen, report, quietly=True))
    report.once(seen, rules, found)
    report.performer.close(_LAST_ACTIONS_S)
    return bool(found)


def _tell(
    subject: Subject, rule: AlertRule, news: Transition, value: float, threshold: float, seen: dict[str, float],
    report: Report, *, quietly: bool = False,
) -> dict[str, Any]:  # fmt: skip
    text = in_words(rule, value, threshold, seen, whose=subject.whose)
    facts: dict[str, Any] = {
        "t_s": time.time(), "alert": rule.on, "state": news, "text": text, "value": value, "threshold": threshold,
        "subject": subject.whose, **subject.facts,
    }  # fmt: skip
    if not quietly:
        report.alert(facts)
    for action in rule.then:
        if isinstance(action, Webhook) or (isinstance(action, Command) and news == "raised"):
            report.performer.perform(action, facts)
    return facts
