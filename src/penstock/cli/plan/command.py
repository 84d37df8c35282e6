"""`penstock plan`: settings for a dataset on this machine, before anything is trained.

In:  a TARGET to be measured or a profile's file, a budget, how long a step takes.
Out: a page or JSON, a settings file; exit status 1 when the dataset cannot be read.
Runs in: command line; imports torch once a dataset is measured.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from penstock._version import __version__
from penstock.cli.options import FiniteRange, check_size
from penstock.cli.own_settings import section_option
from penstock.cli.plan.inputs import (
    GivenProfile,
    GivenSettings,
    ask,
    find_machine,
    read_given_profile,
    read_settings,
    save_profile,
    write_text,
)
from penstock.cli.progress import measuring
from penstock.errors import ConfigError, DataError, PenstockError
from penstock.meter import Roots
from penstock.planner.plans import PlanTable, allowed_bytes, make_plans
from penstock.planner.starting_points import Machine, StartingPoint, starting_point
from penstock.planner.stated_settings import put_beside
from penstock.settings import load, write_like
from penstock.units import parse_bytes

_USUAL_BATCH = 32


def _bytes(ctx: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_bytes(value, name=parameter.name or "size")
    except ConfigError as wrong:
        raise click.BadParameter(str(wrong)) from None


_FILE = click.Path(path_type=Path)


@click.command(
    epilog="Exit status: 1 when the dataset or a file cannot be read, 2 wrong usage; 0 also when no plan fits."
)
@click.argument("target", required=False)
@click.option("--batch-size", type=click.IntRange(min=1), default=None, help="Samples in a batch.  [default: 32]")
@click.option("--memory", default=None, callback=check_size, metavar="SIZE",
              help="What one rank's loader may take, such as 8GB.  [default: auto, half of what is free]")  # fmt: skip
@click.option("--step-time", "step_s", type=FiniteRange(min=0), default=None, metavar="SECONDS",
              help="How long a training step takes; without it, plans are for loading as fast as can be.")  # fmt: skip
@click.option("--train", default=None, metavar="TARGET",
              help="Your training step, a function that takes a batch: it is timed.")  # fmt: skip
@click.option("--collate", default=None, metavar="TARGET", help="A collate function of your own.")
@click.option("--seconds", type=FiniteRange(min=0.5), default=9.0, show_default=True, help="How long to measure.")
@click.option("--profile", "profile_file", type=_FILE, default=None, metavar="FILE",
              help="Figures that --save-profile kept, instead of a TARGET: nothing runs.")  # fmt: skip
@click.option("--save-profile", type=_FILE, default=None, metavar="FILE", help="Keep what was measured, for --profile.")
@click.option("--cores", type=FiniteRange(min=0.1), default=None,
              help="Plan for a machine of so many cores instead of this one's.")  # fmt: skip
@click.option("--ram", "ram_bytes", default=None, callback=_bytes, metavar="SIZE",
              help="Plan for so much free memory instead of this machine's.")  # fmt: skip
@click.option("--gpu-memory", "gpu_bytes", default=None, callback=_bytes, metavar="SIZE",
              help="Plan for a GPU with so much memory.")  # fmt: skip
@click.option("--settings", "settings_file", default=None, metavar="FILE",
              help="Take batch size and budget from a settings file, and show its workers beside.")  # fmt: skip
@section_option
@click.option("--yaml", "out", type=_FILE, default=None, metavar="OUT",
              help="Write the settings of the recommended or chosen plan to this file.")  # fmt: skip
@click.option("--like", type=_FILE, default=None, metavar="FILE",
              help="With --yaml: write a copy of this settings file, in its layout and under its keys.")  # fmt: skip
@click.option("--ask", "asks", is_flag=True, help="Choose among the plans by answering a few questions.")
@click.option("--json", "json_wanted", is_flag=True, help="Print everything as one JSON object.")
@click.pass_obj
def command(
    roots: Roots, target: str | None, profile_file: Path | None, settings_file: str | None, section: str, **given: Any
) -> None:
    """Measure TARGET for a few seconds and print five plans: workers, batches ahead, the memory they take, the samples
    per second they give; one of them recommended for the memory that is allowed, with the reason.

    TARGET is module:attribute or file.py:attribute: a dataset, or a function that returns one. With neither TARGET nor
    --profile: starting points for this machine.
    """
    _check_usage(target, profile_file, given)
    like, out, json_wanted = given["like"], given["out"], given["json_wanted"]
    if like is not None:
        load(like)  # what is wrong with it is better said before anything is measured
    settings = GivenSettings() if settings_file is None else read_settings(settings_file, section)
    read = None if profile_file is None else read_given_profile(profile_file)
    chosen_name = ask() if given["asks"] else None
    facts, machine = find_machine(
        roots, cores=given["cores"], ram_bytes=given["ram_bytes"], gpu_bytes=given["gpu_bytes"], ranks=settings.ranks
    )
    memory = given["memory"] or ("auto" if settings.memory is None else settings.memory)
    batch_size = given["batch_size"] or settings.batch_size or _USUAL_BATCH
    if read is None:
        if target is None:
            _finish_start(
                machine, given["batch_size"] or settings.batch_size, out, like, target=None, json_wanted=json_wanted
            )
            return
        request = _Request(
            target=target, batch_size=batch_size, collate=given["collate"], train=given["train"],
            seconds=given["seconds"], step_s=given["step_s"],
        )  # fmt: skip
        try:
            read = _measure(request)
        except PenstockError as error:
            if not _lacks_data(error):
                raise
            _finish_start(
                machine, given["batch_size"] or settings.batch_size, out, like, target=target, json_wanted=json_wanted
            )
            raise
        if given["save_profile"] is not None:
            save_profile(given["save_profile"], read.profile, read.step_s)
    step_s = read.step_s if given["step_s"] is None else given["step_s"]
    table = make_plans(
        read.profile, facts, batch_size,
        budget_bytes=allowed_bytes(memory, facts.available_bytes, facts.ranks),
        # A step of no time is none: a share of it spent waiting would say nothing.
        step_s=step_s or None,
    )  # fmt: skip
    _finish(table, chosen_name, (*read.stated, *settings.stated), out, like, json_wanted=json_wanted)


def _check_usage(target: str | None, profile_file: Path | None, given: dict[str, Any]) -> None:
    if target is not None and profile_file is not None:
        raise click.UsageError("TARGET is measured, --profile is a measurement: give one of them")
    if given["step_s"] is not None and given["train"] is not None:
        raise click.UsageError("--train is timed, --step-time is a time: give one of them")
    if given["like"] is not None and given["out"] is None:
        raise click.UsageError("--like says how to write, --yaml where: give both")
    if target is None:
        needs = [
            f"--{name.replace('_', '-')}" for name in ("train", "collate", "save_profile") if given[name] is not None
        ]
        if needs:
            raise click.UsageError(f"{', '.join(needs)} needs a TARGET to be measured")
        if given["asks"] and profile_file is None:
            raise click.UsageError("--ask chooses among plans: give a TARGET or --profile")
    for name in ("save_profile", "out"):
        path = given[name]
        if path is not None and not path.absolute().parent.is_dir():
            raise click.UsageError(f"{path} cannot be written: there is no folder {path.absolute().parent}")


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What is to be measured."""

    target: str
    batch_size: int
    collate: str | None
    train: str | None
    seconds: float
    step_s: float | None


