"""Predicts one case's memory, then trains it and measures.

In:  a request: what, case, steps, and a folder for allocation traces.
Out: predicted and measured bytes, their errors, times, as JSON.
Runs in: its own child per case.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import penstock.gpu
from child import Harness
from gpu_memory.cases import CASES, Case
from penstock.gpu import real_steps
from penstock.gpu.allocator.alloc_conf import AllocatorSettings
from penstock.gpu.allocator.caching_allocator import CachingAllocator
from penstock.gpu.optimizers import maker_of
from penstock.gpu.training import call, loss_of

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MOST_EVENTS = 2_000_000
_FRAMES = 4
"""Lines of Python written for every allocation."""


def predict(case: Case, batch_sizes: list[int]) -> list[penstock.gpu.Estimate]:
    make_model, make_batch = case.makers()
    return penstock.gpu.estimate(
        make_model,
        make_batch,
        batch_sizes,
        optimizer=case.optimizer,
        precision=case.precision,
        checkpointing=case.checkpointing,
        accumulation=case.accumulation,
    )


def prediction(case: Case) -> dict[str, Any]:
    """The estimate, its time, and the time of six batch sizes at once."""
    size = case.batch_size
    predict(case, [size])  # imports, and torch's own first-time work
    began_s = time.perf_counter()
    estimate = predict(case, [size])[0]
    one_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    predict(case, [size, size + 2, size + 4, size + 8, size + 12, 2 * size])
    return {"estimate": asdict(estimate), "estimate_s": one_s, "sweep_s": time.perf_counter() - began_s}


def tracked(case: Case) -> dict[str, Any]:
    """The time of torch's own tracker on fake tensors, for two iterations as in its documentation."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        from torch.distributed._tools.mem_tracker import MemTracker
    except ImportError as error:
        return {"tracker_missing": str(error)}
    make_model, make_batch = case.makers()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # It draws again until all values are within bounds, and fake tensors have no values.
    torch.nn.init.trunc_normal_ = lambda tensor, *_, **__: tensor
    began_s = time.perf_counter()
    with FakeTensorMode(), torch.device(device):
        model = make_model()
        model.train()
        if case.checkpointing:
            model.gradient_checkpointing_enable()
        optimizer = maker_of(case.optimizer)(model.parameters())
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for number in range(2):
                with _autocast(case, device):
                    loss = loss_of(call(model, make_batch(case.batch_size)))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if number == 0:
                    tracker.reset_mod_stats()
        peak = tracker.get_tracker_snapshot("peak")
    largest = max((max(kinds.values()) for kinds in peak.values()), default=0)  # one of the kinds is their total
    return {"tracker_s": time.perf_counter() - began_s, "tracker_peak_bytes": largest}


def measured(case: Case, steps: int, folder: Path | None, name: str) -> dict[str, Any]:
    """Real steps, and the figures of torch's allocator for them."""
    estimate = predict(case, [case.batch_size])[0]
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(
        enabled="all", context="alloc" if folder else None, stacks="python", max_entries=_MOST_EVENTS
    )
    took_s = real_steps.train(case.setup(), case.batch_size, "cuda", steps)
    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    snapshot: Any = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    events: list[Any] = snapshot["device_traces"][0]
    if folder is not None:
        _keep(folder / f"{_slug(name)}.json.gz", events)
    outside = total - free - torch.cuda.memory_reserved()
    comparison = penstock.gpu.compare(estimate, stats)
    return {
        "estimate": asdict(estimate),
        "comparison": asdict(comparison),
        "outside_torch_bytes": outside,
        "device_error": estimate.device_bytes / (comparison.measured_reserved_bytes + outside) - 1,
        "replayed_reserved_bytes": replayed(events),
        "segments": len(snapshot["segments"]),
        "step_s": took_s,
        "gpu": torch.cuda.get_device_name(),
        "cudnn": torch.backends.cudnn.version(),
        "cuda": torch.version.cuda,
    }


def replayed(events: list[Any]) -> int:
    """The bytes that our model of the allocator reserves for the real requests."""
    allocator = CachingAllocator(AllocatorSettings())
    held: dict[int, Any] = {}
    for event in events:
        if event["action"] == "alloc":
            held[event["addr"]] = allocator.allocate(event["size"])
        elif event["action"] == "free_completed" and event["addr"] in held:
            allocator.free(held.pop(event["addr"]))
    return allocator.peak_reserved_bytes


@contextlib.contextmanager
def _autocast(case: Case, device: str) -> Iterator[None]:
    kind = _TYPES.get(case.precision)
    with torch.autocast(device, kind) if kind is not None else contextlib.nullcontext():
        yield


def _keep(path: Path, events: list[Any]) -> None:
    """One line per event: action, address, bytes and, for allocations, the lines of Python that made them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as lines:
        for event in events:
            frames = [f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in event.get("frames", [])[:_FRAMES]]
            row = [event["action"], event["addr"], event["size"], *([frames] if event["action"] == "alloc" else [])]
            lines.write(json.dumps(row) + "\n")


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-")


def main() -> None:
    warnings.filterwarnings("ignore")
    harness = Harness()
    request = harness.request
    case = CASES[request["case"]]
    if request["what"] == "predict":
        said = prediction(case)
    elif request["what"] == "track":
        said = tracked(case)
    else:
        said = measured(case, request["steps"], Path(request["dump"]) if request["dump"] else None, request["case"])
    harness.result(**said)


if __name__ == "__main__":
    main()
