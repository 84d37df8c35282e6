"""What do a hit and an insert in a cache cost, compared with copying the value?

In:  values of 4 KB to 128 MB; penstock's cache in memory and on disk, LMDB, diskcache, a dictionary.
Out: microseconds per hit and insert, ratios to ``Tensor.clone()`` with their spread, the bars, JSON.
Runs in: the harness; every store in its own child.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from cached.stores import STORES
from child import Child
from machine import describe, fingerprint
from runner import Result, Spread, Turns, Verdict, add_arguments, finish, table, warn_if_not_quiet

_DEADLINE_S = 120.0
SIZES = {"4KB": 4096, "1MB": 10**6, "8MB": 8 * 10**6, "32MB": 32 * 10**6, "128MB": 128 * 10**6}
HIT_AGAINST_CLONE = 1.5
SMALL_HIT_US = 25.0
INSERT_AGAINST_HIT_BAR = 3.0


@dataclass(frozen=True)
class Cell:
    """One store with values of one size."""

    store: str
    size: str

    def __str__(self) -> str:
        return f"{self.store}, {self.size}"


def run(cell: Cell, *, seconds: float) -> Result:
    request = {"store": cell.store, "size_bytes": SIZES[cell.size], "seconds": seconds}
    # The other stores cannot be read from a second process.
    request["two"] = cell.store in ("penstock", "penstock disk", "diskcache", "dict")
    with Child("cached.measure", request, deadline_s=_DEADLINE_S) as child:
        return child.event()


def report(turns: Turns) -> None:
    rows = []
    for cell in turns.results:
        row = [cell.size, cell.store]
        for figure in ("hit_us", "insert_us", "replace_us"):
            spread, ratio = turns.spread(cell, figure), turns.ratio(cell, Cell("dict", cell.size), figure)
            row += [spread.text(1) if spread else "failed", ratio.text() if ratio and cell.store != "dict" else ""]
        scaling = turns.values(cell, "scaling")
        row.append(Spread.of([value for value in scaling if value]).text() if any(scaling) else "")
        rows.append(row)
    rows.sort(key=lambda row: (list(SIZES).index(row[0]), list(STORES).index(row[1])))
    header = ["size", "store", "hit µs", "/ clone", "insert µs", "/ clone", "replace µs", "/ clone", "2 processes"]
    print("\n" + table(header, rows))
    print(
        "Median (least-most) over rounds; ratios round by round. Insert: a new key into memory not used before; "
        "replace: an old key again. 2 processes: hits per second of both / hits per second of one."
    )


def verdicts(turns: Turns, sizes: list[str]) -> list[Verdict]:
    found = []
    for size in sizes:
        ours, clone = Cell("penstock", size), Cell("dict", size)
        if size == "4KB":
            for figure, bar in (("hit_us", SMALL_HIT_US), ("insert_us", INSERT_AGAINST_HIT_BAR * SMALL_HIT_US)):
                found.append(
                    Verdict(
                        what=f"4KB: {figure}", measured=turns.spread(ours, figure), bar=bar, at_least=False, unit=" µs"
                    )
                )
            continue
        for figure, bar in (("hit_us", HIT_AGAINST_CLONE), ("insert_us", INSERT_AGAINST_HIT_BAR * HIT_AGAINST_CLONE)):
            pairs = zip(turns.results.get(ours, []), turns.results.get(clone, []), strict=False)
            # Both are compared with a clone, because an insert allocates nothing that the caller keeps.
            ratios = [a[figure] / b["hit_us"] for a, b in pairs if a and b]
            measured = Spread.of(ratios) if ratios else None
            found.append(Verdict(what=f"{size}: {figure} / clone", measured=measured, bar=bar, at_least=False))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser, rounds=5)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--stores", nargs="+", choices=list(STORES), default=list(STORES))
    parser.add_argument("--seconds", type=float, default=0.5, help="timed hits of a run (default 0.5)")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    print(describe(fingerprint()))
    warn_if_not_quiet()
    turns = Turns(lambda cell: run(cell, seconds=options.seconds))
    turns.run_rounds([Cell(store, size) for size in options.sizes for store in options.stores], rounds)
    report(turns)
    settings = {"sizes": options.sizes, "rounds": rounds, "seconds": options.seconds, "quick": options.quick}
    return finish("cache", turns, settings, [] if options.quick else verdicts(turns, options.sizes), options.json)


if __name__ == "__main__":
    raise SystemExit(main())