def _measure(request: _Request) -> GivenProfile:
    from penstock.cli.target import load_function, load_target, prints_aside

    with prints_aside(), measuring() as on_progress:
        from penstock.lab.dataset.containers import find_containers
        from penstock.lab.planning import time_step
        from penstock.lab.profile import profile

        on_progress(f"loading {request.target}", 0.0)
        collate_fn = None if request.collate is None else load_function(request.collate)
        step = None if request.train is None else load_function(request.train)
        dataset = load_target(request.target)
        try:
            found = profile(
                dataset, request.batch_size, collate_fn=collate_fn, name=request.target, seconds=request.seconds,
                on_progress=on_progress,
            )  # fmt: skip
            found = replace(found, containers_bytes=find_containers(dataset).per_worker_bytes)
        except Exception as error:
            raise DataError(f"{request.target}: {_one_line(error)}") from error
        step_s = request.step_s
        if step is not None:
            try:
                step_s = time_step(
                    step, dataset, request.batch_size, collate_fn=collate_fn, on_progress=on_progress
                )  # fmt: skip
            except Exception as error:
                raise DataError(f"{request.train} failed on a batch of {request.target}: {_one_line(error)}") from error
    return GivenProfile(profile=found, step_s=step_s, stated=())


def _one_line(error: Exception) -> str:
    """What went wrong; of a worker's whole traceback, its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, PenstockError):
        return " ".join(lines)
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def _lacks_data(error: PenstockError) -> bool:
    """Whether there is simply nothing to read here, rather than something wrong."""
    from penstock.lab.dataset.sample_probe import NoDataError

    return isinstance(error.__cause__, (FileNotFoundError, NoDataError))


def _finish(
    table: PlanTable, chosen_name: str | None, stated: tuple[Any, ...], out: Path | None, like: Path | None,
    *, json_wanted: bool,
) -> None:  # fmt: skip
    chosen = None if chosen_name is None else table[chosen_name]
    written = table.recommended if chosen is None else chosen
    beside = put_beside(table, stated)
    _write(written.arguments(), table.to_yaml(written), out, like)
    if json_wanted:
        answer = {
            "penstock": __version__,
            **table.as_json(),
            "chosen": chosen_name,
            "beside": [asdict(each) for each in beside],
        }
        click.echo(json.dumps(answer, indent=2))
        return
    from penstock.cli.console import make_console
    from penstock.cli.plan.view import show_plans

    console = make_console()
    show_plans(console, table, chosen, beside)
    _say_written(console, written.name, out)


def _finish_start(
    machine: Machine, batch_size: int | None, out: Path | None, like: Path | None,
    *, target: str | None, json_wanted: bool,
) -> None:  # fmt: skip
    point: StartingPoint = starting_point(machine)
    if batch_size is not None:
        point = replace(point, batch_size=batch_size)
    _write(point.arguments(), point.to_yaml(), out, like)
    if json_wanted:
        answer = {"penstock": __version__, "machine": asdict(machine), "starting_point": asdict(point)}
        click.echo(json.dumps(answer, indent=2))
        return
    from penstock.cli.console import make_console
    from penstock.cli.plan.view import show_starting_point

    console = make_console()
    show_starting_point(console, point, target)
    _say_written(console, "starting point", out)


def _write(arguments: dict[str, Any], text: str, out: Path | None, like: Path | None) -> None:
    if out is not None and like is not None:
        write_like(like, out, arguments)
    elif out is not None:
        write_text(out, text)


def _say_written(console: Any, name: str, out: Path | None) -> None:
    if out is not None:
        console.print(f"\nThe {name} settings are in {out}.", soft_wrap=True)
