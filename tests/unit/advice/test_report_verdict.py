"""The verdict of a report follows from the figures, and gives their numbers and the change to make."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.advice.verdict import verdict
from penstock.findings import Finding
from penstock.monitor.runs.format import Alert, Note
from penstock.report.stretches import alert_histories, epochs, stalls
from support.run_accounts import BEGAN_S, GIB, account_of, tried


def finding(account: Any, name: str) -> Finding:
    (found,) = [each for each in verdict(account).findings if each.id == name]
    return found


def ids(account: Any) -> list[str]:
    return [each.id for each in verdict(account).findings]


@pytest.mark.parametrize(
    ("wait", "busy", "bottleneck", "words"),
    [
        (0.40, None, "loading", "Loading is the bottleneck"),
        (0.40, 0.5, "loading", "Loading is the bottleneck"),
        (0.20, None, "loading", "Loading is the bottleneck"),
        (0.10, None, "neither", "Loading costs a little"),
        (0.01, None, "neither", "Loading is not the bottleneck"),
        (0.01, 0.95, "gpu", "The GPU is the bottleneck, as it should be"),
        (0.01, 0.40, "neither", "Neither loading nor the GPU is the bottleneck"),
        (None, 0.95, "gpu", "The GPU was busy 95% of the time"),
        (None, None, "unknown", "The bottleneck is unknown"),
    ],
)
def test_the_bottleneck_follows_from_waiting_and_gpu_use(
    wait: float | None, busy: float | None, bottleneck: str, words: str
) -> None:
    found = verdict(account_of(wait=wait, busy=busy))
    assert found.bottleneck == bottleneck and found.headline.startswith(words)


def test_a_loop_that_waits_gets_its_loss_and_the_setting_to_raise() -> None:
    found = finding(account_of(wait=0.36), "bottleneck")
    assert (
        "waited for data 36% of 1:40, at 640 samples/s; without waiting, the loop would reach about 1,000" in found.what
    )
    assert found.severity == "warning" and found.fix == "raise num_workers from 4 to 8"


def test_advice_uses_the_names_of_the_users_own_settings() -> None:
    account = account_of(wait=0.36, loader={"keys": {"num_workers": "TRAIN.NUM_WORKERS"}})
    assert finding(account, "bottleneck").fix == "raise TRAIN.NUM_WORKERS from 4 to 8"


def test_a_used_up_budget_is_to_be_raised_first() -> None:
    account = account_of(wait=0.36, figures=lambda second: {"loader.0.budget_bytes": 700.0 * (1 << 20)})
    assert finding(account, "bottleneck").fix.startswith("raise memory: the loader has used 100% of it; then raise")


def test_waiting_under_earlier_settings_does_not_count() -> None:
    cured = [
        tried(0.75, speed=120.0, active_s=40.0, ended_s=40.0, workers=1),
        tried(0.01, speed=640.0, active_s=60.0, ended_s=100.0),
    ]
    found = verdict(account_of(wait=0.31, all_tried=cured))
    assert found.bottleneck == "neither"
    assert "with 4 workers, prefetch 2, 4GB, batch 32, the training loop waited for data 1.0% of 1:00" in found.headline
    assert (
        "In the whole run the loop waited 31% of the time."
        in finding(account_of(wait=0.31, all_tried=cured), "bottleneck").what
    )
    assert finding(account_of(wait=0.31, all_tried=cured), "best-tried").severity == "good"


def test_earlier_settings_that_were_faster_are_named() -> None:
    left = [
        tried(0.0, speed=900.0, active_s=40.0, ended_s=40.0, workers=8),
        tried(0.0, speed=640.0, active_s=60.0, ended_s=100.0),
    ]
    found = finding(account_of(all_tried=left), "best-tried")
    assert found.fix == "go back to 8 workers, prefetch 2, 4GB, batch 32"
    assert "gave 900 samples/s over 0:40; the last settings, 4 workers" in found.what


def test_a_run_of_seconds_is_not_judged() -> None:
    found = verdict(account_of(wait=0.9, seconds=5))
    assert found.bottleneck == "unknown" and found.headline == "Too short for a verdict: data was read for 5 s."


@pytest.mark.parametrize(
    ("loader", "words"),
    [({"kind": "torch"}, "torch's own DataLoader does not measure"), ({"kind": "penstock"}, "no data was read")],
)
def test_the_reason_for_unknown_waiting_is_given(loader: dict[str, Any], words: str) -> None:
    assert words in verdict(account_of(wait=None, loader=loader)).headline


@pytest.mark.parametrize(
    ("used", "severity", "title"),
    [
        (4.0, "good", "There is memory to spare"),
        (11.0, "warning", "Memory is tight"),
        (13.0, "hurts", "Memory is nearly full"),
    ],
)
def test_peak_memory_is_compared_with_the_limit(used: float, severity: str, title: str) -> None:
    found = finding(account_of(used=used), "headroom")
    assert (found.severity, found.title) == (severity, title)
    assert f"{used:.{2 if used < 10 else 1}f} GiB of 16.0 GiB in use at the peak" in found.what
    assert bool(found.fix) == (severity != "good")


def test_each_setting_to_lower_has_the_bytes_it_would_free() -> None:
    fix = finding(account_of(used=13.0), "headroom").fix
    assert fix.startswith("lower num_workers from 4 to 2 (frees about 200 MiB); or ")


def test_a_budget_was_met_too_large_or_exceeded() -> None:
    kept = finding(account_of(), "budget")
    assert kept.severity == "good" and kept.what == "train took at most 700 MiB of its 1.00 GiB (68%)."
    wide = finding(account_of(figures=lambda second: {"loader.0.budget_bytes": 4.0 * GIB}), "budget")
    assert wide.severity == "info" and wide.fix == "lower memory to 875 MiB, which leaves the rest to other programs"
    broken = finding(account_of(figures=lambda second: {"loader.0.budget_bytes": 0.5 * GIB}), "budget")
    assert broken.severity == "warning" and broken.title == "train exceeded its budget"


def test_a_failure_comes_first_with_its_exception() -> None:
    found = verdict(account_of(state="failed", what="RuntimeError: CUDA out of memory", wait=0.5)).findings[0]
    assert found.id == "failed" and "CUDA out of memory" in found.what and "penstock gpu" in found.fix


def test_a_killed_run_is_shown_with_its_last_known_memory() -> None:
    full, calm = account_of(state="killed", used=15.5), account_of(state="killed", used=2.0)
    assert "15.5 GiB of 16.0 GiB were in use (97%)" in finding(full, "killed").what
    assert finding(full, "killed").fix.startswith("memory was full")
    assert "find the cause" in finding(calm, "killed").fix


def test_crashed_workers_are_listed_with_the_causes() -> None:
    note = Note(
        t_s=BEGAN_S + 9, who="loader", kind="restart", what="train: worker 2 (pid 7) was killed by signal SIGKILL"
    )
    found = finding(account_of(worker_restarts=1, journal=[note]), "worker-restarts")
    assert found.what.startswith("1 worker crashed and was replaced: train: worker 2") and "memory ran out" in found.fix
    assert "worker-restarts" not in ids(account_of())


def test_alerts_are_summarised_by_rule() -> None:
    times = [(10, "raised"), (20, "cleared"), (30, "raised")]
    alerts = [Alert(t_s=BEGAN_S + at, rule="memory", state=state, what="full") for at, state in times]  # type: ignore[arg-type]
    account = account_of(alerts=alerts)
    (found,) = alert_histories(account)
    assert (found.raised, found.stood_s, found.stands) == (2, 80.0, True)
    assert "Raised 2 times, for 1:20 in total, and still raised at the end: full." in finding(account, "alert").what


def test_swap_and_a_useless_cache_are_found() -> None:
    def figures(second: int) -> dict[str, float]:
        return {
            "swap_used_bytes": second * 10.0 * (1 << 20), "cache_hits": 1.0 * second, "cache_misses": 99.0 * second,
            "cache_bytes": 1.0 * GIB, "loader.0.cache_limit_bytes": 1.0 * GIB,
        }  # fmt: skip

    found = ids(account_of(figures=figures))
    assert found[0] == "swap-growth" and "cache-hit-rate" in found


def test_stalls_are_found_with_the_events_before_them() -> None:
    note = Note(t_s=BEGAN_S + 49, who="terminal", kind="resize", what="train: workers 4 -> 1")
    account = account_of(
        figures=lambda second: {"wait_fraction": 0.9 if 50 <= second < 60 or second < 3 else 0.0}, journal=[note]
    )
    start, later = stalls(account)
    assert start.after.startswith("the start") and later.after == "train: workers 4 -> 1"
    assert later.began_s == BEGAN_S + 50 and later.ended_s == BEGAN_S + 60
    assert later.wait_fraction == pytest.approx(0.9)
    assert stalls(account_of(wait=0.1)) == ()


def test_passes_over_the_dataset_follow_from_the_sample_count() -> None:
    account = account_of(
        loader={"dataset_length": 640 * 40}, figures=lambda second: {"loader.0.wait_s": 0.5 * max(0, second - 40)}
    )
    one, two, three = epochs(account, 0)
    assert (one.is_whole, two.is_whole, three.is_whole) == (True, True, False)
    assert one.ended_s == pytest.approx(BEGAN_S + 40) and two.ended_s - two.began_s == pytest.approx(40)
    assert one.wait_fraction == 0 and two.wait_fraction == pytest.approx(0.5, abs=0.02)
    assert three.samples == 640 * 20
    shared = account_of(loader={"dataset_length": 640 * 160}, rank={"rank": 1, "world_size": 4})
    assert len(epochs(shared, 0)) == 3
    assert epochs(account_of(loader={"dataset_length": None}), 0) == ()


def test_findings_come_worst_first() -> None:
    found = verdict(account_of(wait=0.4, used=15.0, state="killed", worker_restarts=2)).findings
    order = ["hurts", "warning", "info", "good"]
    places = [order.index(each.severity) for each in found]
    assert places == sorted(places) and places[0] == 0
