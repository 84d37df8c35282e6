"""One store with values of one size: the cost of a hit and of an insert, and the rate of two processes together.

In:  a store's name, a size.
Out: microseconds and rates.
Runs in: the child.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cached.stores import PAGE_BYTES, STORES, Store
from child import Harness

_TOTAL_BYTES = 1 << 29
_MOST_VALUES = 2000


def main() -> None:
    harness = Harness()
    size, seconds = harness.request["size_bytes"], harness.request["seconds"]
    count = max(3, min(_MOST_VALUES, _TOTAL_BYTES // size))
    # Two values are enough: the store is measured, not the source of the values.
    values = [torch.randint(0, 255, (size,), dtype=torch.uint8) for _ in range(2)]
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        store: Store = STORES[harness.request["store"]](Path(folder), count * (size + PAGE_BYTES))
        insert_us = timed(lambda key: store.put(key, values[key % 2]), range(count))
        replace_us = timed(lambda key: store.put(key, values[(key + 1) % 2]), range(count))
        for key in range(count):
            found = store.get(key)
            if not torch.equal(found, values[(key + 1) % 2]):
                raise RuntimeError(f"value {key} is not the one that was inserted")
        hits = hit_for(store, count, seconds)
        numbers = (1, 2) if harness.request["two"] else ()
        rates = [in_processes(store, count, seconds, number) for number in numbers]
    harness.result(
        insert_us=insert_us,
        replace_us=replace_us,
        hit_us=hits["hit_us"],
        hits_per_s=hits["hits_per_s"],
        scaling=rates[1] / rates[0] if rates else None,
        values=count,
    )


def timed(act: Callable[[int], Any], keys: range) -> float:
    """Median microseconds of one call."""
    took = []
    for key in keys:
        began = time.perf_counter()
        act(key)
        took.append(time.perf_counter() - began)
    return 1e6 * statistics.median(took)


def hit_for(store: Store, count: int, seconds: float) -> dict[str, float]:
    took, key, end = [], 0, time.perf_counter() + seconds
    began = now = time.perf_counter()
    while now < end:
        store.get(key)
        after = time.perf_counter()
        took.append(after - now)
        now, key = after, (key + 1) % count
    return {"hit_us": 1e6 * statistics.median(took), "hits_per_s": len(took) / (now - began)}


def in_processes(store: Store, count: int, seconds: float, number: int) -> float:
    """Hits per second of ``number`` processes together, each with one thread, all starting at the same time."""
    context = multiprocessing.get_context("fork")
    start = context.Barrier(number)
    here, there = context.Pipe(duplex=False)

    def hit() -> None:
        torch.set_num_threads(1)
        start.wait()
        there.send(hit_for(store, count, seconds)["hits_per_s"])

    processes = [context.Process(target=hit) for _ in range(number)]
    for process in processes:
        process.start()
    rates = [here.recv() for _ in processes]
    for process in processes:
        process.join()
    return sum(rates)


if __name__ == "__main__":
    main()
