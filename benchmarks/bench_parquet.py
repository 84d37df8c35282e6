"""How fast are rows of Parquet files read, and how much memory does a worker take for it?

In:  files of 0.2 and 2 GB, made here; penstock's modes, Hugging Face's datasets, a table held whole and sliced.
Out: rows per second and their ratios, growth of private memory per worker, the bars, JSON.
Runs in: the harness; every way in its own child.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from child import Child
from machine import describe, fingerprint
from rows.files import make_file
from runner import Result, Turns, Verdict, add_arguments, finish, table, warn_if_not_quiet

_DEADLINE_S = 900.0
SIZES = {"0.2GB": 200_000_000, "2GB": 2_000_000_000}
WORKERS = 2
GROWTH_BARS_MIB = {"penstock": 64.0, "penstock ultra": 16.0}
BLOCK_AGAINST_RANDOM = 5.0
_RANDOM_ROWS = 8_000
"""Rows of an epoch in random order: every row decodes a whole row group, and some thousands show the growth."""


@dataclass(frozen=True)
class Cell:
    """One way, order and file."""

    what: str
    way: str
    order: str
    size: str

    def __str__(self) -> str:
        return f"{self.what}: {self.way}, {self.order}, {self.size}"


def run(cell: Cell, folder: Path, *, seconds: float, random_rows: int) -> Result:
    path = make_file(folder, SIZES[cell.size])
    request = {"what": cell.what, "way": cell.way, "order": cell.order, "path": str(path), "seconds": seconds}
    rows = random_rows if cell.order == "random" else 1 << 60
    with Child("rows.measure", request | {"workers": WORKERS, "rows": rows}, deadline_s=_DEADLINE_S) as child:
        return child.event()


def cells(sizes: list[str]) -> list[Cell]:
    ways = ("penstock", "penstock memory", "read_table.slice", "datasets")
    speeds = [Cell("speed", way, order, size) for size in sizes for way in ways for order in ("block", "random")]
    growths = [Cell("memory", way, "random", size) for size in sizes for way in GROWTH_BARS_MIB]
    return [*speeds, *growths]


def report(turns: Turns) -> None:
    rows = []
    for cell in turns.results:
        speed, growth = turns.spread(cell, "rows_per_s"), turns.spread(cell, "growth_mib")
        text = speed.text(0, " rows/s") if speed else growth.text(1, " MiB") if growth else "failed"
        rows.append([cell.size, cell.what, cell.way, cell.order, text])
    print("\n" + table(["size", "what", "way", "order", "median (least-most)"], sorted(rows)))


def verdicts(turns: Turns, sizes: list[str]) -> list[Verdict]:
    found = []
    for size in sizes:
        ours = Cell("speed", "penstock", "block", size)
        others = [
            ("penstock", "random", BLOCK_AGAINST_RANDOM),
            ("datasets", "block", 1.0),
            ("read_table.slice", "block", 1.0),
        ]
        for way, order, bar in others:
            ratio = turns.ratio(ours, Cell("speed", way, order, size), "rows_per_s")
            found.append(
                Verdict(what=f"{size}: block shuffle / {way}, {order}", measured=ratio, bar=bar, at_least=True)
            )
        for way, bar in GROWTH_BARS_MIB.items():
            growth = turns.spread(Cell("memory", way, "random", size), "growth_mib")
            what = f"{size}: {way}, growth of a worker"
            found.append(Verdict(what=what, measured=growth, bar=bar, at_least=False, unit=" MiB"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser, rounds=3)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--seconds", type=float, default=2.0, help="timed part of a run (default 2)")
    parser.add_argument("--rows", type=int, default=_RANDOM_ROWS, help=f"rows read at random (default {_RANDOM_ROWS})")
    parser.add_argument(
        "--folder", type=Path, help="folder in which files are made and kept; by default they are removed"
    )
    options = parser.parse_args()
    sizes = ["0.2GB"] if options.quick else options.sizes
    rounds = 1 if options.quick else options.rounds
    print(describe(fingerprint()))
    warn_if_not_quiet()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temporary:
        folder = options.folder or Path(temporary)
        turns = Turns(lambda cell: run(cell, folder, seconds=options.seconds, random_rows=options.rows))
        turns.run_rounds(cells(sizes), rounds)
    report(turns)
    settings = {"sizes": sizes, "rounds": rounds, "seconds": options.seconds, "rows": options.rows}
    return finish("parquet", turns, settings, [] if options.quick else verdicts(turns, sizes), options.json)


if __name__ == "__main__":
    raise SystemExit(main())
