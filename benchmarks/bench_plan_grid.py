"""Is the recommended plan as good as the best of all settings, and within its budget?

In:  datasets that compute or wait, large and small, even and not; a budget for each.
Out: samples per second and memory of every number of workers and depth; of the best and the plan, in turns; JSON.
Runs in: the harness, which watches memory from outside; plans and loaders run in children.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from child import Child
from machine import describe, fingerprint
from penstock.units import MIB
from planned.datasets import CASES
from planned.watch import run_watched
from runner import Result, Spread, Turns, Verdict, add_arguments, finish, table, warn_if_not_quiet

_DEADLINE_S = 300.0
_BUDGETS_MIB = {
    "waits, large": 400, "waits, small": 128, "computes, small": 128, "computes, large": 256, "waits, uneven": 400,
}  # fmt: skip
_WORKERS = (1, 2, 3, 4, 6, 8)
_DEPTHS = (1, 2, 4)
_GRID_S, _TURN_S = 2.5, 10.0
"""Seconds of one run of the grid, and of one turn: uneven batches come at full speed only after the first few."""
_AT_LEAST = 0.95


@dataclass(frozen=True)
class Cell:
    """One setting of penstock's loader over one dataset."""

    case: str
    workers: int
    depth: int
    """Batches ahead; 0: the loader's own, with the plan's other arguments."""
    prefetch_factor: int | None = None
    memory_mib: int = 0
    seconds: float = _GRID_S

    def __str__(self) -> str:
        return f"{self.case}: {self.workers} × {self.depth or 'plan'}"


def plan_for(case: str) -> Cell:
    budget = _BUDGETS_MIB[case]
    request = {"what": "plan", "case": case, "memory_bytes": budget * MIB}
    with Child("planned.measure", request, deadline_s=_DEADLINE_S) as child:
        child.event()
        child.go()
        said = child.event()
    print(f"planned {case} in {said['took_s']:.1f} s: {said['name']}, {said['arguments']}", file=sys.stderr)
    arguments = said["arguments"]
    memory_mib = int(arguments["memory"].removesuffix("MiB"))
    return Cell(case, arguments["num_workers"], 0, arguments["prefetch_factor"], memory_mib, _TURN_S)


def run(cell: Cell) -> Result:
    memory_mib = cell.memory_mib or _BUDGETS_MIB[cell.case]
    request = {
        "what": "load for", "case": cell.case, "loader": "penstock", "workers": cell.workers, "depth": cell.depth,
        "prefetch_factor": cell.prefetch_factor, "memory_bytes": memory_mib * MIB, "step_s": 0.0,
        "seconds": cell.seconds,
    }  # fmt: skip
    return run_watched(request, deadline_s=_DEADLINE_S)


def best_of(turns: Turns, case: str) -> Cell:
    """The fastest of the grid that stayed within the budget."""
    within = [
        cell for cell in turns.results
        if cell.case == case and max(turns.values(cell, "growth_bytes"), default=0) <= _BUDGETS_MIB[case] * MIB
    ]  # fmt: skip
    return max(within, key=lambda cell: max(turns.values(cell, "samples_per_s"), default=0.0))


def verdicts_of(turns: Turns, pairs: dict[str, tuple[Cell, Cell]]) -> list[Verdict]:
    found = []
    for case, (plan, best) in pairs.items():
        ours, theirs = turns.spread(plan, "samples_per_s"), turns.spread(best, "samples_per_s")
        growth = turns.spread(plan, "growth_bytes")
        if ours is None or theirs is None or growth is None:
            continue
        share = Spread(
            median=ours.median / theirs.median, least=ours.least / theirs.most, most=ours.most / theirs.least,
            rounds=ours.rounds,
        )  # fmt: skip
        budget = _BUDGETS_MIB[case]
        most = Spread(median=growth.most / MIB, least=growth.least / MIB, most=growth.most / MIB, rounds=growth.rounds)
        found.append(Verdict(what=f"{case}: plan of the best", measured=share, bar=_AT_LEAST, at_least=True))
        found.append(Verdict(what=f"{case}: most memory, MiB", measured=most, bar=budget, at_least=False, unit=" MiB"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, rounds=5)
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=sorted(CASES), metavar="CASE")
    given = parser.parse_args()
    print(describe(fingerprint()))
    warn_if_not_quiet()
    cases = given.cases[:1] if given.quick else given.cases
    plans = {case: plan_for(case) for case in cases}
    grid = Turns(run)
    depths = _DEPTHS[:1] if given.quick else _DEPTHS
    grid.run_rounds([Cell(case, workers, depth) for case in cases for workers in _WORKERS for depth in depths], 1)
    pairs = {}
    for case in cases:
        best = best_of(grid, case)
        pairs[case] = (plans[case], Cell(case, best.workers, best.depth, seconds=_TURN_S))
    turns = Turns(run)
    turns.run_rounds([cell for pair in pairs.values() for cell in pair], 1 if given.quick else given.rounds)
    rows = [
        [str(cell), f"{values[0] / MIB:.0f}", f"{turns_of.values(cell, 'samples_per_s')[0]:.0f}"]
        for turns_of in (grid, turns) for cell in turns_of.results
        if (values := turns_of.values(cell, "growth_bytes"))
    ]  # fmt: skip
    print("\n" + table(["setting", "MiB", "samples/s"], rows))
    settings = {
        "budgets_mib": _BUDGETS_MIB,
        "grid": [{**vars(cell), "rounds": rounds} for cell, rounds in grid.results.items()],
        "plans": {case: vars(cell) for case, cell in plans.items()},
    }
    return finish("plan_grid", turns, settings, verdicts_of(turns, pairs), given.json)


if __name__ == "__main__":
    sys.exit(main())
