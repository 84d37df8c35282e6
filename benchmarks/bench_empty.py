"""How much faster are samples that are read straight into their rows (``penstock.empty``)?

In:  files in the page cache; three ways to read them.
Out: GB/s, ratios with their spread, the bars, JSON.
Runs in: the harness; empty/measure.py says what is timed.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from child import Child
from empty.measure import FILES, WAYS
from machine import describe, fingerprint
from runner import Result, Turns, Verdict, add_arguments, finish, table, warn_if_not_quiet

_DEADLINE_S = 120.0


@dataclass(frozen=True, order=True)
class Cell:
    """One way, for files of one size."""

    mib: int
    way: str

    def __str__(self) -> str:
        return f"{self.mib} MiB, {self.way}"


def run(cell: Cell, folder: Path, *, workers: int, seconds: float, warm_up_s: float) -> Result:
    request = {"folder": str(folder / str(cell.mib)), "mib": cell.mib, "way": cell.way, "workers": workers,
               "seconds": seconds, "warm_up_s": warm_up_s}  # fmt: skip
    with Child("empty.measure", request, deadline_s=_DEADLINE_S) as child:
        return child.event()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser, rounds=7)
    parser.add_argument("--mib", type=int, nargs="+", default=[4, 19], help="sizes of a sample (default 4 19)")
    parser.add_argument("--workers", type=int, default=2, help="default 2")
    parser.add_argument("--seconds", type=float, default=3.0, help="timed part of a round (default 3)")
    options = parser.parse_args()
    seconds, warm_up_s = (0.3, 0.2) if options.quick else (options.seconds, 2.0)
    print(describe(fingerprint()))
    warn_if_not_quiet()
    cells = [Cell(mib, way) for mib in options.mib for way in WAYS]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for mib in options.mib:
            (folder / str(mib)).mkdir()
            for number in range(FILES):
                np.random.default_rng(number).random(mib << 18, np.float32).tofile(folder / f"{mib}/{number}.bin")
        turns = Turns(lambda c: run(c, folder, workers=options.workers, seconds=seconds, warm_up_s=warm_up_s))
        turns.run_rounds(cells, 1 if options.quick else options.rounds)
    rows, verdicts = [], []
    for cell in cells:
        lent = Cell(cell.mib, WAYS[-1])
        ratio = turns.ratio(lent, cell, "gigabytes_per_s") if cell != lent else None
        speed = turns.spread(cell, "gigabytes_per_s")
        rows.append([str(cell), speed.text() if speed else "failed", ratio.text(unit="×") if ratio else ""])
        if cell != lent:
            what = f"{cell.mib} MiB: penstock.empty / {cell.way}"
            verdicts.append(Verdict(what=what, measured=ratio, bar=1.0, at_least=True))
    print("\n" + table(["samples", "GB/s", "penstock.empty / it"], rows))
    settings = {"workers": options.workers, "seconds": seconds, "warm_up_s": warm_up_s, "mib": options.mib}
    return finish("empty", turns, settings, [] if options.quick else verdicts, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
