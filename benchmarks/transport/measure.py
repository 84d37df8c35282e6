"""Times one contender on one case, then checks that its batches are correct.

In:  a request: case, contender, mode, workers, seconds.
Out: batches, seconds, the slots that the loader reports; an error if any batch was wrong.
Runs in: its own child, in every round.

The timed pass asks for batches, holds each until it has the next, as a training loop does, and reads no byte of them.
A second pass with the same settings takes as many batches and compares every one with the dataset, when it arrives and
again when the next has arrived: a loader that reuses memory too early would have overwritten it by then.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

from child import Harness
from transport.contenders import CONTENDERS
from transport.sources import CASES, Checker, Sources

_LEAST_BATCHES = 16
"""Timed batches, however long they take: batches that were ready at the start must not decide the result."""


def timed(batches: Iterator[Any], *, warm_up_s: float, seconds: float) -> tuple[int, int, float, Any]:
    """Batches of the warm-up, timed batches, seconds, and the last batch, which is still held."""
    batch, warm = None, 0
    began_s = time.perf_counter()
    while warm < _LEAST_BATCHES // 2 or time.perf_counter() - began_s < warm_up_s:
        batch = next(batches)
        warm += 1
    count, elapsed_s = 0, 0.0
    began_s = time.perf_counter()
    while count < _LEAST_BATCHES or elapsed_s < seconds:
        batch = next(batches)
        count += 1
        elapsed_s = time.perf_counter() - began_s
    return warm, count, elapsed_s, batch


def verified(batches: Iterator[Any], checker: Checker, count: int) -> None:
    """Compare ``count`` batches with the dataset."""
    held = None
    for number in range(count):
        batch = next(batches)
        checker.check(number, batch, "on arrival")
        if held is not None:
            checker.check(number - 1, held, "held while the next arrived")
        held = batch


def main() -> None:
    warnings.filterwarnings("ignore")
    harness = Harness()
    request = harness.request
    sources = Sources(CASES[request["case"]])
    open_loader = CONTENDERS[request["contender"]][request["mode"]]
    with open_loader(sources, request["workers"]) as opened:
        warm, count, elapsed_s, last = timed(opened.batches, warm_up_s=request["warm_up_s"], seconds=request["seconds"])
        facts = opened.facts()
        checker = Checker(sources)
        checker.check(warm + count - 1, last, "last of the timed pass")
        del last
    with open_loader(sources, request["workers"]) as opened:
        verified(opened.batches, checker, warm + count)
    harness.result(
        batches=count,
        elapsed_s=elapsed_s,
        batches_per_s=count / elapsed_s,
        gigabytes_per_s=count * sources.case.batch_bytes / elapsed_s / 1e9,
        verified_batches=warm + count,
        source_bytes=sources.array.nbytes,
        **facts,
    )


if __name__ == "__main__":
    main()
