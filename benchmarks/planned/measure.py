"""Loads one dataset through one loader while the harness watches its memory; or profiles it.

In:  a request: what to do, the case, the loader and its settings.
Out: samples per second and time to the first batch; or a profile.
Runs in: a child of its own per run.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from child import Harness
from planned.datasets import CASES

_WARM_SHARE = 0.3


def loader_of(request: dict[str, Any]) -> Any:
    case = CASES[request["case"]]
    options: dict[str, Any] = {
        "batch_size": case.batch_size,
        "num_workers": request["workers"],
        "collate_fn": case.collate_fn,
        "shuffle": True,
    }
    if request["loader"] == "torch":
        return TorchDataLoader(case.dataset(), prefetch_factor=request["depth"], **options)
    options["prefetch_factor"] = request.get("prefetch_factor")
    loader = penstock.DataLoader(case.dataset(), memory=request.get("memory_bytes") or "auto", **options)
    if request["depth"]:
        loader.resize(depth=request["depth"])
    return loader


def load(harness: Harness) -> None:
    request = harness.request
    loader = loader_of(request)
    torch.zeros(8).sum()
    harness.ready()
    first_s = then_s = now_s = 0.0
    count, warm = 0, request["batches"] // 3
    began_s = time.perf_counter()
    # As training loops do, each batch is held until the next one is there.
    for _batch in loader:
        # Not after the loop: leaving it ends the workers, who may be at a batch.
        now_s = time.perf_counter()
        if not count:
            first_s = now_s - began_s
        if count == warm:
            then_s = now_s
        count += 1
        if count > request["batches"]:
            break
        time.sleep(request["step_s"])
    rows = CASES[request["case"]].batch_size
    harness.result(samples_per_s=(count - 1 - warm) * rows / (now_s - then_s), first_batch_s=first_s)


def load_for(harness: Harness) -> None:
    """For so many seconds, instead of so many batches."""
    request = harness.request
    loader = loader_of(request)
    torch.zeros(8).sum()
    harness.ready()
    began_s, then_s, now_s, count = time.perf_counter(), 0.0, 0.0, 0
    for _batch in loader:
        now_s = time.perf_counter()
        if then_s:
            count += 1
        elif now_s - began_s > _WARM_SHARE * request["seconds"]:
            then_s = now_s
        if now_s - began_s > request["seconds"] and count:
            break
    harness.result(samples_per_s=count * CASES[request["case"]].batch_size / (now_s - then_s))


def plan(harness: Harness) -> None:
    case = CASES[harness.request["case"]]
    harness.ready()
    began_s = time.perf_counter()
    table = penstock.plan(
        case.dataset(), case.batch_size, memory=harness.request["memory_bytes"], collate_fn=case.collate_fn
    )
    found = table.recommended
    harness.result(name=found.name, arguments=found.arguments(), took_s=time.perf_counter() - began_s)


def profile(harness: Harness) -> None:
    from penstock.lab.profile import profile as profiled

    case = CASES[harness.request["case"]]
    harness.ready()
    began_s = time.perf_counter()
    found = profiled(case.dataset(), case.batch_size, collate_fn=case.collate_fn, name=harness.request["case"])
    harness.result(profile=found.as_json(), took_s=time.perf_counter() - began_s)


def main() -> None:
    warnings.filterwarnings("ignore")
    harness = Harness()
    {"load": load, "load for": load_for, "plan": plan, "profile": profile}[harness.request["what"]](harness)


if __name__ == "__main__":
    main()
