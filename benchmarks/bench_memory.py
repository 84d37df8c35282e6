"""How much memory does feeding a training take, and how fast is it fed?

In:  penstock with a budget, penstock and torch's DataLoader with their defaults; 4, 8 and 16 workers; torch's
     collate function and a custom one.
Out: growth of the tree's PSS, samples/s, time to the first batch, ratios with their spread, the bars, JSON.
Runs in: the harness, which samples memory from outside; the training runs in a child.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass

from child import Child
from machine import describe, fingerprint
from memory.watch import Watch
from memory.work import BATCH_BYTES, OWN_BYTES, ROWS, SAMPLE_BYTES, SAMPLE_S, STEP_S, WORKER_BYTES
from penstock.units import MIB
from runner import Result, Spread, Turns, Verdict, add_arguments, finish, table, warn_if_not_quiet

_DEADLINE_S = 300.0
LOADERS = ("torch", "penstock", "penstock default")
GROWTH_AGAINST_TORCH = {"default": 1 / 4, "custom": 1 / 3}
"""The bars, by collate function."""
THROUGHPUT_AGAINST_TORCH = 1.5
FIRST_BATCH_AGAINST_TORCH = 1 / 3


@dataclass(frozen=True)
class Cell:
    """One loader with a number of workers and a collate function."""

    loader: str
    workers: int
    collate: str

    def __str__(self) -> str:
        return f"{self.loader}, {self.workers} workers, {self.collate} collate"


_WORKER_BUDGET = SAMPLE_BYTES + 10 * MIB
"""The part of the budget for each worker: the sample that it holds, and the memory of a forked Python."""
_COLLATE_SLOTS = 1.5
"""Further batches in the budget for a custom collate function: samples, result and its copy exist at once."""


def budget_bytes(workers: int, slots: int, collate: str) -> int:
    """penstock's budget: for the slots, for penstock itself, and for the workers."""
    batches = slots + (_COLLATE_SLOTS if collate == "custom" else 0)
    return int(batches * BATCH_BYTES) + OWN_BYTES + workers * _WORKER_BUDGET


def run(cell: Cell, *, samples: int, slots: int) -> Result:
    budget = budget_bytes(cell.workers, slots, cell.collate) if cell.loader == "penstock" else None
    request = {
        "loader": cell.loader.split()[0],
        "workers": cell.workers,
        "collate": cell.collate,
        "samples": samples,
        "memory_bytes": budget,
    }
    with Child("memory.measure", request, deadline_s=_DEADLINE_S) as child:
        child.event()  # ready
        with Watch(child.pid) as watch:
            child.go()
            result = child.event()
    return {
        **result,
        "memory_bytes": budget,
        "growth_mib": watch.growth_bytes / MIB,
        "file_growth_mib": watch.file_growth_bytes / MIB,
        "processes_at_peak": watch.peak.processes,
        "samples_of_memory": watch.samples,
        "sampling_cpus": watch.sampling_s / result["elapsed_s"],
    }


def report(turns: Turns, slots: int) -> None:
    """Print all figures."""
    rows = []
    for cell in turns.results:
        theirs = Cell("torch", cell.workers, cell.collate)
        growth, rate, first = (turns.spread(cell, name) for name in ("growth_mib", "samples_per_s", "first_batch_s"))
        if growth is None or rate is None or first is None:
            rows.append([cell.collate, str(cell.workers), cell.loader, "failed", *[""] * 7])
            continue
        ratios = [
            ratio.text() if cell != theirs and (ratio := turns.ratio(cell, theirs, name)) else ""
            for name in ("growth_mib", "samples_per_s", "first_batch_s")
        ]
        stats = turns.results[cell][-1].get("stats") or {}
        budget = (
            budget_bytes(cell.workers, slots, cell.collate) if cell.loader == "penstock" else stats.get("memory_bytes")
        )
        rows.append(
            [
                cell.collate,
                str(cell.workers),
                cell.loader,
                f"{budget / MIB:.0f}" if budget else "",
                growth.text(0),
                ratios[0],
                rate.text(0),
                ratios[1],
                first.text(2),
                ratios[2],
                f"{stats['depth']}, {stats['shared_batches']}" if stats else "",
            ]
        )
    rows.sort(key=lambda row: (row[0] != "default", int(row[1]), LOADERS.index(row[2])))
    header = ["collate", "workers", "loader", "memory= MiB", "growth MiB", "/ torch", "samples/s", "/ torch"]
    print("\n" + table([*header, "first batch s", "/ torch", "depth, shared"], rows))
    print("Median (least-most) over rounds; ratios round by round.")
    moved = max((abs(v) for cell in turns.results for v in turns.values(cell, "file_growth_mib")), default=0.0)
    if moved > 16:
        print(
            f"Mapped files are up to {moved:.0f} MiB of a growth: other processes with the same libraries started or "
            "ended. Measure again on an idle machine.",
            file=sys.stderr,
        )


