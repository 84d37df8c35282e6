"""Figures reach TensorBoard, Weights & Biases and plain functions; what goes wrong there stays there."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import ConfigError, PenstockError
from penstock.monitor.export.sinks import Call, TensorBoard, WandB

FIGURES = {"samples_per_s": 100.0, "tree_bytes": 5.0, "samples": 10.0}
LATER = {"samples_per_s": 50.0, "tree_bytes": 3.0, "samples": 20.0}


class Writer:
    """As much of a SummaryWriter as is used."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.ended: list[str] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))

    def flush(self) -> None:
        self.ended.append("flush")

    def close(self) -> None:
        self.ended.append("close")


class Board:
    """As much of a wandb run as is used."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], bool]] = []
        self.defined: list[tuple[str, str]] = []

    def define_metric(self, name: str, step_metric: str) -> None:
        self.defined.append((name, step_metric))

    def log(self, row: dict[str, float], commit: bool) -> None:
        self.rows.append((row, commit))


def test_several_seconds_become_one_value_rates_averaged_memory_at_its_peak() -> None:
    writer = Writer()
    sink = TensorBoard(writer, every_s=2)
    sink.write(1, dict(FIGURES))
    assert writer.scalars == []
    sink.write(4, dict(LATER))
    assert writer.scalars == [
        ("penstock/samples_per_s", 75.0, 4), ("penstock/tree_bytes", 5.0, 4), ("penstock/samples", 20.0, 4),
    ]  # fmt: skip


def test_the_last_figures_are_written_and_the_users_writer_stays_open() -> None:
    writer = Writer()
    sink = TensorBoard(writer)
    sink.write(3, dict(FIGURES))
    sink.close()
    assert len(writer.scalars) == 3 and writer.ended == ["flush"]


def test_rows_for_wandb_join_the_users_own_unless_told_otherwise() -> None:
    quiet, loud = Board(), Board()
    for sink in (WandB(quiet, every_s=1), WandB(loud, every_s=1, commits=True)):
        sink.write(7, dict(FIGURES))
        sink.write(8, dict(LATER))
        sink.close()
    assert [commit for _, commit in quiet.rows] == [False, False]
    assert [commit for _, commit in loud.rows] == [True, True]
    assert quiet.rows[0][0]["penstock/step"] == 7 and quiet.rows[1][0]["penstock/tree_bytes"] == 3.0
    assert quiet.defined == [("penstock/*", "penstock/step")]


def test_a_function_is_a_sink() -> None:
    heard: list[tuple[int, dict[str, float]]] = []
    sink = Call(lambda step, figures: heard.append((step, figures)))
    sink.write(5, dict(FIGURES))
    sink.close()
    assert heard == [(5, FIGURES)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: TensorBoard(5), lambda: TensorBoard(None), lambda: WandB("run"), lambda: Call("print"),  # type: ignore[arg-type]
        lambda: TensorBoard("x", every_s=0), lambda: WandB(Board(), every_s=2.5), lambda: Call(print, every_s=True),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_an_invalid_sink_is_refused_before_the_training(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


def test_nothing_is_imported_until_it_is_used() -> None:
    code = (
        "import sys; from penstock.monitor.export.sinks import TensorBoard, WandB; TensorBoard('x');"
        "sys.exit(3 if {'tensorboard', 'wandb', 'torch'} & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_failing_sink_causes_one_warning(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(step: int, figures: dict[str, float]) -> None:
        raise OSError("no network")

    heard: list[int] = []
    good = Call(lambda step, figures: heard.append(step))
    with penstock.Monitor(every=None, warn_at=None, sinks=[Call(refuse), good]) as monitor:
        monitor.step()
        monitor._recorder.tick()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "Call failed and is not called again" in caplog.text and heard[-1] == 1


def test_a_monitor_passes_its_figures_to_sinks(home: Path) -> None:
    writer, board = Writer(), Board()
    with penstock.Monitor(every=None, sinks=[TensorBoard(writer, every_s=1), WandB(board, every_s=1)]) as monitor:
        monitor.step()
    tags = {tag for tag, _, _ in writer.scalars}
    assert {"penstock/tree_bytes", "penstock/limit_bytes", "penstock/step"} <= tags
    assert board.rows[-1][0]["penstock/tree_bytes"] > 1 << 20 and board.rows[-1][0]["penstock/step"] == 1
    assert writer.ended == ["flush"]


def test_without_tensorboard_a_folder_is_refused_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(PenstockError, match="pip install tensorboard"):
        TensorBoard(tmp_path, every_s=1).write(1, dict(FIGURES))
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install tensorboard")
    event_accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")

    sink = TensorBoard(tmp_path, every_s=1)
    sink.write(1, dict(FIGURES))
    sink.write(2, dict(LATER))
    sink.close()
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("penstock/tree_bytes")] == [(1, 5.0), (2, 3.0)]


def test_wandb_keeps_the_users_steps_and_takes_our_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="penstock-test", dir=str(tmp_path))
    try:
        sink = WandB(run, every_s=1)
        for step in range(3):
            sink.write(step, dict(FIGURES))
            run.log({"loss": 1.0 / (step + 1)}, step=step)
        assert run.step == 2, "where the user's own rows are"
        sink.close()
        # A row is written once the next begins.
        run.log({"end": 1.0}, step=3)
        wanted = {"penstock/tree_bytes": 5.0, "penstock/step": 2, "loss": pytest.approx(1 / 3)}
        deadline_s = time.monotonic() + 30
        while (found := {name: run.summary.get(name) for name in wanted}) != wanted and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert found == wanted
    finally:
        run.finish()
