"""The one runner of all benchmarks: contenders in turns, each in a process of its own, and the report of it.

In:  cells (what to run), a number of rounds, a function that runs one cell once.
Out: raw results per cell and round, ratios with their spread, a table, a JSON file.
Runs in: the harness; contenders run in children (``child.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from machine import busy_cpus, fingerprint

Cell = TypeVar("Cell", bound=Hashable)
Result = dict[str, Any]

_QUIET_CPUS_PER_CORE = 0.1
"""If other programs use more than this share of every core, ratios vary by more than the loaders differ."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure over all rounds."""

    median: float
    least: float
    most: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median=statistics.median(values), least=min(values), most=max(values), rounds=len(values))

    def text(self, digits: int = 2, unit: str = "") -> str:
        """Median, then the range."""
        return f"{self.median:.{digits}f}{unit} ({self.least:.{digits}f}-{self.most:.{digits}f})"


def add_arguments(parser: argparse.ArgumentParser, *, rounds: int) -> None:
    """The arguments every benchmark has."""
    parser.add_argument("--rounds", type=int, default=rounds, metavar="N", help=f"rounds (default {rounds})")
    parser.add_argument(
        "--quick", action="store_true", help="one short round, to show that it works; its figures mean nothing"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write fingerprint, raw results and summary")


class Turns:
    """Runs all cells once per round, in an order that changes, and keeps the results."""

    def __init__(self, run: Callable[[Any], Result]) -> None:
        self._run = run
        self.results: dict[Any, list[Result]] = {}
        self.failures: list[dict[str, str]] = []
        self.busy_cpus_before: list[float] = []

    def run_rounds(self, cells: Sequence[Cell], rounds: int) -> None:
        """Run every cell ``rounds`` times. A cell that fails is reported, and its round does not count in any ratio."""
        # If ``timeout`` or ``kill`` ends the harness, its child must end too: it would disturb the next measurement.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        total, done, began_s = rounds * len(cells), 0, time.monotonic()
        for number in range(rounds):
            # No cell is always first, and none always follows the same cell.
            start = number * max(1, len(cells) // max(1, rounds)) % len(cells)
            turn = [*cells[start:], *cells[:start]][:: (-1) ** number]
            for cell in turn:
                spent_s = time.monotonic() - began_s
                left_s = spent_s / done * (total - done) if done else 0.0
                _progress(f"[{done + 1}/{total}] round {number + 1}: {cell}  (about {left_s:.0f} s left)")
                self.busy_cpus_before.append(busy_cpus())
                try:
                    result = self._run(cell)
                except RuntimeError as failure:
                    _progress("")
                    print(f"FAILED {cell}, round {number + 1}: {failure}", file=sys.stderr)
                    self.failures.append({"cell": str(cell), "round": str(number + 1), "why": str(failure)})
                    result = {}
                self.results.setdefault(cell, []).append(result)
                done += 1
        _progress("")

    def values(self, cell: Any, figure: str) -> list[float]:
        """One figure of one cell over the rounds that have it."""
        return [result[figure] for result in self.results.get(cell, []) if figure in result]

    def spread(self, cell: Any, figure: str) -> Spread | None:
        """The figure's spread; None if no round has it."""
        values = self.values(cell, figure)
        return Spread.of(values) if values else None

    def ratio(self, over: Any, under: Any, figure: str) -> Spread | None:
        """``over`` / ``under``, round by round: both are slower in a round in which the machine is slow."""
        pairs = zip(self.results.get(over, []), self.results.get(under, []), strict=False)
        ratios = [a[figure] / b[figure] for a, b in pairs if a.get(figure) and b.get(figure)]
        return Spread.of(ratios) if ratios else None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One bar, and the figure it is compared with."""

    what: str
    measured: Spread | None
    bar: float
    at_least: bool
    """True: the figure must be the bar or more. False: the bar or less."""
    unit: str = "×"

    @property
    def passed(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured.median >= self.bar if self.at_least else self.measured.median <= self.bar

    def row(self) -> list[str]:
        bound = "≥" if self.at_least else "≤"
        text = self.measured.text(unit=self.unit) if self.measured else "not measured"
        state = {True: "pass", False: "MISS", None: "-"}[self.passed]
        return [self.what, text, f"{bound} {self.bar:.2f}{self.unit}", state]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns for the terminal."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    head = "  ".join(text.ljust(width) for text, width in zip(header, widths, strict=True))
    return "\n".join(line.rstrip() for line in [head, "  ".join("-" * width for width in widths), *lines])


def warn_if_not_quiet() -> None:
    """Print a clear warning if other programs use this machine."""
    cores = os.cpu_count() or 1
    load, busy = os.getloadavg()[0], busy_cpus(1.0)
    if load > 2 * _QUIET_CPUS_PER_CORE * cores or busy > _QUIET_CPUS_PER_CORE * cores:
        line = f"  NOT IDLE: load average {load:.2f}, other programs use {busy:.2f} of {cores} cores now.  "
        frame = "!" * len(line)
        print(f"{frame}\n{line}\n  Do not quote these figures.\n{frame}", file=sys.stderr)


def finish(name: str, turns: Turns, settings: dict[str, Any], verdicts: Sequence[Verdict], out: Path | None) -> int:
    """Print the bars, write the JSON, return the exit status: 1 if a bar was missed or a cell failed, else 0."""
    if verdicts:
        rows = [verdict.row() for verdict in verdicts]
        print("\n" + table(["bar", "median (least-most)", "wanted", "verdict"], rows))
    cores = os.cpu_count() or 1
    noisy = sum(busy > _QUIET_CPUS_PER_CORE * cores for busy in turns.busy_cpus_before)
    if noisy:
        runs = len(turns.busy_cpus_before)
        print(f"\nNOT IDLE: other programs were busy just before {noisy} of {runs} runs.", file=sys.stderr)
    if out is not None:
        report = {
            "benchmark": name,
            "machine": fingerprint(),
            "settings": settings,
            "runs_with_others_busy": noisy,
            "verdicts": [verdict.as_dict() for verdict in verdicts],
            "results": [{"cell": asdict(cell), "rounds": rounds} for cell, rounds in turns.results.items()],
            "failures": turns.failures,
        }
        out.write_text(json.dumps(report, indent=1, default=str) + "\n")
        print(f"\nWrote {out}")
    return 1 if turns.failures or any(verdict.passed is False for verdict in verdicts) else 0


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)
