"""Does the estimate predict the GPU memory of a training?

In:  trainings of T5, GPT-2, BERT, a Llama-like decoder, ResNet-50, ViT, a U-Net, an LSTM, in several precisions.
Out: predicted and measured bytes, their errors, the time of a prediction and of torch's own tracker; the largest batch
     under a limit, and how often other libraries run out of memory while they search for it; the bars, JSON.
Runs in: the harness; every case in its own children.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from child import Child
from gpu_memory.cases import CASES
from machine import describe, fingerprint
from penstock.units import GIB
from runner import Result, Spread, Turns, Verdict, add_arguments, finish, table, warn_if_not_quiet

_DEADLINE_S = 420.0
_STEPS = 3
_FINDERS = ("penstock", "accelerate", "lightning, power", "lightning, binsearch")
_LIMITS_GIB = {
    "GPT-2, 8 × 512, bf16": 16,
    "ResNet-50, 256, bf16": 10,
    "U-Net, 16 × 256², bf16": 12,
    "torch encoder, 32 × 256, bf16": 8,
}
"""Case whose largest batch is searched -> GiB that torch may reserve."""
_MOST_TRIALS = 3
_KNOWN = [name for name, case in CASES.items() if case.known is not None]


@dataclass(frozen=True)
class Cell:
    """One measurement of one case."""

    what: str
    case: str

    def __str__(self) -> str:
        return f"{self.what} {self.case}"


def run(cell: Cell, options: argparse.Namespace) -> Result:
    if cell.what in _FINDERS:
        request = {"finder": cell.what, "case": cell.case, "limit_gib": _LIMITS_GIB[cell.case]}
        with Child("gpu_memory.finding", request, deadline_s=_DEADLINE_S) as child:
            return child.event()
    dump = str(options.dump.resolve()) if options.dump else None
    request = {"what": cell.what, "case": cell.case, "steps": _STEPS, "dump": dump}
    with Child("gpu_memory.measure", request, deadline_s=_DEADLINE_S) as child:
        return child.event()


def one(turns: Turns, what: str, case: str) -> dict[str, Any]:
    """The last round's result; {} if it failed or did not run."""
    return next((result for result in reversed(turns.results.get(Cell(what, case), [])) if result), {})


def predictions(turns: Turns, cases: list[str], elsewhere: dict[str, Any]) -> list[Verdict]:
    """Predicted and measured bytes; without a GPU, the bytes known from before."""
    rows, allocated, reserved, apart, replays = [], [], [], [], []
    for name in cases:
        real = one(turns, "measure", name)
        said = (real or one(turns, "predict", name)).get("estimate")
        if said is None:
            continue
        row = [name, _gib(said["allocated_bytes"]), _gib(said["reserved_bytes"])]
        found = real.get("comparison")
        known = CASES[name].known
        if found is not None:
            pair = (found["measured_allocated_bytes"], found["measured_reserved_bytes"])
        else:
            pair = None if known is None else (known[0] * GIB, known[1] * GIB)
        if pair is not None:
            errors = said["allocated_bytes"] / pair[0] - 1, said["reserved_bytes"] / pair[1] - 1
            allocated.append(100 * abs(errors[0]))
            reserved.append(100 * abs(errors[1]))
            row += [_gib(pair[0]), _gib(pair[1]), f"{errors[0]:+.1%}", f"{errors[1]:+.1%}"]
        else:
            row += ["-"] * 4
        if real:
            replay = real["replayed_reserved_bytes"] / pair[1] - 1 if pair else 0.0
            replays.append(100 * abs(replay))
            row += [f"{replay:+.1%}", _gib(real["outside_torch_bytes"])]
        else:
            row += ["-", "-"]
        there = elsewhere.get(name)
        if there is not None:
            apart += [100 * abs(there[key] / said[key] - 1) for key in ("allocated_bytes", "reserved_bytes")]
        rows.append(row)
    header = [
        "case",
        "allocated",
        "reserved",
        "measured: allocated",
        "reserved",
        "error",
        "error",
        "allocator",
        "outside",
    ]
    print("\n" + table(header, rows))
    verdicts = []
    if allocated:
        verdicts = [
            _worst("allocated: worst error", allocated, 3.0),
            Verdict(what="reserved: median error", measured=_one(statistics.median(reserved)), bar=3.0, at_least=False,
                    unit="%"),
            _worst("reserved: worst error", reserved, 8.0),
        ]  # fmt: skip
    if replays:
        verdicts.append(_worst("allocator's model on the real requests: worst error", replays, 3.0))
    if apart:
        verdicts.append(_worst("predicted elsewhere against here: worst", apart, 3.0))
    return verdicts


