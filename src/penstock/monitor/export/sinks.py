"""Figures for the tools that a team already uses: TensorBoard, Weights & Biases, or the team's own function.

In:  figures once a second, from the monitor's thread.
Out: scalars named ``penstock/<figure>``, units in their names; see ``figures``.
Runs in: trainer, in the monitor's thread.

    penstock.Monitor(loader, sinks=[TensorBoard("runs/today")])
    penstock.Monitor(loader, sinks=[WandB(wandb.run), Call(lambda step, figures: print(step, figures["tree_bytes"]))])

Packages are imported on first use only. An object of your own with ``write`` and ``close`` (``recorder.Sink``) is a
sink, too. A sink that raises is not called again and one warning is logged; the training continues.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from penstock.errors import ConfigError, PenstockError
from penstock.monitor.figures import merged

__all__ = ["Call", "TensorBoard", "WandB"]

PREFIX = "penstock/"


class PeriodicSink:
    """Merges the figures of ``every_s`` seconds into one set: rates as their mean, memory as its peak, counters as the
    last value."""

    def __init__(self, every_s: int) -> None:
        if isinstance(every_s, bool) or not isinstance(every_s, int) or every_s < 1:
            raise ConfigError(f"every_s={every_s!r} is not a whole number of seconds of at least 1")
        self._every_s = every_s
        self._kept: list[dict[str, float]] = []
        self._step = 0

    def write(self, step: int, figures: dict[str, float]) -> None:
        self._step = step
        self._kept.append(figures)
        if len(self._kept) >= self._every_s:
            self._pass_on()

    def close(self) -> None:
        if self._kept:
            self._pass_on()

    def _pass_on(self) -> None:
        # The figures are removed first, so that they are not sent again after an exception.
        kept, self._kept = self._kept, []
        self._send(self._step, merged((1.0, each) for each in kept))

    def _send(self, step: int, figures: dict[str, float]) -> None:
        raise NotImplementedError


class Call(PeriodicSink):
    """Calls ``function(step, figures)`` in the monitor's thread; the function must return soon."""

    def __init__(self, function: Callable[[int, dict[str, float]], object], *, every_s: int = 1) -> None:
        if not callable(function):
            raise ConfigError(f"{function!r} cannot be called; give a function that takes a step and figures")
        super().__init__(every_s)
        self._function = function

    def _send(self, step: int, figures: dict[str, float]) -> None:
        self._function(step, figures)


class TensorBoard(PeriodicSink):
    """Writes scalars by training step.

    Args:
        where: your own ``SummaryWriter``, which is flushed and left open at the end, or a folder for a new one.
        every_s: seconds between two values of a figure; a value each second would be gigabytes of events in a week.
    """

    def __init__(self, where: Any, *, every_s: int = 10) -> None:
        super().__init__(every_s)
        if not hasattr(where, "add_scalar") and not isinstance(where, (str, os.PathLike)):
            raise ConfigError(f"{where!r} is neither a SummaryWriter nor a folder for one")
        self._writer: Any = where if hasattr(where, "add_scalar") else None
        self._folder = None if self._writer is not None else os.fspath(where)
        """The folder for a new writer; None if the writer belongs to the caller."""

    def close(self) -> None:
        super().close()
        if self._writer is not None:
            end = self._writer.flush if self._folder is None else self._writer.close
            end()

    def _send(self, step: int, figures: dict[str, float]) -> None:
        if self._writer is None:
            self._writer = _new_writer(self._folder)
        for name, value in figures.items():
            self._writer.add_scalar(PREFIX + name, value, step)


class WandB(PeriodicSink):
    """Adds figures to a run of Weights & Biases.

    Args:
        run: the run that ``wandb.init()`` returned; it is not finished at the end.
        every_s: seconds between two values of a figure.
        commits: False adds figures to the row that your next ``run.log()`` writes, so that your own steps do not
            change; True writes a row each time, for trainings that log nothing themselves.
    """

    def __init__(self, run: Any, *, every_s: int = 10, commits: bool = False) -> None:
        super().__init__(every_s)
        if not hasattr(run, "log"):
            raise ConfigError(f"{run!r} is not a run of Weights & Biases; pass the run that wandb.init() returned")
        self._run, self._commits = run, commits
        self._is_defined = False

    def _send(self, step: int, figures: dict[str, float]) -> None:
        if not self._is_defined:
            self._is_defined = True
            if hasattr(self._run, "define_metric"):
                # Figures are plotted over training steps, not over wandb's own count.
                self._run.define_metric(PREFIX + "*", step_metric=PREFIX + "step")
        row = {PREFIX + name: value for name, value in figures.items()} | {PREFIX + "step": step}
        self._run.log(row, commit=self._commits)


def _new_writer(folder: str | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as missing:
        raise PenstockError(
            f"TensorBoard({folder!r}) needs the package tensorboard ({missing}); pip install tensorboard, or pass a "
            "writer of your own"
        ) from None
    return SummaryWriter(folder)
