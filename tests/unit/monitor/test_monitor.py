"""penstock.Monitor in a training: lines, records, endings, valves."""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_log_line import LAYOUT

import penstock
from penstock.errors import ConfigError
from penstock.monitor.runs.reader import ask, list_runs, open_run
from penstock.monitor.runs.writer import RunRecord


class Frames(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16, 16), float(index))


def wait_until(condition: Callable[[], Any], within_s: float = 15.0) -> Any:
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "did not happen"
        time.sleep(0.02)
    return found


def test_lines_come_at_the_start_at_moments_and_every_so_many_steps(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="penstock.monitor")
    loader = penstock.DataLoader(Frames(), 8, name="train", memory="64MB")
    with penstock.Monitor(loader, every=3) as monitor:
        monitor.log("After dataset creation")
        for _ in loader:
            monitor.step()
    labels = [re.match(r"\[(.+?)\]", line).group(1) for line in caplog.messages]  # type: ignore[union-attr]
    assert labels == ["Start", "After dataset creation", "Step 3", "Step 6"]
    assert all(LAYOUT.fullmatch(line) for line in caplog.messages), caplog.messages
    assert "Samples: " in caplog.messages[-1] and "Wait: " in caplog.messages[-1]
    (summary,) = list_runs(home)
    assert (summary.state, summary.step, summary.samples) == ("finished", 8, 64)
    assert summary.id == monitor.run_id and summary.loaders[0]["name"] == "train"
    with open_run(home, "last") as run:
        assert [note.what for note in run.journal() if note.kind == "moment"] == ["After dataset creation"]
        assert run.facts["command"] and run.facts["machine"]["memory_limit_bytes"] > 0


def test_the_prediction_of_a_loader_is_recorded_with_the_run(home: Path) -> None:
    planned = penstock.DataLoader(Frames(), 8, num_workers="auto", memory="64MB", name="train")
    given = penstock.DataLoader(Frames(), 8, name="eval")
    with penstock.Monitor([planned, given], every=None):
        pass
    with open_run(home, "last") as run:
        prediction = run.facts["loaders"][0]["prediction"]
        assert prediction["workers"] == planned.num_workers and prediction["batch_size"] == 8
        assert prediction["samples_per_s"]["expected"] > 0 and prediction["memory"]["high"] > 0
        assert run.facts["loaders"][1]["prediction"] is None


def test_the_memory_that_is_logged_is_that_of_the_process_tree(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="penstock.monitor")
    with penstock.Monitor(every=None) as monitor:
        monitor.log("now")
        truth = penstock.memory()
    logged_mb = float(re.search(r"Process: ([\d.]+)MB", caplog.messages[-1]).group(1))  # type: ignore[union-attr]
    assert logged_mb * 2**20 == pytest.approx(truth.pss_bytes or truth.rss_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("error", "state", "what"),
    [
        (RuntimeError("CUDA out of memory"), "failed", "RuntimeError: CUDA out of memory"),
        (KeyboardInterrupt(), "failed", "KeyboardInterrupt"),
        (SystemExit(3), "failed", "exit status 3"),
        (SystemExit(0), "finished", None),
    ],
)
def test_the_ending_of_the_block_is_the_outcome(home: Path, error: BaseException, state: str, what: str | None) -> None:
    with pytest.raises(type(error)), penstock.Monitor(every=None):
        raise error
    (summary,) = list_runs(home)
    assert (summary.state, summary.what) == (state, what)


def test_a_second_close_and_later_steps_do_nothing(home: Path) -> None:
    monitor = penstock.Monitor(every=1)
    monitor.close()
    monitor.close()
    monitor.step()
    monitor.log("too late")
    with open_run(home, "last") as run:
        assert run.state == "finished" and run.totals["step"] == 0


def test_without_a_writable_home_there_is_one_warning_and_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "file" / "below"))
    with penstock.Monitor(every=1) as monitor:
        monitor.step()
    assert monitor.run_id is None
    assert len(caplog.messages) == 1 and "this run is not recorded, training goes on" in caplog.messages[0]


