"""`penstock explain`: host memory by component, what it grows with, whether loading is the bottleneck; with a MODEL,
GPU memory beside it.

In:  a TARGET and a configuration, perhaps a MODEL.
Out: a page or JSON; a picture.
Runs in: command line; what is measured runs in a process of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock._version import __version__
from penstock.advice.machine_facts import gather_facts
from penstock.cli.explain.configuration import read_configuration
from penstock.cli.gpu.model import training_options
from penstock.cli.options import FiniteRange, check_bytes, check_folder, check_size, svg_option, write_svg
from penstock.cli.own_settings import read_own_settings, section_option
from penstock.cli.progress import measuring
from penstock.errors import ConfigError
from penstock.lab.explain.gpu import estimate_beside
from penstock.meter import Roots

if TYPE_CHECKING:
    from penstock.lab.explain.explanation import Explanation
    from penstock.lab.explain.gpu import GpuSide

_BATCH_SIZE = 32


def _changes(ctx: click.Context, parameter: click.Parameter, value: str | None) -> dict[str, Any] | None:
    try:
        return None if value is None else read_configuration(value)
    except ConfigError as wrong:
        raise click.BadParameter(str(wrong)) from None


@click.command(
    epilog="Exit status: 1 when TARGET or a file cannot be read, 0 otherwise, whatever is found. 2 is wrong usage."
)
@click.argument("target")
@click.option("--batch-size", type=click.IntRange(min=1), help="Samples in a batch.  [default: 32]")
@click.option("--workers", type=click.IntRange(min=0), help="Workers of both loaders.  [default: usable CPUs]")
@click.option("--depth", type=click.IntRange(min=1), help="Batches penstock keeps ahead, in all.  [default: its own]")
@click.option("--memory", callback=check_size, metavar="SIZE",
              help="Budget of penstock's loader, such as 4GB.  [default: auto, half of what is free]")  # fmt: skip
@click.option("--pin-memory", is_flag=True, help="Ask both loaders for page-locked batches.")
@click.option("--collate", metavar="TARGET", help="A collate function of your own.")
@click.option("--settings", "settings_file", metavar="FILE", help="Take what is not given here from a settings file.")
@section_option
@click.option("--against", callback=_changes, metavar="CHANGES",
              help='Another configuration, such as "workers=0", "pin_memory=true" or "target=other.py:dataset": shows '
              "the difference by component.")  # fmt: skip
@click.option("--step-time", type=FiniteRange(min=0, min_open=True), metavar="SECONDS",
              help="Pretend a training step of this length: tells whether loading holds it up.")  # fmt: skip
@click.option("--train", metavar="TARGET", help="The same with your own training step, a function that takes a batch.")
@click.option("--seconds", type=FiniteRange(min=0.1), default=1.5, show_default=True,
              help="How long one run lasts; there are several.")  # fmt: skip
@click.option("--model", metavar="MODEL",
              help="Also estimate the GPU memory of training this model, as penstock gpu does.")  # fmt: skip
@training_options
@click.option("--gpu-memory", "gpu_bytes", callback=check_bytes, metavar="SIZE",
              help="With --model: what the card has, such as 20GB.  [default: the GPU's here]")  # fmt: skip
@svg_option("Draw memory by batch size into this file.")
@click.option("--json", "json_wanted", is_flag=True, help="Print what was measured as one JSON object.")
@click.pass_obj
def command(
    roots: Roots, target: str, settings_file: str | None, section: str, against: dict[str, Any] | None,
    model: str | None, batch: str | None, optimizer: str | None, precision: str | None, checkpointing: bool,
    gpu_bytes: int | None, plot: Path | None, json_wanted: bool, **given: Any,
) -> None:  # fmt: skip
    """Run TARGET for some seconds with penstock's DataLoader and torch's, and show where host memory goes, by
    component, what each component grows with, whether loading is the bottleneck, and what to change.

    TARGET is module:attribute or file.py:attribute: a dataset, or a function that returns one.
    """
    from penstock.cli.console import make_console
    from penstock.lab.explain.job import Job
    from penstock.lab.explain.process import measure

    if given["step_time"] is not None and given["train"] is not None:
        raise click.UsageError("--step-time pretends a step and --train is one: give one of them")
    if model is None and any((batch, optimizer, precision, checkpointing, gpu_bytes)):
        raise click.UsageError("--batch, --optimizer, --precision, --checkpointing and --gpu-memory go with --model")
    check_folder(plot)
    facts = gather_facts(roots)
    own, keys = read_own_settings(settings_file, section)
    settings = _settings(given, own, max(1, int(facts.limits.cpu_usable)))
    job = Job(
        target=target, settings=settings, collate=given["collate"], step_s=given["step_time"], train=given["train"],
        seconds=given["seconds"],
    )  # fmt: skip
    gpu_side = None
    if model is not None:
        # What is wrong with it is better said before half a minute of measuring.
        gpu_side = estimate_beside(
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
        _draw(plot, explanation, gpu_side)
    if json_wanted:
        answer = {"penstock": __version__, "machine": facts.as_json(), **explanation.as_json()}
        if gpu_side is not None:
            answer["gpu"] = gpu_side.as_json()
        click.echo(json.dumps(answer, indent=2))
        return
    from penstock.cli.explain.view import show_explanation

    show_explanation(make_console(), explanation, gpu_side)
    if plot is not None:
        click.echo(f"Drawn: {plot}")


def _settings(given: dict[str, Any], own: dict[str, Any], cores: int) -> dict[str, Any]:
    """What is given counts, then the file, then what is usual."""

    def first(option: str, argument: str, usual: Any) -> Any:
        return next((value for value in (given.get(option), own.get(argument)) if value is not None), usual)

    workers = first("workers", "num_workers", cores)
    return {
        "batch_size": first("batch_size", "batch_size", _BATCH_SIZE),
        "workers": workers if isinstance(workers, int) else cores,
        "depth": given["depth"],
        "prefetch_factor": own.get("prefetch_factor"),
        "memory": first("memory", "memory", "auto"),
        "pin_memory": given["pin_memory"] or bool(own.get("pin_memory")),
        "cache": own.get("cache"),
    }


def _draw(file: Path, explanation: Explanation, gpu_side: GpuSide | None) -> None:
    from penstock.charts.plane import stacked

    host = explanation.chart().svg()
    write_svg(file, host if gpu_side is None else stacked([host, gpu_side.svg()]))
