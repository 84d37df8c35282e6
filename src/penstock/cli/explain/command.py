"""`penstock explain`: host memory by component, what it grows with, whether loading is the bottleneck; with a MODEL,
GPU memory too.

In:  a TARGET and a configuration, perhaps a MODEL.
Out: a page or JSON; a picture.
Runs in: command line; the measurements run in a process of their own.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.advice.machine import gather_facts
from penstock.cli.gpu.model import load_model, memory_here, training_options
from penstock.cli.options import (
    FiniteRange,
    check_bytes,
    dataset_options,
    echo,
    filled,
    json_option,
    print_json,
    read_own_settings,
    svg_option,
    write_text,
)
from penstock.cli.progress import measuring
from penstock.errors import ConfigError
from penstock.meter import Roots
from penstock.units import parse_size

if TYPE_CHECKING:
    from penstock.cli.gpu.view import GpuMemory
    from penstock.lab.explain.explanation import Explanation

_TRUE, _FALSE = {"true", "on", "yes", "1"}, {"false", "off", "no", "0"}
_LEAST = {"batch_size": 1, "workers": 0, "depth": 1, "prefetch_factor": 1}
_CHANGEABLE = ("target", *_LEAST, "memory", "pin_memory")


def _changes(ctx: click.Context, parameter: click.Parameter, value: str | None) -> dict[str, Any] | None:
    try:
        return None if value is None else _read_changes(value)
    except ConfigError as wrong:
        raise click.BadParameter(str(wrong)) from None


@click.command(
    epilog="Exit status: 1 if TARGET or a file cannot be read, 2 for wrong usage, 0 otherwise, also with findings."
)
@dataset_options
@click.option("--workers", type=click.IntRange(min=0), help="Number of workers of each loader.  [default: usable CPUs]")
@click.option("--depth", type=click.IntRange(min=1),
              help="Batches that penstock prepares ahead, in total.  [default: penstock chooses]")  # fmt: skip
@click.option("--pin-memory", is_flag=True, help="Both loaders deliver page-locked batches.")
@click.option("--against", callback=_changes, metavar="CHANGES",
              help='Compare, by component, with another configuration, such as "workers=0", "pin_memory=true" or '
              '"target=other.py:dataset".')  # fmt: skip
@click.option("--step-time", type=FiniteRange(min=0, min_open=True), metavar="SECONDS",
              help="Simulate a training step of this length, to see whether loading delays it.")  # fmt: skip
@click.option("--train", metavar="TARGET",
              help="Run your own training step, which takes a batch, instead of a simulated step.")  # fmt: skip
@click.option("--seconds", type=FiniteRange(min=0.1), default=1.5, show_default=True,
              help="Length of each run; the loaders run several times.")  # fmt: skip
@click.option("--model", metavar="MODEL",
              help="Also estimate the GPU memory of training this model, as penstock gpu does.")  # fmt: skip
@training_options
@click.option("--gpu-memory", "gpu_bytes", callback=check_bytes, metavar="SIZE",
              help="With --model: memory of the GPU, such as 20GB.  [default: this machine's GPU]")  # fmt: skip
@svg_option("Draw memory by batch size into this file.")
@json_option
@click.pass_obj
def command(
    roots: Roots, target: str, settings_file: str | None, section: str, against: dict[str, Any] | None,
    model: str | None, batch: str | None, optimizer: str | None, precision: str | None, checkpointing: bool,
    gpu_bytes: int | None, plot: Path | None, json_wanted: bool, **given: Any,
) -> None:  # fmt: skip
    """Run TARGET for some seconds with penstock's DataLoader and torch's, and show host memory by component, what each
    component grows with, whether loading is the bottleneck, and what to change.

    TARGET is module:attribute or file.py:attribute: a dataset, or a function that returns one.
    """
    from penstock.cli.console import make_console
    from penstock.lab.explain.job import Job
    from penstock.lab.explain.process import measure

    if given["step_time"] is not None and given["train"] is not None:
        raise click.UsageError("--step-time simulates a training step and --train is a real one; give one of them")
    if model is None and any((batch, optimizer, precision, checkpointing, gpu_bytes)):
        raise click.UsageError("--batch, --optimizer, --precision, --checkpointing and --gpu-memory need --model")
    facts = gather_facts(roots)
    own, keys = read_own_settings(settings_file, section)
    settings = filled(given, own, max(1, int(facts.limits.cpu_usable))) | {
        "depth": given["depth"],
        "pin_memory": given["pin_memory"] or bool(own.get("pin_memory")),
        "cache": own.get("cache"),
    }
    job = Job(
        target=target, settings=settings, collate=given["collate"], step_s=given["step_time"], train=given["train"],
        seconds=given["seconds"],
    )  # fmt: skip
    gpu_memory = None
    if model is not None:
        # The estimate comes before the measurements, so that a mistake in the model is reported at once.
        gpu_memory = _estimate(
            model, settings["batch_size"], gpu_bytes, batch=batch, optimizer=optimizer, precision=precision,
            checkpointing=checkpointing,
        )  # fmt: skip
    jobs = [job]
    if against is not None:
        changed = {**settings, **{name: value for name, value in against.items() if name != "target"}}
        jobs.append(
            Job(
                target=against.get("target", target), settings=changed, collate=given["collate"], step_s=None,
                train=None, seconds=given["seconds"], is_whole=False,
            )
        )  # fmt: skip
    found = []
    with measuring("starting") as on_progress:
        all_runs = sum(each.runs for each in jobs)

        def on_job(what: str, done: float) -> None:
            before = sum(each.runs for each in jobs[: len(found)])
            on_progress(what, (before + done * jobs[len(found)].runs) / all_runs)

        for each in jobs:
            found.append(measure(each, on_job))
    from penstock.lab.explain.explanation import Explanation

    explanation = Explanation(
        job=job, explained=found[0], facts=facts, keys=keys,
        against=None if against is None else (jobs[1], found[1]),
    )  # fmt: skip
    if plot is not None:
        _draw(plot, explanation, gpu_memory)
    if json_wanted:
        of_gpu = {} if gpu_memory is None else {"gpu": gpu_memory.as_json()}
        print_json({"machine": facts.as_json(), **explanation.as_json(), **of_gpu})
        return
    from penstock.cli.explain.view import show_explanation

    show_explanation(make_console(), explanation, gpu_memory)
    if plot is not None:
        echo(f"Drawn: {plot}")


def _estimate(name: str, batch_size: int, memory_bytes: int | None, **training: Any) -> GpuMemory:
    """GPU memory at half the loader's batch size, at that size and at twice that size."""
    from penstock.cli.gpu.view import GpuMemory

    # Text that the user's code prints must not be part of the answer.
    with contextlib.redirect_stdout(sys.stderr):
        model = load_model(name, **training)
        from penstock import gpu

        memory_bytes = memory_bytes or memory_here()
        sizes = sorted({max(1, batch_size // 2), batch_size, 2 * batch_size})
        estimates = gpu.estimate(**model.training, batch_sizes=sizes, device_memory=memory_bytes)
    return GpuMemory(model=model, estimates=estimates, memory_bytes=memory_bytes)


def _draw(file: Path, explanation: Explanation, gpu_memory: GpuMemory | None) -> None:
    from penstock.charts.plane import stacked

    host = explanation.chart().svg()
    write_text(file, host if gpu_memory is None else stacked([host, gpu_memory.chart().svg()]))


def _read_changes(text: str) -> dict[str, Any]:
    """``"workers=0,pin_memory=false,target=other.py:dataset"`` as name -> value. Raises ConfigError."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        name = {"num_workers": "workers"}.get(name, name).replace("-", "_")
        if not equals or name not in _CHANGEABLE:
            raise ConfigError(
                f"{part.strip()!r} changes nothing; write NAME=VALUE, where NAME is one of {', '.join(_CHANGEABLE)}"
            )
        found[name] = _value(name, value)
    return found


def _value(name: str, text: str) -> Any:
    if name in _LEAST:
        if not text.isdecimal() or int(text) < _LEAST[name]:
            raise ConfigError(f"{name}={text} is not a whole number of at least {_LEAST[name]}")
        return int(text)
    if name == "pin_memory":
        if text.lower() not in _TRUE | _FALSE:
            raise ConfigError(f"{name}={text} is neither true nor false")
        return text.lower() in _TRUE
    if name == "memory":
        parse_size(text)
    return text
