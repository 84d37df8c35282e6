"""Does the planner predict what is measured afterwards?

In:  datasets that compute or wait, large and small, even and not; loaders of 1 to 8 workers, 1 to 4 deep; training
     loops that are fast and slow.
Out: predicted and measured memory and throughput of torch's loader and ours, their errors, the bars, JSON.
Runs in: the harness, which watches memory from outside; profiles and loaders run in children, each on memory that was
     touched just before (``planned.backing``).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import dataclass

from child import Child
from machine import describe, fingerprint
from penstock.loader.rules import LoaderRules
from penstock.planner.profile import Profile, read_profile
from penstock.planner.simulate.penstock_pipeline import simulate_penstock
from penstock.planner.simulate.pipeline import Load, Simulation
from penstock.planner.simulate.torch_pipeline import simulate_torch
from penstock.units import MIB
from planned.backing import back
from planned.datasets import CASES
from planned.watch import run_watched
from runner import Result, Spread, Turns, Verdict, add_arguments, finish, table, warn_if_not_quiet

_DEADLINE_S = 300.0
_SECONDS = 6.0
"""About how long a run lasts."""
_LEAST_BATCHES, _MOST_BATCHES = 24, 400
_PROFILE_BYTES = 1 << 30
_BACKED = 1.25
"""How much memory is touched before a run, as a multiple of the predicted memory."""


@dataclass(frozen=True)
class Cell:
    """One loader over one dataset."""

    case: str
    loader: str
    workers: int
    depth: int
    step_s: float

    def __str__(self) -> str:
        return f"{self.case}: {self.loader}, {self.workers} × {self.depth}, step {1000 * self.step_s:.0f} ms"


SETTINGS = {
    "waits, large": [(2, 1, 0.0), (4, 2, 0.05), (8, 2, 0.2), (8, 4, 0.0)],
    "waits, small": [(1, 2, 0.0), (4, 4, 0.0), (8, 1, 0.1), (8, 2, 0.0)],
    "computes, small": [(1, 2, 0.0), (2, 2, 0.0), (4, 2, 0.1), (4, 4, 0.0)],
    "computes, large": [(1, 1, 0.0), (2, 4, 0.15), (4, 2, 0.0), (8, 2, 0.02)],
    "waits, uneven": [(2, 2, 0.0), (4, 2, 0.1), (8, 3, 0.0)],
}
"""Workers, depth (prefetch factor of torch's, batches ahead of ours) and length of a step, per dataset."""
CELLS = [
    Cell(case, loader, *setting) for case, settings in SETTINGS.items() for setting in settings
    for loader in ("torch", "penstock")
]  # fmt: skip


def profiles(cases: list[str]) -> dict[str, Profile]:
    found = {}
    for case in cases:
        back(_PROFILE_BYTES)
        with Child("planned.measure", {"what": "profile", "case": case}, deadline_s=_DEADLINE_S) as child:
            child.event()
            child.go()
            said = child.event()
        found[case] = read_profile(said["profile"])
        print(f"profiled {case} in {said['took_s']:.1f} s", file=sys.stderr)
    return found


def predict(cell: Cell, profile: Profile) -> tuple[Simulation, int]:
    """The prediction, and the number of batches it is for."""
    load = Load(
        profile=profile, rules=LoaderRules(), cores=os.cpu_count() or 1, batch_size=CASES[cell.case].batch_size,
        workers=cell.workers, step_s=cell.step_s,
    )  # fmt: skip
    if cell.loader == "penstock":
        outcome = simulate_penstock(load, cell.depth)
        return outcome, _batches(outcome, load)
    batches = _batches(simulate_torch(load, cell.depth, batches=0), load)
    return simulate_torch(load, cell.depth, batches=batches), batches


def _batches(outcome: Simulation, load: Load) -> int:
    wanted = int(_SECONDS * outcome.samples_per_s / load.batch_size)
    return max(_LEAST_BATCHES, min(_MOST_BATCHES, wanted))


def naive_bytes(cell: Cell) -> int:
    """workers × prefetch × batch, the usual estimate."""
    case = CASES[cell.case]
    return cell.workers * cell.depth * case.batch_size * case.sample_bytes


def run(cell: Cell, outcome: Simulation, batches: int) -> Result:
    back(int(_BACKED * outcome.growth_bytes))
    request = {
        "what": "load", "case": cell.case, "loader": cell.loader, "workers": cell.workers, "depth": cell.depth,
        "step_s": cell.step_s, "batches": batches,
    }  # fmt: skip
    return run_watched(request, deadline_s=_DEADLINE_S)


def error(predicted: float, measured: float) -> float:
    return predicted / measured - 1 if measured else 0.0


def report(turns: Turns, predicted: dict[Cell, Simulation]) -> None:
    rows = []
    for cell in turns.results:
        growth, rate = turns.spread(cell, "growth_bytes"), turns.spread(cell, "samples_per_s")
        if growth is None or rate is None:
            continue
        expected = predicted[cell]
        rows.append([
            cell.case, cell.loader, f"{cell.workers} × {cell.depth}", f"{1000 * cell.step_s:.0f}",
            f"{expected.growth_bytes / MIB:.0f}", f"{growth.median / MIB:.0f}",
            f"{error(expected.growth_bytes, growth.median):+.1%}",
            f"{error(naive_bytes(cell), growth.median):+.0%}" if cell.loader == "torch" else "",
            f"{expected.samples_per_s:.0f}", f"{rate.median:.0f}", f"{error(expected.samples_per_s, rate.median):+.1%}",
        ])  # fmt: skip
    rows.sort()
    header = ["dataset", "loader", "workers × depth", "step ms", "MiB predicted", "measured", "error", "naive"]
    print("\n" + table([*header, "samples/s predicted", "measured", "error"], rows))


def errors_of(turns: Turns, predicted: dict[Cell, Simulation], figure: str, loader: str) -> list[float]:
    found = []
    for cell, rounds in turns.results.items():
        values = [each[figure] for each in rounds if figure in each]
        if values and cell.loader == loader:
            found.append(abs(error(getattr(predicted[cell], figure), statistics.median(values))))
    return found


def verdicts(turns: Turns, predicted: dict[Cell, Simulation]) -> list[Verdict]:
    found = []
    for figure, what, middle, worst in (
        ("growth_bytes", "host memory", 8.0, 20.0), ("samples_per_s", "throughput", 10.0, 25.0),
    ):  # fmt: skip
        for loader in ("torch", "penstock"):
            errors = [100 * each for each in errors_of(turns, predicted, figure, loader)]
            if not errors:
                continue
            for name, value, bar in (("median", statistics.median(errors), middle), ("worst", max(errors), worst)):
                spread = Spread(median=value, least=min(errors), most=max(errors), rounds=len(errors))
                found.append(
                    Verdict(what=f"{loader}: {what}, {name} error", measured=spread, bar=bar, at_least=False, unit="%")
                )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, rounds=3)
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=sorted(CASES), metavar="CASE")
    given = parser.parse_args()
    print(describe(fingerprint()))
    warn_if_not_quiet()
    known = profiles(given.cases)
    cells = [cell for cell in CELLS if cell.case in given.cases]
    if given.quick:
        cells = cells[:2]
    predictions = {cell: predict(cell, known[cell.case]) for cell in cells}
    turns = Turns(lambda cell: run(cell, *predictions[cell]))
    turns.run_rounds(cells, 1 if given.quick else given.rounds)
    predicted = {cell: outcome for cell, (outcome, _) in predictions.items()}
    report(turns, predicted)
    settings = {"profiles": {name: each.as_json() for name, each in known.items()},
                "predicted": {str(cell): vars(outcome) for cell, outcome in predicted.items()}}  # fmt: skip
    return finish("planner", turns, settings, verdicts(turns, predicted), given.json)


if __name__ == "__main__":
    sys.exit(main())