def test_a_valve_turned_from_outside_is_in_force_and_in_the_journal(home: Path) -> None:
    loader = penstock.DataLoader(Frames(), 4, num_workers=1, memory="64MB", persistent_workers=True)
    with loader, penstock.Monitor(loader, every=None), open_run(home, "last") as run:
        batches = iter(loader)
        next(batches)
        answer = ask(run, {"do": "set", "workers": 2, "depth": 3, "memory": "32MB"})
        assert answer["ok"] and answer["now"]["workers"] == 2 and answer["now"]["memory_bytes"] == 32_000_000
        assert loader.num_workers == 2 and loader.memory_bytes == 32_000_000
        (note,) = wait_until(lambda: [each for each in run.journal() if each.kind == "resize"])
        assert note.who == "terminal" and "workers 1 -> 2" in note.what and "memory 64MB -> 32MB" in note.what
        state = wait_until(lambda: _with_workers(ask(run, {"do": "state"})["state"], 2))
        assert {worker["pid"] for worker in state["loaders"][0]["workers"]} <= {
            p.pid for p in penstock.memory().processes
        }
        assert len(list(batches)) == 15


def _with_workers(state: dict[str, Any], count: int) -> dict[str, Any] | None:
    return state if len(state["loaders"][0]["workers"]) == count else None


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"workers": -1}, "workers=-1 is not a whole number from 0 to 256"),
        ({"workers": 100_000}, "is not a whole number from 0 to 256"),
        ({"depth": 0}, "depth=0 is not a whole number from 1"),
        ({"depth": True}, "depth=True is not a whole number"),
        ({"memory": "lots"}, "memory='lots' is not a size"),
        ({"memory": "900TB"}, "available here; the training would be killed"),
        ({"colour": "red"}, "colour cannot be set; write one of workers, depth, memory"),
        ({}, "nothing cannot be set"),
        ({"loader": "test", "workers": 1}, "loader='test' matches 0 of this run's loaders: 0: loader"),
        ({"workers": 2, "memory": "lots"}, "is not a size"),
    ],
)
def test_bad_values_are_refused_with_the_reason_and_change_nothing(
    home: Path, message: dict[str, Any], why: str
) -> None:
    loader = penstock.DataLoader(Frames(), 4, memory="64MB")
    with penstock.Monitor(loader, every=None), open_run(home, "last") as run:
        answer = ask(run, {"do": "set", **message})
    assert not answer["ok"] and why in answer["why"]
    assert loader.num_workers == 0 and loader.memory == "64MB"


def test_of_several_loaders_one_is_chosen_by_name_or_number(home: Path) -> None:
    train = penstock.DataLoader(Frames(), 4, memory="64MB", name="train")
    held_out = penstock.DataLoader(Frames(), 4, memory="64MB", name="eval")
    with penstock.Monitor([train, held_out], every=None), open_run(home, "last") as run:
        refused = ask(run, {"do": "set", "memory": "32MB"})
        assert not refused["ok"] and "2 loaders; choose one by name or number: 0: train, 1: eval" in refused["why"]
        assert ask(run, {"do": "set", "loader": "eval", "memory": "32MB"})["ok"]
        assert ask(run, {"do": "set", "loader": 0, "memory": "48MB"})["ok"]
    assert (train.memory, held_out.memory) == ("48MB", "32MB")


def test_a_change_made_by_the_training_itself_is_in_the_journal_and_compared(home: Path) -> None:
    loader = penstock.DataLoader(Frames(), 4, memory="64MB", name="train")
    with penstock.Monitor(loader, every=None) as monitor:
        list(loader)
        monitor._recorder.tick()
        loader.set_memory("48MB")
        monitor._recorder.tick()
        list(loader)
        monitor._recorder.tick()
    with open_run(home, "last") as run:
        (note,) = [each for each in run.journal() if each.kind == "memory"]
        assert (note.who, note.what) == ("training", "train: memory 64MB -> 48MB")
        assert [(each.configuration["memory"], each.samples) for each in run.tried] == [("64MB", 64), ("48MB", 64)]


