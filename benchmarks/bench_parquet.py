"""How fast are rows of Parquet files read, and how much memory does a worker take for it?

In:  files of 0.2 and 2 GB and one that pyarrow wrote with its defaults, made here; penstock's modes and loader, Hugging
     Face's datasets, a table held whole and sliced.
Out: rows per second and their ratios, growth of private memory per worker and of the process tree, the bars, JSON.
Runs in: the harness; every way in its own child.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from child import Child
from machine import describe, fingerprint
from peak import Peak, read_tree
from rows.files import make_file, make_ordinary_file
from runner import Result, Turns, Verdict, add_arguments, finish, table, warn_if_not_quiet

_DEADLINE_S = 900.0
SIZES = {"0.2GB": 200_000_000, "2GB": 2_000_000_000}
WORKERS = 2
GROWTH_BARS_MIB = {"penstock": 64.0, "penstock ultra": 16.0}
BLOCK_AGAINST_RANDOM = 5.0
_RANDOM_ROWS = 8_000
"""Rows of an epoch in random order: every row decodes a whole row group, and some thousands show the growth."""

ORDINARY = "ordinary"
ORDINARY_ROWS = 50_000
EPOCH_WAYS = (
    "sliced table, torch", "LowMemDataset, torch", "LowMemDataset, penstock", "LowMemDataset one by one, torch",
)  # fmt: skip
"""The first one holds the whole table; the others are compared with it."""
EPOCH_WORKERS = (0, 4)
EPOCH_BAR = 1.0


@dataclass(frozen=True)
class Cell:
    """One way, order and file."""

    what: str
    way: str
    order: str
    size: str
    workers: int = WORKERS

    def __str__(self) -> str:
        return f"{self.what}: {self.way}, {self.order}, {self.size}, {self.workers} workers"


def run(cell: Cell, folder: Path, *, seconds: float, random_rows: int) -> Result:
    if cell.what == "epoch":
        return run_epochs(cell, folder, seconds)
    path = make_file(folder, SIZES[cell.size])
    request = {"what": cell.what, "way": cell.way, "order": cell.order, "path": str(path), "seconds": seconds}
    rows = random_rows if cell.order == "random" else 1 << 60
    with Child("rows.measure", request | {"workers": WORKERS, "rows": rows}, deadline_s=_DEADLINE_S) as child:
        return child.event()


def run_epochs(cell: Cell, folder: Path, seconds: float) -> Result:
    """Rows per second of a loader, and the growth of its process tree since its libraries were imported."""
    path = make_ordinary_file(folder, ORDINARY_ROWS)
    request = {"way": cell.way, "workers": cell.workers, "path": str(path), "seconds": seconds}
    with Child("rows.epochs", request, deadline_s=_DEADLINE_S) as child:
        child.event()
        tree = Peak(lambda: sum(map(_pss_bytes, read_tree(child.pid, "smaps_rollup"))), int, most_duty=0.02)
        with tree:
            child.go()
            result = child.event()
        return result | {"tree_growth_mib": tree.growth_bytes / 2**20}


def _pss_bytes(kilobytes: dict[str, int]) -> int:
    return 1024 * kilobytes.get("Pss", 0)


def cells(sizes: list[str]) -> list[Cell]:
    ways = ("penstock", "penstock memory", "read_table.slice", "datasets")
    speeds = [Cell("speed", way, order, size) for size in sizes for way in ways for order in ("block", "random")]
    growths = [Cell("memory", way, "random", size) for size in sizes for way in GROWTH_BARS_MIB]
    epochs = [Cell("epoch", way, "random", ORDINARY, workers) for way in EPOCH_WAYS for workers in EPOCH_WORKERS]
    return [*speeds, *growths, *epochs]


def report(turns: Turns) -> None:
    rows = []
    for cell in turns.results:
        speed, growth = turns.spread(cell, "rows_per_s"), turns.spread(cell, "growth_mib")
        text = speed.text(0, " rows/s") if speed else growth.text(1, " MiB") if growth else "failed"
        if cell.what != "epoch":
            rows.append([cell.size, cell.what, cell.way, cell.order, text])
    print("\n" + table(["size", "what", "way", "order", "median (least-most)"], sorted(rows)))
    rows = []
    for cell in turns.results:
        figures = [
            found.text(digits) if (found := turns.spread(cell, name)) else "failed"
            for name, digits in (("rows_per_s", 0), ("cpu_us", 1), ("tree_growth_mib", 0))
        ]
        if cell.what == "epoch":
            rows.append([str(cell.workers), cell.way, *figures])
    columns = ["workers", "shuffled epochs of an ordinary file", "rows/s", "CPU µs a row", "tree MiB"]
    print("\n" + table(columns, sorted(rows)))


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
    for workers in EPOCH_WORKERS:
        theirs = Cell("epoch", EPOCH_WAYS[0], "random", ORDINARY, workers)
        for way in EPOCH_WAYS[1:]:
            ratio = turns.ratio(theirs, Cell("epoch", way, "random", ORDINARY, workers), "cpu_us")
            what = f"CPU of {EPOCH_WAYS[0]} / {way}, {workers} workers"
            found.append(Verdict(what=what, measured=ratio, bar=EPOCH_BAR, at_least=True))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser, rounds=3)
    parser.add_argument("--sizes", nargs="*", choices=list(SIZES), default=list(SIZES))
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
