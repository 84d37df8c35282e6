"""How fast do batches arrive when samples cost nothing but the copy?

In:  penstock, torch, and on large batches SPDL, torchdata.nodes and Grain; 2 workers each.
Out: GB/s and batches/s, ratios penstock / other with their spread, the bars, JSON.
Runs in: the harness; transport/measure.py says what is timed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from child import Child
from machine import describe, fingerprint
from runner import Result, Turns, Verdict, add_arguments, finish, table, warn_if_not_quiet
from transport.contenders import AHEAD, CEILING, CONTENDERS, isolates_python, missing
from transport.sources import CASES, Case

_DEADLINE_S = 300.0


@dataclass(frozen=True, order=True)
class Cell:
    """One contender in one mode on one case."""

    case: str
    contender: str
    mode: str

    def __str__(self) -> str:
        return f"{self.case} {self.contender} ({self.mode})"


def cells_of(case: Case, names: list[str]) -> list[Cell]:
    """The named contenders in all modes; the other libraries only for cases with a bar for them."""
    if case.against_peers is None:
        names = [name for name in names if name in ("penstock", "torch")]
    return [Cell(case.name, name, mode) for name in names for mode in CONTENDERS[name]]


def run(cell: Cell, *, workers: int, seconds: float, warm_up_s: float) -> Result:
    request = {
        "case": cell.case,
        "contender": cell.contender,
        "mode": cell.mode,
        "workers": workers,
        "seconds": seconds,
        "warm_up_s": warm_up_s,
    }
    with Child("transport.measure", request, deadline_s=_DEADLINE_S) as child:
        return child.event()


def best_mode(turns: Turns, case: Case, contender: str, *, isolated: bool = False) -> Cell | None:
    """The contender's fastest mode by its median; None if none of them ran. ``isolated``: processes only."""
    modes = [mode for mode in CONTENDERS[contender] if isolates_python(mode) or not isolated]
    cells = [Cell(case.name, contender, mode) for mode in modes]
    speeds = {cell: spread.median for cell in cells if (spread := turns.spread(cell, "batches_per_s"))}
    return max(speeds, key=lambda cell: speeds[cell]) if speeds else None


def report(turns: Turns, cases: list[Case]) -> list[Verdict]:
    """Print all figures; return the bars."""
    rows = [_row(turns, case, cell) for case in cases for cell in turns.results if cell.case == case.name]
    header = ["batch", "loader", "mode", "speed", "", "penstock / it", "depth", "slots", "verified"]
    print("\n" + table(header, rows))
    print("* The loader's best mode. Speeds and ratios: median (least-most) over rounds; ratios round by round.")
    print("Slots of penstock: the peak of its arena in batches, from stats(), as the depth.")
    return [verdict for case in cases for verdict in _verdicts(turns, case)]


def _row(turns: Turns, case: Case, cell: Cell) -> list[str]:
    ours = best_mode(turns, case, "penstock")
    speed = turns.spread(cell, "gigabytes_per_s" if case.in_gigabytes else "batches_per_s")
    ratio = turns.ratio(ours, cell, "batches_per_s") if cell != ours else None
    last = next((result for result in reversed(turns.results[cell]) if result), {})
    return [
        case.name,
        cell.contender + (" *" if cell == best_mode(turns, case, cell.contender) else ""),
        cell.mode,
        speed.text(2 if case.in_gigabytes else 0) if speed else "failed",
        "GB/s" if case.in_gigabytes else "batches/s",
        ratio.text(unit="×") if ratio else "",
        str(last.get("depth", "")),
        str(last.get("slots", "")),
        str(sum(turns.values(cell, "verified_batches"))),
    ]


def _verdicts(turns: Turns, case: Case) -> list[Verdict]:
    """The bars: each library in its best mode, and if that mode uses threads, in its best process mode too.

    Threads in the training process transport nothing, and share its interpreter lock with the training loop. With
    samples that need no Python they run at the speed of memory, and no loader can be several times as fast as that.
    """
    ours = best_mode(turns, case, "penstock")
    verdicts = []
    for name in CONTENDERS:
        bar = case.against_torch if name == "torch" else case.against_peers
        if name in ("penstock", CEILING) or bar is None:
            continue
        modes = dict.fromkeys([best_mode(turns, case, name), best_mode(turns, case, name, isolated=True)])
        for theirs in modes:
            if theirs is not None:
                what = f"{case.name}: penstock / {name} ({theirs.mode})"
                measured = turns.ratio(ours, theirs, "batches_per_s")
                verdicts.append(Verdict(what=what, measured=measured, bar=bar, at_least=True))
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser, rounds=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="timed part of a round (default 3)")
    parser.add_argument("--workers", type=int, default=2, help="workers of every contender (default 2)")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS), metavar="LOADER")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    seconds, warm_up_s = (0.3, 0.2) if options.quick else (options.seconds, 1.0)

    cases = [CASES[name] for name in options.cases]
    print(describe(fingerprint()))
    warn_if_not_quiet()
    print(f"{options.workers} workers each, {rounds} rounds of {seconds:g} s after {warm_up_s:g} s of warm-up.")
    for case in cases:
        print(
            f"{case.name}: {case.rows} x {case.shape} float32 = {case.batch_bytes / 1e6:.1f} MB, sources rotate over "
            f"{case.source_batches * case.batch_bytes / 1e6:.0f} MB"
        )

    absent = [name for name in options.only if name in missing()]
    if absent:
        print(
            f"Not installed and therefore not measured: {', '.join(absent)} (pip install -e .[bench]).", file=sys.stderr
        )
    names = [name for name in options.only if name not in absent]

    turns = Turns(lambda cell: run(cell, workers=options.workers, seconds=seconds, warm_up_s=warm_up_s))
    turns.run_rounds([cell for case in cases for cell in cells_of(case, names)], rounds)
    verdicts = report(turns, cases)
    if options.quick:
        verdicts = []
    settings = {
        "workers": options.workers,
        "rounds": rounds,
        "seconds": seconds,
        "warm_up_s": warm_up_s,
        "batches_ahead_per_worker": AHEAD,
        "source_bytes": {case.name: case.source_batches * case.batch_bytes for case in cases},
        "quick": options.quick,
    }
    return finish("transport", turns, settings, verdicts, options.json)


if __name__ == "__main__":
    sys.exit(main())