def test_torchs_own_loader_is_watched_and_has_no_valves(home: Path) -> None:
    loader = torch.utils.data.DataLoader(Frames(), batch_size=4)
    with penstock.Monitor(loader, every=None) as monitor, open_run(home, "last") as run:
        for _ in loader:
            monitor.step()
        assert "torch's own DataLoader" in ask(run, {"do": "set", "workers": 1})["why"]
    (summary,) = list_runs(home)
    assert summary.loaders[0]["kind"] == "torch" and summary.samples_per_s is None and summary.step == 16


def test_the_monitor_does_not_keep_a_loader_that_the_training_dropped(home: Path) -> None:
    before = len(penstock.memory().processes)
    loader = penstock.DataLoader(Frames(), 4, num_workers=1, memory="64MB", persistent_workers=True)
    with penstock.Monitor(loader, every=None) as monitor, open_run(home, "last") as run:
        next(iter(loader))
        monitor._recorder.tick()
        del loader
        wait_until(lambda: len(penstock.memory().processes) == before)
        point = monitor._recorder.tick()
        assert point.figures["samples"] == 4 and point.figures["arena_bytes"] == 0
        assert "no longer exists" in ask(run, {"do": "set", "workers": 1})["why"]


def test_a_forked_child_writes_nothing_and_its_parents_run_continues(home: Path) -> None:
    with penstock.Monitor(every=1) as monitor, open_run(home, "last") as run:
        pid = os.fork()
        if pid == 0:
            try:
                monitor.step()
                monitor.log("from the child")
                monitor.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        assert run.state == "running" and ask(run, {"do": "state"})["ok"]
        monitor.log("from the parent")
    with open_run(home, "last") as run:
        assert run.state == "finished"
        assert [note.what for note in run.journal()] == ["from the parent"]


def test_settings_files_give_the_advice_their_own_names(home: Path, tmp_path: Path) -> None:
    loader = penstock.DataLoader.from_settings(Frames(), {"TRAIN": {"NUM_WORKERS": 2, "BATCH_SIZE": 4}})
    with penstock.Monitor(loader, every=None) as monitor:
        assert monitor._recorder.loaders[0].keys["num_workers"] == "TRAIN.NUM_WORKERS"


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": 2.5}, {"warn_at": 0}, {"warn_at": 90}])
def test_wrong_arguments_are_refused(home: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        penstock.Monitor(**wrong)
    assert list_runs(home) == []


@pytest.mark.parametrize("home", ["~nosuchuser/x", "/" + "long" * 100, "/dev/null/x"])
def test_a_home_that_cannot_be_costs_the_record_and_not_the_training(
    home: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", home)
    with penstock.Monitor(every=None) as monitor:
        monitor.step()
        assert monitor.run_id is None
    (warning,) = [each for each in caplog.messages if "not recorded" in each]
    assert "training goes on" in warning and "PENSTOCK_HOME" in warning


def test_a_disk_that_is_full_once_the_record_is_begun_does_not_end_the_training(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(RunRecord, "set_fact", full)
    with penstock.Monitor(every=None) as monitor:
        monitor.step()
    with open_run(home, "last") as run:
        assert run.state == "finished"
        assert any("disk is full" in note.what for note in run.journal())


def test_the_refusal_of_a_loader_among_hundreds_with_long_names_is_short(home: Path) -> None:
    loaders = [penstock.DataLoader(Frames(), 4, memory="1MB", name=f"{number}{'x' * 300}") for number in range(100)]
    with penstock.Monitor(loaders, every=None), open_run(home, "last") as run:
        for message in ({}, {"loader": "y" * 10_000}):
            refused = ask(run, {"do": "set", "workers": 1, **message})
            assert not refused["ok"] and len(refused["why"]) < 1000 and "and 90 more" in refused["why"]
