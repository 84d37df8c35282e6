"""`penstock plan`: settings for a dataset on this machine, before anything is trained.

In:  a TARGET to be measured or a file with a profile, a memory limit, the length of a training step.
Out: a page or JSON, a settings file; exit status 1 if the dataset cannot be read.
Runs in: command line; imports torch when it measures a dataset.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from penstock.cli.options import (
    FiniteRange,
    check_bytes,
    check_folder,
    check_size,
    json_option,
    print_json,
    section_option,
    write_text,
)
from penstock.cli.plan.inputs import (
    GivenProfile,
    GivenSettings,
    ask,
    find_machine,
    read_given_profile,
    read_settings,
    save_profile,
)
from penstock.cli.progress import measuring
from penstock.errors import DataError, PenstockError
from penstock.loader.rules import LoaderRules
from penstock.meter import Roots
from penstock.planner.plans import PlanTable, allowed_bytes, make_plans
from penstock.planner.starting_points import StartingMachine, StartingPoint, starting_point
from penstock.planner.stated_settings import put_beside
from penstock.settings import load, write_like

_USUAL_BATCH = 32


_FILE = click.Path(path_type=Path)


@click.command(
    epilog="Exit status: 1 if the dataset or a file cannot be read, 2 for wrong usage, 0 otherwise, also if no plan "
    "fits."
)
@click.argument("target", required=False)
@click.option("--batch-size", type=click.IntRange(min=1), help=f"Samples in a batch.  [default: {_USUAL_BATCH}]")
@click.option("--memory", callback=check_size, metavar="SIZE",
              help="Memory limit for each rank, such as 8GB.  [default: auto, half of the free memory]")  # fmt: skip
@click.option("--step-time", "step_s", type=FiniteRange(min=0), metavar="SECONDS",
              help="Length of a training step; without it, plans aim at loading as fast as possible.")  # fmt: skip
@click.option(
    "--train", metavar="TARGET", help="Measure the time of your training step, a function that takes a batch."
)
@click.option("--collate", metavar="TARGET", help="Your own collate function.")
@click.option("--seconds", type=FiniteRange(min=0.5), default=9.0, show_default=True, help="Length of the measurement.")
@click.option("--profile", "profile_file", type=_FILE, metavar="FILE",
              help="Use measurements stored by --save-profile instead of a TARGET; nothing is measured.")  # fmt: skip
@click.option("--save-profile", type=_FILE, callback=check_folder, metavar="FILE",
              help="Store the measurements in this file, for a later --profile.")  # fmt: skip
@click.option("--cores", type=FiniteRange(min=0.1), help="Plan for a machine with this many cores.")
@click.option("--ram", "ram_bytes", callback=check_bytes, metavar="SIZE",
              help="Plan for a machine with this much free memory.")  # fmt: skip
@click.option("--gpu-memory", "gpu_bytes", callback=check_bytes, metavar="SIZE",
              help="Plan for a GPU with this much memory.")  # fmt: skip
@click.option("--settings", "settings_file", metavar="FILE",
              help="Take batch size and memory limit from a settings file, and compare the file's "
              "workers with the plans.")  # fmt: skip
@section_option
@click.option("--yaml", "out", type=_FILE, callback=check_folder, metavar="OUT",
              help="Write the settings of the recommended or chosen plan to this file.")  # fmt: skip
@click.option("--like", type=_FILE, metavar="FILE",
              help="With --yaml: write a copy of this settings file, with the plan's values under the keys that the "
              "file uses.")  # fmt: skip
@click.option("--ask", "asks", is_flag=True, help="Choose among the plans by answering a few questions.")
@json_option
@click.pass_obj
def command(
    roots: Roots, target: str | None, profile_file: Path | None, settings_file: str | None, section: str, **given: Any
) -> None:
    """Measure TARGET for a few seconds and print five plans: workers, batches ahead, memory, and samples per second.
    One plan is recommended for the memory limit, with the reason.

    TARGET is module:attribute or file.py:attribute: a dataset, or a function that returns one. Without TARGET and
    --profile, print starting points for this machine.
    """
    _check_usage(target, profile_file, given)
    like, out, json_wanted = given["like"], given["out"], given["json_wanted"]
    if like is not None:
        load(like)  # a mistake in the file must be reported before anything is measured
    settings = GivenSettings() if settings_file is None else read_settings(settings_file, section)
    read = None if profile_file is None else read_given_profile(profile_file)
    chosen_name = ask() if given["asks"] else None
    facts, machine = find_machine(
        roots, cores=given["cores"], ram_bytes=given["ram_bytes"], gpu_bytes=given["gpu_bytes"], ranks=settings.ranks
    )
    memory = given["memory"] or ("auto" if settings.memory is None else settings.memory)
    batch_size = given["batch_size"] or settings.batch_size or _USUAL_BATCH
    point = starting_point(machine)
    if given["batch_size"] or settings.batch_size:
        point = replace(point, batch_size=batch_size)
    if read is None and target is None:
        _finish_start(machine, point, out, like, target=None, json_wanted=json_wanted)
        return
    if read is None:
        assert target is not None
        try:
            read = _measure(
                target, batch_size, collate=given["collate"], train=given["train"], seconds=given["seconds"],
                step_s=given["step_s"],
            )  # fmt: skip
        except PenstockError as error:
            if not _lacks_data(error):
                raise
            _finish_start(machine, point, out, like, target=target, json_wanted=json_wanted)
            raise
        if given["save_profile"] is not None:
            save_profile(given["save_profile"], read.profile, read.step_s)
    step_s = read.step_s if given["step_s"] is None else given["step_s"]
    rules = LoaderRules()
    table = make_plans(
        read.profile, facts, batch_size,
        rules=rules, budget_bytes=allowed_bytes(memory, facts.available_bytes, facts.ranks, rules),
        # Without the length of a step, plans cannot give the share of the time that is spent waiting.
        step_s=step_s or None,
    )  # fmt: skip
    _finish(table, chosen_name, (*read.stated, *settings.stated), out, like, json_wanted=json_wanted)


def _check_usage(target: str | None, profile_file: Path | None, given: dict[str, Any]) -> None:
    if target is not None and profile_file is not None:
        raise click.UsageError("TARGET is measured anew, --profile is an earlier measurement; give one of them")
    if given["step_s"] is not None and given["train"] is not None:
        raise click.UsageError("--train measures the length of a step, --step-time sets it; give one of them")
    if given["like"] is not None and given["out"] is None:
        raise click.UsageError("--like sets the layout and --yaml sets the file to write; give both")
    if target is None:
        needs = [
            f"--{name.replace('_', '-')}" for name in ("train", "collate", "save_profile") if given[name] is not None
        ]
        if needs:
            raise click.UsageError(f"{', '.join(needs)} needs a TARGET to be measured")
        if given["asks"] and profile_file is None:
            raise click.UsageError("--ask chooses among plans; give a TARGET or --profile")


def _measure(
    target: str, batch_size: int, *, collate: str | None, train: str | None, seconds: float, step_s: float | None
) -> GivenProfile:
    from penstock.cli.target import load_function, load_target, prints_to_stderr

    with prints_to_stderr(), measuring() as on_progress:
        from penstock.lab.dataset.containers import find_containers
        from penstock.lab.planning import time_step
        from penstock.lab.profile import profile

        on_progress(f"loading {target}", 0.0)
        collate_fn = None if collate is None else load_function(collate)
        step = None if train is None else load_function(train)
        dataset = load_target(target)
        try:
            found = profile(
                dataset, batch_size, collate_fn=collate_fn, name=target, seconds=seconds, on_progress=on_progress
            )
            found = replace(found, containers_bytes=find_containers(dataset).per_worker_bytes)
        except Exception as error:
            raise DataError(f"{target}: {_one_line(error)}") from error
        if step is not None:
            try:
                step_s = time_step(step, dataset, batch_size, collate_fn=collate_fn, on_progress=on_progress)
            except Exception as error:
                raise DataError(f"{train} failed on a batch of {target}: {_one_line(error)}") from error
    return GivenProfile(profile=found, step_s=step_s, stated=())


def _one_line(error: Exception) -> str:
    """The error's text; only the last line if the text is a traceback from a worker."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, PenstockError):
        return " ".join(lines)
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def _lacks_data(error: PenstockError) -> bool:
    """Whether the dataset failed only because its data is not on this machine."""
    from penstock.lab.dataset.sample_probe import NoDataError

    return isinstance(error.__cause__, (FileNotFoundError, NoDataError))


