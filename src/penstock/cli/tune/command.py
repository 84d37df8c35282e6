"""`penstock tune`: the best workers and depth for a dataset, measured on one running loader.

In:  a TARGET, a batch size, a memory limit.
Out: a page or JSON; a record of the result; earlier records side by side.
Runs in: command line; imports torch when it measures.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from penstock._version import __version__
from penstock.advice.machine import gather_facts
from penstock.cli.options import FiniteRange, dataset_options, echo, filled, json_option, read_own_settings
from penstock.cli.progress import measuring
from penstock.cli.tune.view import show_records, show_tuned
from penstock.errors import PenstockError
from penstock.meter import Roots

if TYPE_CHECKING:
    from penstock.lab.tune import Tuned, TuneSettings


@click.command(
    epilog="Exit status: 1 if nothing could be tried within the memory limit, 2 for wrong usage, 0 otherwise."
)
@dataset_options
@click.option("--step-time", type=FiniteRange(min=0), default=0.0, metavar="SECONDS",
              help="Length of a simulated training step.  [default: 0]")  # fmt: skip
@click.option("--most-workers", type=click.IntRange(min=1),
              help="Never try more workers than this.  [default: chosen from cores and samples]")  # fmt: skip
@click.option("--seconds", type=FiniteRange(min=2), default=60.0, show_default=True,
              help="About how long all measurements may take together.")  # fmt: skip
@click.option("--compare", is_flag=True, help="Do not measure; list earlier records of TARGET side by side.")
@json_option
@click.pass_obj
def command(
    roots: Roots, target: str, collate: str | None, settings_file: str | None, section: str, compare: bool,
    json_wanted: bool, **given: Any,
) -> None:  # fmt: skip
    """Measure instead of predicting: run TARGET on one loader and change its workers and batches ahead while it runs.
    The search starts with few workers and goes on while speed rises, always within the memory limit; a number of
    workers from a settings file is measured too. The command prints every measurement, the winner and what the planner
    had predicted, and saves a record.

    TARGET is module:attribute or file.py:attribute: a dataset, or a function that returns one.
    """
    from penstock.cli.console import make_console
    from penstock.lab.tune_records import earlier, keep

    if compare:
        _compare(target, earlier(target), json_wanted)
        return
    facts = gather_facts(roots)
    own, _ = read_own_settings(settings_file, section)
    tuned, settings = _tune(target, collate, own, given)
    answer = {
        "penstock": __version__,
        "machine": facts.as_json(),
        "settings": asdict(settings),
        **tuned.as_json(),
    }
    record, not_kept = None, None
    try:
        record = None if tuned.winner is None else keep(target, answer)
    except PenstockError as problem:
        # The result of a minute's measuring is printed even if it cannot be saved.
        not_kept = problem
    if json_wanted:
        echo(json.dumps({**answer, "record": None if record is None else str(record)}, indent=2))
    else:
        show_tuned(make_console(), settings, tuned)
        if record is not None:
            echo(f"The record is {record}. To list all records, run penstock tune {target} --compare")
    if not_kept is not None:
        raise not_kept
    if tuned.winner is None:
        raise click.exceptions.Exit(1)


def _tune(
    target: str, collate: str | None, own: dict[str, Any], given: dict[str, Any]
) -> tuple[Tuned, TuneSettings]:  # fmt: skip
    from penstock.cli.target import load_function, load_target, prints_to_stderr, unreadable

    with prints_to_stderr(), measuring() as on_progress:
        from penstock.lab.tune import TuneSettings, tune

        workers, chosen = own.get("num_workers"), filled(given, own, 0)
        settings = TuneSettings(
            target=target,
            batch_size=chosen["batch_size"],
            memory=chosen["memory"],
            step_time=given["step_time"],
            seconds=given["seconds"],
            most_workers=given["most_workers"],
            now=(workers, own.get("prefetch_factor")) if isinstance(workers, int) else None,
        )
        on_progress(f"loading {target}", 0.0)
        dataset = load_target(target)
        collate_fn = None if collate is None else load_function(collate)
        try:
            return tune(dataset, collate_fn, settings, on_progress=on_progress), settings
        except Exception as error:
            raise unreadable(target, error, has_collate=collate is not None) from error


def _compare(target: str, records: list[dict[str, Any]], json_wanted: bool) -> None:
    from penstock.cli.console import make_console

    if json_wanted:
        echo(json.dumps(records, indent=2))
    elif records:
        show_records(make_console(), target, records)
    else:
        from penstock.environment import state_folder

        raise PenstockError(
            f"there are no records of {target} in {state_folder() / 'tune'}; run penstock tune {target}"
        )
