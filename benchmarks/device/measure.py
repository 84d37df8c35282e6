"""Measures one property of delivery to the GPU.

In:  a request: what, case, loader, workers, memory, seconds.
Out: figures, as JSON.
Runs in: its own child, in every round.
"""

from __future__ import annotations

import gc
import itertools
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from child import Harness
from device.sources import CASES, Case, Checker, Images

ENDLESS = 1 << 30


def link() -> dict[str, Any]:
    """The rate of the pinned link."""
    host = torch.empty(1 << 30, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(host, device="cuda")
    there.copy_(host)
    torch.cuda.synchronize()
    rates = []
    for _ in range(3):
        began_s = time.perf_counter()
        for _ in range(5):
            there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(5 * host.nbytes / (time.perf_counter() - began_s) / 1e9)
    return {"gigabytes_per_s": max(rates)}


def open_loader(request: dict[str, Any], images: Images) -> tuple[Any, Iterator[torch.Tensor]]:
    """The loader, and its batches on the GPU."""
    given = {"batch_size": images.case.rows, "num_workers": request["workers"]}
    if request["loader"] == "torch":
        loader = torch.utils.data.DataLoader(images, pin_memory=True, **given)
        return loader, (batch.to("cuda", non_blocking=True) for batch in loader)
    import penstock

    loader = penstock.DataLoader(images, memory=request["memory"], device="cuda", **given)
    return loader, iter(loader)


def rate(request: dict[str, Any], case: Case) -> dict[str, Any]:
    """GB/s on the GPU, then as many batches again, each checked there."""
    loader, batches = open_loader(request, Images(case, ENDLESS, request["source"]))
    sink = torch.zeros((), device="cuda")
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < request["warm_up_s"]:
        sink += next(batches).view(-1)[0]
    torch.cuda.synchronize()
    count, began_s = 0, time.perf_counter()
    while time.perf_counter() - began_s < request["seconds"]:
        sink += next(batches).view(-1)[0]
        count += 1
    torch.cuda.synchronize()
    elapsed_s = time.perf_counter() - began_s
    facts = {}
    if request["loader"] == "penstock":
        stats = loader.stats()
        facts = {
            "peak_in_flight_bytes": stats.peak_in_flight_bytes,
            "workers_private_bytes": stats.workers_private_bytes,
            "device_ahead_bytes": stats.device_ahead_bytes,
            "depth": stats.depth,
        }
        loader.close()
    del batches, loader
    gc.collect()
    images = Images(case, ENDLESS, request["source"])
    checker = Checker(images, "cuda")
    for number, batch in enumerate(itertools.islice(open_loader(request, images)[1], 100)):
        checker.check(number, batch)
    return {
        "gigabytes_per_s": count * case.batch_bytes / elapsed_s / 1e9,
        "batches": count,
        "wrong_rows": checker.wrong_rows,
        **facts,
    }


def idle(request: dict[str, Any], case: Case) -> dict[str, Any]:
    """The share of time in which the GPU has no work, in a training whose step takes longer than loading."""
    loader, batches = open_loader(request, Images(case, ENDLESS, request["source"]))
    step_cycles = _cycles(request["step_s"])
    for _ in range(5):
        next(batches)
        torch.cuda._sleep(step_cycles)
    torch.cuda.synchronize()
    begun, busy = torch.cuda.Event(enable_timing=True), []
    ended = torch.cuda.Event(enable_timing=True)
    begun.record()
    for _ in range(request["steps"]):
        batch = next(batches)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.cuda._sleep(step_cycles)
        end.record()
        del batch
        busy.append((start, end))
        # A training loop is one or two steps ahead of the GPU, not hundreds.
        if len(busy) > 2:
            busy[-3][1].synchronize()
    ended.record()
    torch.cuda.synchronize()
    total_ms = begun.elapsed_time(ended)
    busy_ms = sum(start.elapsed_time(end) for start, end in busy)
    if request["loader"] == "penstock":
        loader.close()
    return {"idle_share": 1 - busy_ms / total_ms, "step_ms": busy_ms / len(busy)}


def fire(request: dict[str, Any], case: Case) -> dict[str, Any]:
    """Copies batches in pinned memory on side streams, behind long kernels, drops them at once and resizes slots."""
    import penstock

    images = Images(case, ENDLESS, request["source"])
    loader = penstock.DataLoader(
        images,
        batch_size=case.rows,
        num_workers=request["workers"],
        memory=request["memory"],
        pin_memory=request["loader"] == "pinned",
        device=None if request["loader"] == "pinned" else "cuda",
    )
    checker = Checker(images, "cuda")
    streams = [torch.cuda.Stream() for _ in range(4)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    kernel_cycles = _cycles(0.2)
    number = 0
    for number, batch in enumerate(itertools.islice(loader, request["batches"])):
        if request["loader"] != "pinned":
            # The batch is ready for the current stream only; any other stream has to wait for that one.
            streams[number % 4].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[number % 4]):
            if number % 250 < 4:
                torch.cuda._sleep(kernel_cycles)
            there = batch.to("cuda", non_blocking=True)
            del batch
            if request["loader"] != "pinned":
                there.record_stream(streams[number % 4])
            checker.check(number, there)
            del there
        if request["resizes"] and number % 500 == 250:
            loader.set_memory(request["memory"] * (1 + number // 500 % 2) // 2)
            loader.resize(depth=[2, 6, 3][number // 500 % 3])
    torch.cuda.synchronize()
    engines = [iterator.engine for iterator in loader._live() if iterator.engine is not None]
    loader.close()
    return {
        "batches": number + 1,
        "wrong_rows": checker.wrong_rows,
        "locked_bytes_after_close": sum(engine.gauges().page_locked_bytes for engine in engines),
    }


def _cycles(seconds: float) -> int:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1000)
    start.record()
    torch.cuda._sleep(10_000_000)
    end.record()
    end.synchronize()
    return int(10_000_000 / start.elapsed_time(end) * 1000 * seconds)


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    harness = Harness()
    request = harness.request
    measures = {"rate": rate, "idle": idle, "fire": fire}
    what = request["what"]
    harness.result(**(link() if what == "link" else measures[what](request, CASES[request["case"]])))


if __name__ == "__main__":
    main()
