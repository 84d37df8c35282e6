"""The measurement for an explanation. It has several steps, and memory is measured after each step.

In:  a ``Job``: the name of a TARGET, a configuration.
Out: ``Explained``.
Runs in: a child of the command line; only this child imports torch and the user's code.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from penstock.lab.explain.job import Explained, Job
from penstock.meter import memory, pressure

if TYPE_CHECKING:
    from penstock.lab.explain.breakdown import MemoryRun

_PROBE_S = 0.3


def measure_here(job: Job, on_progress: Callable[[str, float], None]) -> Explained:
    """Measure in this process. ``on_progress`` gets the current step and the share of the work that is done; an
    exception from ``on_progress`` ends the measurement."""
    before = {"python": _rss_bytes()}
    on_progress("loading torch", 0.0)
    from torch.utils.data import default_collate

    from penstock.advice.dataset import inspect_dataset
    from penstock.cli.target import load_function
    from penstock.lab.dataset.sample_probe import probe
    from penstock.lab.explain.breakdown import LoadSettings, MemoryBench

    before["torch"] = _rss_bytes() - sum(before.values())
    on_progress(f"loading {job.target}", 0.0)
    dataset = _load(job.target, before)
    known = inspect_dataset(dataset)
    if "imports" not in before:
        # The dataset was made while its module was imported, so only the containers in the dataset are known to belong
        # to it.
        grown = _rss_bytes() - sum(before.values())
        before["dataset"] = min(max(0, grown), sum(each.bytes for each in known.containers.found))
        before["imports"] = max(0, grown - before["dataset"])
    settings = LoadSettings(**job.settings)
    collate_fn = None if job.collate is None else load_function(job.collate)
    step = _step(job, load_function) if job.has_step else None
    done = 0
    doing = ""
    began_s = time.monotonic()

    def on_batch() -> None:
        on_progress(doing, (done + min(1.0, (time.monotonic() - began_s) / job.seconds)) / job.runs)

    bench = MemoryBench(dataset=dataset, collate_fn=collate_fn, before=before, seconds=job.seconds, on_batch=on_batch)
    # The probe reports an error in a sample in one line, with the index of the sample.
    probed = probe(
        dataset, settings.batch_size, collate_fn or default_collate, seconds=_PROBE_S,
        on_progress=lambda done: on_batch(),
    )  # fmt: skip
    pressure_before = pressure()
    runs: dict[str, MemoryRun] = {}

    def run(name: str, what: str, how: Callable[..., MemoryRun], *given: Any) -> None:
        nonlocal doing, began_s, done
        doing, began_s = what, time.monotonic()
        on_batch()
        runs[name] = how(*given)
        done += 1

    run("ours", "penstock's DataLoader", bench.ours, settings)
    run("torchs", "torch's DataLoader", bench.torchs, settings)
    if job.is_whole:
        for name, other in (("other_batch", settings.other_batch()), ("other_workers", settings.other_workers())):
            words = f"{other.batch_size} × {other.workers} workers"
            run(f"ours_{name}", f"penstock, {words}", bench.ours, other)
            run(f"torchs_{name}", f"torch, {words}", bench.torchs, other)
    if step is not None:
        run("with_step", "a training loop", bench.ours, settings, step)
    pressure_after = pressure()
    held = [each for each in known.containers.found if known.length and each.items >= known.length]
    return Explained(
        length=known.length,
        dataset_type=known.type,
        containers=tuple((each.path, each.bytes, each.per_worker_bytes) for each in known.containers.found),
        dataset_scales=bool(held),
        ours=runs["ours"],
        torchs=runs["torchs"],
        ours_other_batch=runs.get("ours_other_batch"),
        ours_other_workers=runs.get("ours_other_workers"),
        torchs_other_batch=runs.get("torchs_other_batch"),
        torchs_other_workers=runs.get("torchs_other_workers"),
        with_step=runs.get("with_step"),
        cpu_fraction=sum(each.cpu_s for each in probed.samples)
        / max(1e-9, sum(each.cpu_s + each.wait_s for each in probed.samples)),
        swap_growth_bytes=pressure_after.swap_growth_bytes(pressure_before),
        kills=pressure_after.oom_kills_since(pressure_before),
    )


def _rss_bytes() -> int:
    # The RSS is used, because the PSS of libraries depends on how many other programs of this machine use them.
    return memory().rss_bytes


def _load(target: str, before: dict[str, int]) -> Any:
    """The dataset. If a function makes the dataset, the memory of the module's imports is measured before the call."""
    from penstock.cli.target import load_function, load_target

    try:
        load_function(target)
    except click.BadParameter:
        # The name is the dataset itself, or does not exist.
        return load_target(target)
    before["imports"] = max(0, _rss_bytes() - sum(before.values()))
    dataset = load_target(target)
    before["dataset"] = max(0, _rss_bytes() - sum(before.values()))
    return dataset


def _step(job: Job, load_function: Callable[[str], Any]) -> Callable[[Any], object]:
    if job.train is None:
        step_s = job.step_s or 0.0
        return lambda batch: time.sleep(step_s)
    train = load_function(job.train)
    torch = importlib.import_module("torch")

    def step(batch: Any) -> None:
        train(batch)
        if torch.cuda.is_initialized():
            # Work that the step only queued is part of the step's time.
            torch.cuda.synchronize()

    return step