def verdicts(turns: Turns, workers: list[int], collates: list[str]) -> list[Verdict]:
    """The bars, for penstock with its budget; penstock with its defaults is only shown."""
    found: list[Verdict] = []
    for collate in collates:
        for count in workers:
            ours, theirs = Cell("penstock", count, collate), Cell("torch", count, collate)
            where = f"{collate} collate, {count} workers"
            bars = [("growth_mib", "growth / torch", GROWTH_AGAINST_TORCH[collate], False)]
            if collate == "default":
                bars.append(("samples_per_s", "samples/s / torch", THROUGHPUT_AGAINST_TORCH, True))
                bars.append(("first_batch_s", "first batch / torch", FIRST_BATCH_AGAINST_TORCH, False))
            for figure, what, bar, at_least in bars:
                measured = turns.ratio(ours, theirs, figure)
                found.append(Verdict(what=f"{where}: {what}", measured=measured, bar=bar, at_least=at_least, unit="×"))
        if collate == "default":
            found += [_per_worker(turns, few, many) for few, many in itertools.pairwise(workers)]
    return found


def _per_worker(turns: Turns, few: int, many: int) -> Verdict:
    pairs = zip(
        turns.results.get(Cell("penstock", few, "default"), []),
        turns.results.get(Cell("penstock", many, "default"), []),
        strict=False,
    )
    mib = [(b["growth_mib"] - a["growth_mib"]) / (many - few) for a, b in pairs if a and b]
    return Verdict(
        what=f"default collate, {few} to {many} workers: each further worker",
        measured=Spread.of(mib) if mib else None,
        bar=(SAMPLE_BYTES + WORKER_BYTES) / MIB,
        at_least=False,
        unit=" MiB",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser, rounds=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 16], metavar="N")
    parser.add_argument("--samples", type=int, default=240, help="samples of a run (default 240, 30 batches)")
    parser.add_argument("--slots", type=int, default=2, help="batches in penstock's budget (default 2)")
    parser.add_argument("--collates", nargs="+", choices=list(GROWTH_AGAINST_TORCH), default=list(GROWTH_AGAINST_TORCH))
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    samples = 10 * ROWS if options.quick else options.samples
    if samples % ROWS:
        parser.error(f"--samples must be a multiple of {ROWS}")
    workers = sorted(options.workers)

    print(describe(fingerprint()))
    warn_if_not_quiet()
    print(
        f"Batches of {ROWS}, {BATCH_BYTES / MIB:.1f} MiB; {SAMPLE_S * 1e3:.0f} ms per sample, "
        f"{STEP_S * 1e3:.0f} ms per step; {samples} samples, {rounds} rounds.\n"
        f"penstock's budget: {options.slots} batches + 4 MiB + workers × (one sample + 10 MiB) = "
        + ", ".join(f"{budget_bytes(n, options.slots, 'default') / MIB:.0f} MiB for {n}" for n in workers)
        + f"; {_COLLATE_SLOTS} batches more with a custom collate"
    )
    turns = Turns(lambda cell: run(cell, samples=samples, slots=options.slots))
    turns.run_rounds(
        [Cell(name, n, collate) for collate in options.collates for n in workers for name in LOADERS], rounds
    )
    report(turns, options.slots)
    settings = {
        "workers": workers,
        "rounds": rounds,
        "samples": samples,
        "sample_s": SAMPLE_S,
        "step_s": STEP_S,
        "batch_bytes": BATCH_BYTES,
        "budget_bytes": {f"{n} {c}": budget_bytes(n, options.slots, c) for n in workers for c in options.collates},
        "quick": options.quick,
    }
    bars = [] if options.quick else verdicts(turns, workers, options.collates)
    return finish("memory", turns, settings, bars, options.json)


if __name__ == "__main__":
    sys.exit(main())
