"""How much memory do millions of short texts take in every worker, and how long does reading one take?

In:  5 million paths, in a Python list, a numpy array and a SharedList; 4 workers, forked and spawned.
Out: private growth of a worker after a pass over all of them, time of one read, time and peak of the creation; JSON.
Runs in: the harness; every way in its own child.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from child import Child
from machine import describe, fingerprint
from runner import Result, Spread, Turns, Verdict, add_arguments, finish, table, warn_if_not_quiet

_DEADLINE_S = 600.0
WAYS = ("list", "numpy U", "SharedList")
COUNT, WORKERS = 5_000_000, 4
MIB = 1 << 20
PRIVATE_MIB, READ_US = 2.0, 2.0
WHOLE_FRACTION = 0.8
"""The pointers of a list stay shared; its texts, nine tenths of it, do not."""


@dataclass(frozen=True)
class Cell:
    """One way to keep the texts."""

    way: str

    def __str__(self) -> str:
        return self.way


def run(cell: Cell, *, count: int, methods: list[str]) -> Result:
    request = {"way": cell.way, "count": count, "workers": WORKERS, "methods": methods}
    with Child("shared_list.measure", request, deadline_s=_DEADLINE_S) as child:
        return child.event()


def report(turns: Turns, methods: list[str]) -> None:
    sizes = ["peak_bytes", "kept_bytes", *(f"{method}_private_bytes" for method in methods)]
    rows = []
    for cell in turns.results:
        row = [cell.way]
        for figure in ("build_s", "sequential_us", "first_random_us", "random_us", *sizes):
            values = turns.values(cell, figure)
            scaled = [value / MIB for value in values] if figure.endswith("bytes") else values
            row.append(Spread.of(scaled).text(1 if figure.endswith("bytes") else 2) if scaled else "failed")
        rows.append(row)
    header = ["way", "make s", "next µs", "random µs, first", "random µs", "peak MiB", "kept MiB"]
    print("\n" + table([*header, *(f"{method}: MiB a worker" for method in methods)], rows))
    print(f"Median (least-most) over rounds. MiB a worker: the largest growth of {WORKERS} workers over all texts.")


def verdicts(turns: Turns) -> list[Verdict]:
    shared, plain = Cell("SharedList"), Cell("list")
    private = [value / MIB for value in turns.values(shared, "fork_private_bytes")]
    pairs = turns.results.get(plain, [])
    whole = [result["fork_private_bytes"] / result["kept_bytes"] for result in pairs if result]
    return [
        Verdict(what="SharedList: a forked worker's growth", measured=Spread.of(private) if private else None,
                bar=PRIVATE_MIB, at_least=False, unit=" MiB"),
        Verdict(what="list: a forked worker's growth / its size", measured=Spread.of(whole) if whole else None,
                bar=WHOLE_FRACTION, at_least=True),
        *(
            Verdict(what=f"SharedList: one read, {name}", measured=turns.spread(shared, f"{name}_us"), bar=READ_US,
                    at_least=False, unit=" µs")
            for name in ("sequential", "random")
        ),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser, rounds=3)
    parser.add_argument("--methods", nargs="+", choices=["fork", "spawn"], default=["fork", "spawn"])
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    count = COUNT // 50 if options.quick else COUNT
    print(describe(fingerprint()))
    warn_if_not_quiet()
    turns = Turns(lambda cell: run(cell, count=count, methods=options.methods))
    turns.run_rounds([Cell(way) for way in WAYS], rounds)
    report(turns, options.methods)
    settings = {
        "count": count,
        "workers": WORKERS,
        "rounds": rounds,
        "methods": options.methods,
        "quick": options.quick,
    }
    return finish("shared_list", turns, settings, [] if options.quick else verdicts(turns), options.json)


if __name__ == "__main__":
    raise SystemExit(main())
