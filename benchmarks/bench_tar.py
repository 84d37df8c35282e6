"""How fast are samples of tar shards read in order, compared with webdataset, and in random order?

In:  shards written by webdataset: members of 100 KB, and small texts with JSON, a class and an array.
Out: samples per second, ratios with their spread, the bars, JSON.
Runs in: the harness; every reader in its own child.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from child import Child
from machine import describe, fingerprint
from runner import Result, Turns, Verdict, add_arguments, finish, table, warn_if_not_quiet
from shards.made import CASES, SHARDS, make

_DEADLINE_S = 300.0
READERS = ("webdataset", "penstock", "penstock random")
AGAINST_WEBDATASET = 1.0


@dataclass(frozen=True)
class Cell:
    """One reader over shards of one kind."""

    reader: str
    case: str
    decode: bool

    def __str__(self) -> str:
        return f"{self.reader}, {self.case}, {'decoded' if self.decode else 'raw'}"


def run(cell: Cell, shards: dict[str, str], checksums: dict[str, int]) -> Result:
    request = {"reader": cell.reader, "shards": shards[cell.case], "decode": cell.decode}
    with Child("shards.measure", request, deadline_s=_DEADLINE_S) as child:
        result = child.event()
    if checksums.setdefault(cell.case, result["checksum"]) != result["checksum"]:
        raise RuntimeError(f"{cell} read other bytes than the cell before it")
    return result


def report(turns: Turns) -> None:
    rows = []
    for cell in turns.results:
        speed = turns.spread(cell, "samples_per_s")
        ratio = turns.ratio(cell, Cell("webdataset", cell.case, cell.decode), "samples_per_s")
        rows.append(
            [
                cell.case,
                "decoded" if cell.decode else "raw",
                cell.reader,
                speed.text(0) if speed else "failed",
                ratio.text(unit="×") if ratio and cell.reader != "webdataset" else "",
            ]
        )
    print("\n" + table(["samples", "as", "reader", "samples/s", "/ webdataset"], rows))
    print(
        "Median (least-most) over rounds; ratios round by round. The shards are in the page cache; the index is kept."
    )


def verdicts(turns: Turns, cases: list[str]) -> list[Verdict]:
    return [
        Verdict(
            what=f"{case}, {'decoded' if decode else 'raw'}: penstock / webdataset, in order",
            measured=turns.ratio(Cell("penstock", case, decode), Cell("webdataset", case, decode), "samples_per_s"),
            bar=AGAINST_WEBDATASET,
            at_least=True,
        )
        for case in cases
        for decode in (False, True)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser, rounds=5)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    print(describe(fingerprint()))
    warn_if_not_quiet()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        shards = {case: make(case, Path(folder), is_quick=options.quick) for case in options.cases}
        checksums: dict[str, int] = {}
        turns = Turns(lambda cell: run(cell, shards, checksums))
        cells = [Cell(reader, case, decode) for case in options.cases for decode in (False, True) for reader in READERS]
        turns.run_rounds(cells, rounds)
    report(turns)
    settings = {"cases": options.cases, "rounds": rounds, "shards": SHARDS, "samples": CASES, "quick": options.quick}
    return finish("tar", turns, settings, [] if options.quick else verdicts(turns, options.cases), options.json)


if __name__ == "__main__":
    raise SystemExit(main())
