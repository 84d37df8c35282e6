"""One way to keep many short texts: the cost of creating and reading them, and the private memory of workers.

In:  a way, a number of texts, the start methods of workers.
Out: seconds, microseconds, bytes.
Runs in: the child.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from child import Harness
from penstock.data import SharedList

WAYS: dict[str, Callable[[Iterator[str]], Sequence[str]]] = {
    "list": list,
    "SharedList": SharedList,
    "numpy U": lambda texts: np.array(list(texts)),  # type: ignore[dict-item,return-value]
}
"""Name -> function that makes the sequence from an iterator of texts."""
_RANDOM_READS = 500_000
_PASSES = 3
"""The median counts. The first pass, which also maps pages, is reported too."""


def main() -> None:
    harness = Harness()
    way, count, workers = harness.request["way"], harness.request["count"], harness.request["workers"]
    before, began = proc_bytes("status", "VmRSS:"), time.perf_counter()
    texts = WAYS[way](f"images/train/{number:08d}.jpg" for number in range(count))
    build_s = time.perf_counter() - began
    peak_bytes = proc_bytes("status", "VmHWM:") - before
    kept_bytes = proc_bytes("status", "VmRSS:") - before
    memory_bytes = len(texts._bytes) if isinstance(texts, SharedList) else 0
    figures: dict[str, Any] = {}
    for name, reads in (("sequential_us", range(count)), ("random_us", random_places(count))):
        passes_us = [1e6 * seconds_of(texts, reads) / len(reads) for _ in range(_PASSES)]
        figures[name], figures[f"first_{name}"] = statistics.median(passes_us), passes_us[0]
    for method in harness.request["methods"]:
        growths = growths_in(texts, workers, method)
        figures[f"{method}_private_bytes"] = max(growths)
        figures[f"{method}_private_least_bytes"] = min(growths)
    harness.result(
        build_s=build_s, peak_bytes=peak_bytes + memory_bytes, kept_bytes=kept_bytes + memory_bytes, **figures
    )


def seconds_of(texts: Sequence[str], reads: Sequence[int]) -> float:
    began = time.perf_counter()
    for place in reads:
        texts[place]
    return time.perf_counter() - began


def random_places(count: int) -> list[int]:
    chance = random.Random(0)
    return [chance.randrange(count) for _ in range(_RANDOM_READS)]


def growths_in(texts: Sequence[str], workers: int, method: str) -> list[int]:
    """Bytes that workers have to themselves for reading all texts, measured when the last of them has."""
    if method == "fork":
        return [after - before for before, after in in_workers(texts, workers, method)]
    # A worker that starts afresh unpickles its copy before it can look: compare with one that has nothing to read.
    ((_, bare),) = in_workers([], 1, method)
    return [after - bare for _, after in in_workers(texts, workers, method)]


def in_workers(texts: Sequence[str], workers: int, method: str) -> list[tuple[int, int]]:
    """Private bytes of every worker before and after its pass."""
    context: Any = multiprocessing.get_context(method)
    ends = [context.Pipe() for _ in range(workers)]
    processes = [context.Process(target=read_all, args=(texts, theirs)) for _, theirs in ends]
    for process in processes:
        process.start()
    befores = [ours.recv() for ours, _ in ends]
    # Pages read by only one worker so far would count as its own: no worker measures or ends before all have read.
    afters = []
    for ours, _ in ends:
        ours.send("measure")
        afters.append(ours.recv())
    for ours, _ in ends:
        ours.send("leave")
    for process in processes:
        process.join()
    return list(zip(befores, afters, strict=True))


def read_all(texts: Sequence[str], line: Connection) -> None:
    # As in a worker of penstock: the garbage collector would write to every object.
    gc.freeze()
    before = private_bytes()
    for place in range(len(texts)):
        texts[place]
    line.send(before)
    line.recv()
    line.send(private_bytes())
    line.recv()


def private_bytes() -> int:
    return proc_bytes("smaps_rollup", "Private_Dirty:") + proc_bytes("smaps_rollup", "Private_Clean:")


def proc_bytes(file: str, name: str) -> int:
    for line in Path("/proc/self", file).read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"no {name} in /proc/self/{file}")


if __name__ == "__main__":
    main()
