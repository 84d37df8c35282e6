"""How fast do batches reach the GPU, are they correct, and does the GPU wait for them?

In:  penstock with device="cuda", torch's DataLoader with pinning and an asynchronous copy.
Out: GB/s and their share of the pinned link's rate, ratios with spread, wrong rows, idle share, the bars, JSON.
Runs in: the harness; device/measure.py says what is timed.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from typing import Any

from child import Child
from device.sources import CASES
from machine import describe, fingerprint
from runner import Result, Spread, Turns, Verdict, add_arguments, finish, table, warn_if_not_quiet

_DEADLINE_S = 300.0
_MEMORY = 4_000_000_000
_SMALLEST = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072)
"""Budgets in MB that are tried, to find the smallest that fills 70% of the link."""
_FULL, _ENOUGH = 0.75, 0.70


@dataclass(frozen=True, order=True)
class Cell:
    what: str
    case: str = ""
    loader: str = ""
    workers: int = 0
    memory: int = _MEMORY
    resizes: bool = False
    source: str = "hot"

    def __str__(self) -> str:
        parts = [self.what, self.case, self.loader, f"{self.workers} workers" if self.workers else ""]
        notes = [", resized" if self.resizes else "", ", rotating source" if self.source != "hot" else ""]
        return " ".join(part for part in parts if part) + "".join(notes)


def run(cell: Cell, options: argparse.Namespace) -> Result:
    request = {
        **vars(cell),
        "seconds": options.seconds,
        "warm_up_s": 0.5 if options.quick else 1.5,
        "steps": 20 if options.quick else 200,
        "step_s": 0.01,
        "batches": 200 if options.quick else options.fire,
    }
    with Child("device.measure", request, deadline_s=_DEADLINE_S) as child:
        return child.event()


def of_link(turns: Turns, cell: Cell) -> Spread | None:
    """The cell's rate / the link's rate, round by round."""
    return turns.ratio(cell, Cell("link"), "gigabytes_per_s")


def smallest_memory(case: str, workers: int, link: float, options: argparse.Namespace) -> dict[str, Any]:
    """The smallest budget of the list that fills enough of the link."""
    tried: dict[int, float] = {}
    for megabytes in _SMALLEST:
        if megabytes * 1_000_000 < 2 * CASES[case].batch_bytes:
            continue
        result = run(Cell("rate", case, "penstock", workers, megabytes * 1_000_000), options)
        tried[megabytes] = result["gigabytes_per_s"] / link
        if tried[megabytes] >= _ENOUGH:
            return {"case": case, "megabytes": megabytes, "tried": tried}
    return {"case": case, "megabytes": None, "tried": tried}


def report(turns: Turns, smallest: list[dict[str, Any]]) -> list[Verdict]:
    rows = []
    for cell in turns.results:
        rates = turns.spread(cell, "gigabytes_per_s")
        share = of_link(turns, cell)
        idle = turns.spread(cell, "idle_share")
        wrong = turns.values(cell, "wrong_rows")
        rows.append(
            [
                str(cell),
                rates.text(1, " GB/s") if rates else "",
                share.text() if share and cell.what == "rate" else "",
                f"{100 * idle.median:.2f}% idle" if idle else "",
                f"{sum(wrong):.0f} wrong rows" if wrong else "",
            ]
        )
    print("\n" + table(["what", "rate", "of the link", "idle", "checked"], rows))
    for found in smallest:
        print(f"{found['case']}: {_ENOUGH:.0%} of the link needs memory={found['megabytes']} MB ({found['tried']})")
    verdicts = []
    for case in CASES:
        for workers in (12, 14):
            share = of_link(turns, Cell("rate", case, "penstock", workers))
            verdicts.append(
                Verdict(
                    what=f"{case}, {workers} workers: of the link", measured=share, bar=_FULL, at_least=True, unit=""
                )
            )
        ratio = turns.ratio(Cell("rate", case, "penstock", 8), Cell("rate", case, "torch", 8), "gigabytes_per_s")
        verdicts.append(Verdict(what=f"{case}, 8 workers: penstock / torch", measured=ratio, bar=12.0, at_least=True))
    wrong = [sum(turns.values(cell, "wrong_rows")) for cell in turns.results if turns.values(cell, "wrong_rows")]
    counted = Spread.of([float(sum(wrong))]) if wrong else None
    verdicts.append(Verdict(what="wrong rows", measured=counted, bar=0.0, at_least=False, unit=""))
    idle = turns.spread(Cell("idle", next(iter(CASES)), "penstock", 8), "idle_share")
    verdicts.append(Verdict(what="GPU idle because of missing data", measured=idle, bar=0.01, at_least=False, unit=""))
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser, rounds=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="timed part of a round (default 2)")
    parser.add_argument("--fire", type=int, default=10_000, help="batches of the part fire (default 10000)")
    parser.add_argument("--parts", nargs="+", choices=["rate", "idle", "fire", "smallest"],
                        default=["rate", "idle", "fire", "smallest"])  # fmt: skip
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    print(describe(fingerprint()))
    warn_if_not_quiet()

    first = next(iter(CASES))
    cells = [Cell("link")]
    if "rate" in options.parts:
        cells += [Cell("rate", case, "penstock", workers) for case in CASES for workers in (8, 12, 14)]
        cells += [Cell("rate", case, "torch", 8) for case in CASES]
        cells += [Cell("rate", case, "penstock", 14, source="rotating") for case in CASES]
    if "idle" in options.parts:
        cells += [Cell("idle", first, loader, 8) for loader in ("penstock", "torch")]
    turns = Turns(lambda cell: run(cell, options))
    turns.run_rounds(cells, rounds)
    if "fire" in options.parts:
        turns.run_rounds(
            [Cell("fire", first, loader, 8, 1_000_000_000, resizes, "rotating")
             for loader in ("pinned", "device") for resizes in (False, True)], 1)  # fmt: skip
    smallest = []
    if "smallest" in options.parts:
        link = statistics.median(turns.values(Cell("link"), "gigabytes_per_s"))
        smallest = [smallest_memory(case, 14, link, options) for case in CASES]
    verdicts = report(turns, smallest)
    settings = {"rounds": rounds, "seconds": options.seconds, "memory": _MEMORY, "smallest": smallest}
    return finish("device", turns, settings, [] if options.quick else verdicts, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
