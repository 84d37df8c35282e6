"""Is penstock ever slower than torch's DataLoader on the common work of real programs?

In:  some forty kinds of work (dropin/work.py), with several numbers of workers.
Out: batches per second of both loaders, their ratio with its spread, the bars, JSON.
Runs in: the harness; dropin/measure.py times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass

import penstock
from child import Child
from dropin.work import WORK
from machine import describe, fingerprint
from runner import Result, Spread, Turns, Verdict, add_arguments, finish, table, warn_if_not_quiet

_DEADLINE_S = 300.0
_SLOWEST, _TYPICAL = 0.97, 2.0
_UNEVEN_SHARE, _UNEVEN_RATIO = 0.9, 1.3
_NO_WORKERS = 1 / 1.1


@dataclass(frozen=True, order=True)
class Cell:
    """One kind of work with a number of workers."""

    work: str
    workers: int

    def __str__(self) -> str:
        return f"{self.work}; {self.workers} workers"


class Rounds:
    """Runs a cell once; the loader that goes first changes from round to round."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._runs: dict[Cell, int] = {}

    def run(self, cell: Cell) -> Result:
        number = self._runs[cell] = self._runs.get(cell, 0) + 1
        request = {
            "work": cell.work,
            "workers": cell.workers,
            "seconds": self._seconds,
            "torch_first": bool(number % 2),
        }
        with Child("dropin.measure", request, deadline_s=_DEADLINE_S) as child:
            return child.event()


def ratios(turns: Turns, cell: Cell) -> list[float]:
    """penstock / torch, round by round."""
    return [each["penstock_per_s"] / each["torch_per_s"] for each in turns.results[cell] if each]


def report(turns: Turns) -> list[Verdict]:
    rows = []
    for cell in turns.results:
        found = ratios(turns, cell)
        if not found:
            rows.append([cell.work, str(cell.workers), "failed", "", "", ""])
            continue
        torch, ours = turns.spread(cell, "torch_per_s"), turns.spread(cell, "penstock_per_s")
        assert torch and ours
        mean_s = WORK[cell.work].mean_sample_s
        ideal = ""
        if mean_s is not None:
            ideal = f"{100 * ours.median / _ideal_per_s(cell, mean_s):.0f}%"
        rows.append([cell.work, str(cell.workers), torch.text(1), ours.text(1), Spread.of(found).text(unit="×"), ideal])
    print("\n" + table(["work", "workers", "torch, batches/s", "penstock", "penstock / torch", "of the ideal"], rows))
    return _verdicts(turns)


def _ideal_per_s(cell: Cell, mean_sample_s: float) -> float:
    return cell.workers / mean_sample_s / WORK[cell.work].arguments["batch_size"]


def _verdicts(turns: Turns) -> list[Verdict]:
    verdicts = []
    medians = []
    for cell in turns.results:
        found = ratios(turns, cell)
        if not found:
            continue
        measured, work = Spread.of(found), WORK[cell.work]
        medians.append(measured.median)
        bar = _SLOWEST if work.takes_workers else _NO_WORKERS
        is_uneven = work.mean_sample_s is not None and cell.workers > 1 and "every" in cell.work
        verdicts.append(
            Verdict(what=str(cell), measured=measured, bar=_UNEVEN_RATIO if is_uneven else bar, at_least=True)
        )
        if work.mean_sample_s is not None:
            ideal_per_s = _ideal_per_s(cell, work.mean_sample_s)
            share = Spread.of([rate / ideal_per_s for rate in turns.values(cell, "penstock_per_s")])
            verdicts.append(
                Verdict(what=f"{cell}: share of the ideal", measured=share, bar=_UNEVEN_SHARE, at_least=True)
            )
    if medians:
        typical = Spread(median=statistics.median(medians), least=min(medians), most=max(medians), rounds=len(medians))
        verdicts.append(Verdict(what="all work: median of the medians", measured=typical, bar=_TYPICAL, at_least=True))
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser, rounds=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="timed part of a round (default 1.5)")
    parser.add_argument("--workers", type=int, nargs="+", help="numbers of workers (default 2, 4 and the cores)")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="work whose name has one of these texts")
    options = parser.parse_args()
    rounds, seconds = (1, 0.2) if options.quick else (options.rounds, options.seconds)
    counts = options.workers or sorted({2, 4, int(penstock.limits().cpu_usable)})
    names = [name for name in WORK if not options.only or any(text in name for text in options.only)]
    cells = [Cell(name, count) for name in names for count in (counts if WORK[name].takes_workers else [0])]
    print(describe(fingerprint()))
    warn_if_not_quiet()
    print(f"{len(cells)} cells, {rounds} rounds of {seconds:g} s for each loader, in one process, alternating.")
    turns = Turns(Rounds(seconds).run)
    turns.run_rounds(cells, rounds)
    verdicts = report(turns)
    settings = {"rounds": rounds, "seconds": seconds, "workers": counts, "quick": options.quick}
    return finish("dropin", turns, settings, [] if options.quick else verdicts, options.json)


if __name__ == "__main__":
    sys.exit(main())
