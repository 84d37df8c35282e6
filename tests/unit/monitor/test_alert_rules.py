"""When alerts are raised and cleared, what they are about and what is given back: tables, on paper."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.errors import ConfigError
from penstock.monitor.alerts.alarm import Alarm, Holding, ReleaseStep, next_step
from penstock.monitor.alerts.rules import (
    AlertRule,
    AlertState,
    Command,
    GiveBack,
    Log,
    WatchedValue,
    Webhook,
    in_words,
    next_state,
)
from penstock.monitor.runs.format import Point

GIB = 1 << 30
R, C = "raised", "cleared"


@pytest.mark.parametrize(
    ("for_s", "calm_s", "values", "news"),
    [
        # one value a second against 100, over below 95
        (0, 0, [99, 100, 101, 99, 96, 95, 94, 100], [None, R, None, None, None, None, C, R]),
        (2, 0, [100, 100, 99, 100, 100, 100, 100], [None, None, None, None, None, R, None]),
        (2, 3, [100, 100, 100, 90, 90, 96, 90, 90, 90, 90], [None, None, R, None, None, None, None, None, None, C]),
        (1, 1, [100, None, 100, 100, 90, None, 90, 90], [None, None, None, R, None, None, None, C]),
        (0, 1, [120] * 6, [R, None, None, None, None, None]),
    ],
)  # fmt: skip
def test_an_alert_is_raised_once_per_crossing_and_over_after_a_calm_time(
    for_s: float, calm_s: float, values: list[float | None], news: list[str | None]
) -> None:
    rule = AlertRule(on="memory", at=100 * GIB, for_s=for_s, calm_s=calm_s)
    standing, heard = AlertState(), []
    for now_s, value in enumerate(values):
        standing, new = next_state(standing, rule, value, 100.0, float(now_s))
        heard.append(new)
    assert heard == news


def test_an_unknown_threshold_changes_nothing() -> None:
    rule = AlertRule(on="memory", at="90%", for_s=0)
    threshold = WatchedValue(rule).threshold({"used_bytes": 1e18})
    assert next_state(AlertState(), rule, 1e18, threshold, 0.0) == (AlertState(), None)


@pytest.mark.parametrize(
    ("on", "at", "figures", "value", "threshold", "words"),
    [
        ("memory", "90%", {"used_bytes": 9.5 * GIB, "limit_bytes": 10 * GIB}, 9.5 * GIB, 9 * GIB,
         "memory in use is 9.50 GiB of 10.0 GiB (95.0%), alert at 9.00 GiB"),
        ("memory", 0.5, {"used_bytes": 6 * GIB, "limit_bytes": 10 * GIB}, 6 * GIB, 5 * GIB, "(60.0%)"),
        ("tree", "1GiB", {"tree_bytes": 2 * GIB}, 2 * GIB, GIB, "this training has 2.00 GiB, alert at 1.00 GiB"),
        ("stall", 0.3, {"wait_fraction": 0.45}, 0.45, 0.3, "this training waits for data 45% of the time, alert"),
        ("gpu-idle", "60%", {"gpu.0.busy_fraction": 0.1, "gpu.1.busy_fraction": 0.5}, 0.7, 0.6, "idle 70% of the time"),
        ("gpu-idle", 0.6, {"gpu.0.busy_fraction": 0.1, "gpu.0.reserved_bytes": 5.0, "gpu.1.busy_fraction": 0.9},
         0.9, 0.6, "idle 90%"),
        ("gpu-idle", 0.6, {"tree_bytes": 5.0}, None, 0.6, None),
        ("stall", 0.3, {}, None, 0.3, None),
    ],
)  # fmt: skip
def test_a_rule_takes_its_value_from_the_figures(
    on: Any, at: Any, figures: dict[str, float], value: float | None, threshold: float, words: str | None
) -> None:
    rule = AlertRule(on=on, at=at)
    watched = WatchedValue(rule)
    found = watched.value(figures, 0.0)
    assert found == (None if value is None else pytest.approx(value))
    assert watched.threshold(figures) == pytest.approx(threshold)
    if words is not None and found is not None:
        assert words in in_words(rule, found, threshold, figures, whose="this training")


def test_growth_counts_from_the_lowest_level_within_the_time() -> None:
    watched = WatchedValue(AlertRule(on="swap", at="1GB", within_s=10))
    levels = {0: 5, 1: 4, 5: 6, 10: 9, 11: 9, 12: 9, 15: 9, 16: 9, 21: 9, 30: 2, 31: 3}
    grown = {now_s: watched.value({"swap_used_bytes": float(level)}, float(now_s)) for now_s, level in levels.items()}
    assert grown == {0: 0, 1: 0, 5: 2, 10: 5, 11: 5, 12: 3, 15: 3, 16: 0, 21: 0, 30: 0, 31: 1}
    restarts = WatchedValue(AlertRule(on="restarts", at=2, within_s=60))
    assert [restarts.value({"worker_restarts": float(n)}, float(t)) for t, n in ((0, 7), (30, 8), (80, 9))] == [0, 1, 1]


@pytest.mark.parametrize(
    "arguments",
    [
        {"on": "mood", "at": 1}, {"on": "memory", "at": "auto"}, {"on": "memory", "at": "much"},
        {"on": "swap", "at": "50%"}, {"on": "stall", "at": "3GB"}, {"on": "restarts", "at": 0},
        {"on": "restarts", "at": "90%"}, {"on": "memory", "at": 0.9, "for_s": -1},
        {"on": "memory", "at": 0.9, "margin": 1.0}, {"on": "memory", "at": 0.9, "then": ["mail me"]},
        {"on": "memory", "at": 0.9, "calm_s": float("nan")},
    ],
)  # fmt: skip
def test_an_impossible_rule_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        AlertRule(**arguments)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "ftp://host/x", "http://", "hook", "http://host:99999", 5, "http://host/T0/SECRET token",
        "http://host/a\nb", "http://host/é",
    ],
)  # fmt: skip
def test_a_webhook_needs_an_http_address(url: Any) -> None:
    with pytest.raises(ConfigError):
        Webhook(url=url)


def test_actions_are_values_and_show_no_password() -> None:
    rule = AlertRule(on="memory", at=0.9, then=[Log(), Command(command=["mail", "me"]), GiveBack()])
    assert rule == AlertRule(on="memory", at=0.9, then=(Log(), Command(command=("mail", "me")), GiveBack()))
    assert str(Webhook(url="https://hooks.example/services/T0/B0/secret")) == "webhook to hooks.example"
    assert str(Command(command="notify --token abc123 me\x1b[31m")) == "command notify --token *** me [31m"
    for wrong in ("", [], [1], " "):
        with pytest.raises(ConfigError):
            Command(command=wrong)  # type: ignore[arg-type]


def test_depth_is_released_before_workers_and_neither_below_1() -> None:
    loaders = {
        0: Holding(number=0, depth=6, workers=3, in_flight_bytes=5.0, workers_private_bytes=9.0),
        1: Holding(number=1, depth=2, workers=2, in_flight_bytes=9.0, workers_private_bytes=2.0),
        2: Holding(number=2, depth=8, workers=0, in_flight_bytes=99.0, workers_private_bytes=0.0),
    }
    steps: list[ReleaseStep] = []
    while (step := next_step(list(loaders.values()))) is not None:
        steps.append(step)
        held = loaders[step.number]
        loaders[step.number] = Holding(
            number=held.number,
            depth=step.to if step.valve == "depth" else held.depth,
            workers=step.to if step.valve == "workers" else held.workers,
            in_flight_bytes=held.in_flight_bytes,
            workers_private_bytes=held.workers_private_bytes,
        )
    assert [(step.number, step.valve, step.to) for step in steps] == [
        (1, "depth", 1), (0, "depth", 5), (0, "depth", 4), (0, "depth", 3), (0, "depth", 2), (0, "depth", 1),
        (0, "workers", 2), (0, "workers", 1), (1, "workers", 1),
    ]  # fmt: skip
    assert next_step([Holding(number=0, depth=0, workers=9, in_flight_bytes=0, workers_private_bytes=0)]) is None
    deep = Holding(number=0, depth=64, workers=64, in_flight_bytes=1, workers_private_bytes=1)
    assert next_step([deep]) == ReleaseStep(number=0, valve="depth", to=48)


@pytest.mark.parametrize(
    ("below", "lowered"), [({"used_bytes": 90.0 * GIB}, 1), ({}, 1), ({"used_bytes": 96.0 * GIB}, 3)]
)
def test_memory_is_released_only_while_the_value_is_near_its_threshold(
    below: dict[str, float], lowered: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What was lowered first may have been enough, which the alert waits to see."""
    figures = {"loader.0.depth": 8.0, "loader.0.workers": 4.0, "loader.0.in_flight_bytes": 1.0 * GIB}
    turned: list[int] = []

    def turn(loader: Any, wanted: dict[str, int], *, who: str) -> None:
        turned.append(wanted["depth"])
        figures["loader.0.depth"] = wanted["depth"]

    recorder = SimpleNamespace(
        loaders=[SimpleNamespace(number=0, is_penstock=True, loader=object())], run_id="run", step=0,
        turn=turn, alert=lambda alert: None, note=lambda *what: None,
    )  # fmt: skip
    alarm = Alarm([AlertRule(on="memory", at=100 * GIB, for_s=0, calm_s=60, then=[GiveBack(every_s=5)])])
    with caplog.at_level(logging.WARNING, logger="penstock.monitor"):
        for now_s in range(15):
            level = {"used_bytes": 101.0 * GIB} if now_s < 1 else below
            alarm.observe(Point(float(now_s), 1.0, {**figures, **level}), cast(Any, recorder))
    assert turned == [6, 5, 4][:lowered]
    assert [text for text in caplog.messages if "lowered" in text] == [
        f"memory alert: depth of loader 0 lowered to {depth}" for depth in turned
    ]
