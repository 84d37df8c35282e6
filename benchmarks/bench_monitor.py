"""How much time does the monitor cost a training?

In:  steps of 50 ms, of the interpreter or of torch, fed by 2 workers; with and without the monitor, in turns.
Out: the overhead of a step with its spread; the cost of ``step()``, a log line and the monitor's thread; the bar; JSON.
Runs in: the harness; the training runs in a child.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass

from child import Child
from machine import describe, fingerprint
from monitored.measure import STEP_S, WORKS
from runner import Result, Spread, Turns, Verdict, add_arguments, finish, table, warn_if_not_quiet

_DEADLINE_S = 600.0
MOST_PERCENT = 0.5
"""The bar, in percent of a 50 ms step."""


@dataclass(frozen=True)
class Cell:
    """One kind of step."""

    work: str

    def __str__(self) -> str:
        return f"{self.work} steps"


def run(cell: Cell, *, pairs: int, steps: int) -> Result:
    with Child(
        "monitored.measure", {"work": cell.work, "pairs": pairs, "steps": steps}, deadline_s=_DEADLINE_S
    ) as child:
        result = child.event()
    return {**result, "overhead": statistics.median(result["overhead_percent"])}


def report(turns: Turns) -> None:
    rows = []
    for cell, rounds in turns.results.items():
        pairs = [value for result in rounds for value in result.get("overhead_percent", [])]
        off_ms = [1000 * value for result in rounds for value in result.get("without_s", [])]
        if not pairs:
            rows.append([cell.work, "failed", *[""] * 4])
            continue
        spreads = [turns.spread(cell, name) for name in ("thread_percent", "step_ns", "line_us")]
        rows.append(
            [
                cell.work,
                Spread.of(off_ms).text(1),
                Spread.of(pairs).text(2, "%"),
                *(spread.text(digits) if spread else "" for spread, digits in zip(spreads, (3, 0, 0), strict=True)),
            ]
        )
    header = ["work", "step without, ms", "overhead, all pairs", "thread, % of a core", "step() ns", "log line µs"]
    print("\n" + table(header, rows))
    print("Median (least-most). The machine causes the spread of pairs: two blocks without the monitor differ as much.")


def verdicts(turns: Turns) -> list[Verdict]:
    found = []
    for cell in turns.results:
        spread = turns.spread(cell, "overhead")
        what = f"{cell}: overhead of a {1000 * STEP_S:.0f} ms step"
        found.append(Verdict(what=what, measured=spread, bar=MOST_PERCENT, at_least=False, unit="%"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser, rounds=5)
    parser.add_argument("--pairs", type=int, default=6, help="pairs of blocks in a round (default 6)")
    parser.add_argument("--steps", type=int, default=100, help="steps of a block (default 100, 5 s)")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    pairs, steps = (1, 30) if options.quick else (options.pairs, options.steps)
    print(describe(fingerprint()))
    warn_if_not_quiet()
    print(f"Steps of {1000 * STEP_S:.0f} ms, {steps} in a block, {pairs} pairs of blocks in each of {rounds} rounds.")
    turns = Turns(lambda cell: run(cell, pairs=pairs, steps=steps))
    turns.run_rounds([Cell(name) for name in WORKS], rounds)
    report(turns)
    settings = {"rounds": rounds, "pairs": pairs, "steps": steps, "step_s": STEP_S, "quick": options.quick}
    bars = [] if options.quick else verdicts(turns)
    return finish("monitor", turns, settings, bars, options.json)


if __name__ == "__main__":
    sys.exit(main())