def times(turns: Turns, cases: list[str]) -> list[Verdict]:
    """The time of a prediction, of torch's tracker, and of a sweep."""
    rows, shares, sweeps = [], [], []
    for name in cases:
        ours, theirs = one(turns, "predict", name), one(turns, "track", name)
        if not ours:
            continue
        sweeps.append(ours["sweep_s"] / ours["estimate_s"])
        row = [name, f"{ours['estimate_s']:.2f} s", f"{ours['sweep_s']:.2f} s", f"{sweeps[-1]:.2f}×"]
        if theirs.get("tracker_s"):
            shares.append(ours["estimate_s"] / theirs["tracker_s"])
            row += [f"{theirs['tracker_s']:.1f} s", f"{shares[-1]:.3f}×", _gib(theirs["tracker_peak_bytes"])]
        else:
            row += [theirs.get("tracker_missing", "-"), "-", "-"]
        rows.append(row)
    if not rows:
        return []
    print("\n" + table(["case", "estimate", "six sizes", "ratio", "torch's tracker", "share", "its peak"], rows))
    verdicts = [_worst("six batch sizes over one: worst", sweeps, 1.5, unit="×")]
    if shares:
        verdicts.append(_worst("time over the tracker's: worst", shares, 1 / 3, unit="×"))
    return verdicts


def finding(turns: Turns, cases: list[str]) -> list[Verdict]:
    """The largest batch under a limit that each library finds, and the batch sizes it ran."""
    rows, good, trials = [], 0, []
    for name in cases:
        for finder in _FINDERS:
            found = one(turns, finder, name)
            if not found:
                continue
            if "missing" in found:
                rows.append([name, finder, found["missing"], "-", "-", "-"])
                continue
            numbers = [str(found[key]) for key in ("batch_size", "trials", "out_of_memory")]
            rows.append([name, finder, *numbers, f"{found['seconds']:.1f} s"])
            if finder == "penstock":
                good += found["trains"] and found["is_largest"]
                trials.append(found["trials"])
    if not rows:
        return []
    print("\n" + table(["largest batch", "found by", "batch", "sizes run", "out of memory", "took"], rows))
    if not trials:
        return []
    what = "batches found that train, where 15% more fails or exceeds the margin"
    return [
        Verdict(what=what, measured=_one(good), bar=len(trials), at_least=True, unit=""),
        _worst("batch sizes run for it: most", trials, _MOST_TRIALS, unit=""),
    ]


def _worst(what: str, values: list[float], bar: float, unit: str = "%") -> Verdict:
    return Verdict(what=what, measured=_one(max(values)), bar=bar, at_least=False, unit=unit)


def _one(value: float) -> Spread:
    return Spread.of([value])


def _gib(count: float) -> str:
    return f"{count / GIB:.2f}"


def _predicted_elsewhere(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    results = json.loads(path.read_text())["results"]
    return {
        result["cell"]["case"]: result["rounds"][-1]["estimate"]
        for result in results
        if result["rounds"] and "estimate" in result["rounds"][-1]
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, rounds=1)
    has_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=["measure", "predict", "track", "find"],
        default=["measure", "find"] if has_gpu else ["predict", "track"],
        help="measure: predict and train on the GPU; predict: with times; track: torch's tracker, with its time; "
        "find: the largest batch under a limit",
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument(
        "--dump", type=Path, metavar="DIR", help="write every case's real allocation trace to this folder"
    )
    parser.add_argument("--elsewhere", type=Path, metavar="JSON", help="results of another machine to compare with")
    options = parser.parse_args()
    if {"measure", "find"} & set(options.parts) and not has_gpu:
        parser.error("--parts measure and find need a GPU")
    print(describe(fingerprint()))
    if "track" in options.parts or "predict" in options.parts:
        warn_if_not_quiet()
    cases = options.cases[:2] if options.quick else options.cases
    traced = [part for part in options.parts if part != "find"]
    cells = [Cell(part, name) for name in cases for part in traced if part != "track" or name in _KNOWN]
    if "find" in options.parts:
        cells += [Cell(finder, name) for name in cases if name in _LIMITS_GIB for finder in _FINDERS]
    turns = Turns(lambda cell: run(cell, options))
    turns.run_rounds(cells, 1 if options.quick else options.rounds)
    verdicts = predictions(turns, cases, _predicted_elsewhere(options.elsewhere)) + times(turns, cases)
    verdicts += finding(turns, cases)
    settings: dict[str, Any] = {"steps": _STEPS, "torch": torch.__version__, "cases": cases}
    for package in ("transformers", "torchvision", "accelerate", "lightning"):
        settings[package] = _version(package)
    if has_gpu:
        settings |= {"gpu": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
        settings |= {"cudnn": torch.backends.cudnn.version(), "cuda": torch.version.cuda}
    if turns.failures:
        print(f"{len(turns.failures)} failed", file=sys.stderr)
    return finish("gpu_memory", turns, settings, [] if options.quick else verdicts, options.json)


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    raise SystemExit(main())