def _finish(
    table: PlanTable, chosen_name: str | None, stated: tuple[Any, ...], out: Path | None, like: Path | None,
    *, json_wanted: bool,
) -> None:  # fmt: skip
    chosen = None if chosen_name is None else table[chosen_name]
    written = table.recommended if chosen is None else chosen
    beside = put_beside(table, stated, LoaderRules())
    _write(written.arguments(), table.to_yaml(written), out, like)
    if json_wanted:
        print_json({**table.as_json(), "chosen": chosen_name, "beside": [asdict(each) for each in beside]})
        return
    from penstock.cli.console import make_console
    from penstock.cli.plan.view import show_plans

    console = make_console()
    show_plans(console, table, chosen, beside)
    _say_written(console, written.name, out)


def _finish_start(
    machine: StartingMachine, point: StartingPoint, out: Path | None, like: Path | None,
    *, target: str | None, json_wanted: bool,
) -> None:  # fmt: skip
    _write(point.arguments(), point.to_yaml(), out, like)
    if json_wanted:
        print_json({"machine": asdict(machine), "starting_point": asdict(point)})
        return
    from penstock.cli.console import make_console
    from penstock.cli.plan.view import show_starting_point

    console = make_console()
    show_starting_point(console, point, target)
    _say_written(console, "starting point", out)


def _write(arguments: dict[str, Any], text: str, out: Path | None, like: Path | None) -> None:
    if out is not None and like is not None:
        # Without a GPU here, nothing is known of the one that the training may have: the file keeps its own value.
        known = {name: value for name, value in arguments.items() if name != "pin_memory" or value}
        write_like(like, out, known)
    elif out is not None:
        write_text(out, text)


def _say_written(console: Any, name: str, out: Path | None) -> None:
    if out is not None:
        console.print(f"\nThe {name} settings are in {out}.", soft_wrap=True)
