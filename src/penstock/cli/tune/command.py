"""`penstock tune`: the best workers and depth for a dataset, measured on one live loader.

In:  a TARGET, a batch size, a budget.
Out: a page or JSON; a record of it; earlier records side by side.
Runs in: command line; imports torch once it measures.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from penstock._version import __version__
from penstock.advice.machine_facts import gather_facts
from penstock.cli.options import FiniteRange, check_size
from penstock.cli.own_settings import read_own_settings, section_option
from penstock.cli.progress import measuring
from penstock.errors import PenstockError
from penstock.meter import Roots

_BATCH_SIZE = 32


@click.command(epilog="Exit status: 1 when nothing could be tried within the budget, 0 otherwise. 2 is wrong usage.")
@click.argument("target")
@click.option("--batch-size", type=click.IntRange(min=1), help="Samples in a batch.  [default: 32]")
@click.option("--memory", callback=check_size, metavar="SIZE",
              help="Budget of the loader, such as 4GB.  [default: auto, half of what is free]")  # fmt: skip
@click.option("--step-time", type=FiniteRange(min=0), default=0.0, metavar="SECONDS",
              help="How long a pretended training step takes.  [default: 0]")  # fmt: skip
@click.option("--most-workers", type=click.IntRange(min=1),
              help="Never try more workers than this.  [default: by cores and samples]")  # fmt: skip
@click.option("--collate", metavar="TARGET", help="A collate function of your own.")
@click.option("--settings", "settings_file", metavar="FILE",
              help="Take what is not given here from a settings file, and measure its workers too.")  # fmt: skip
@section_option
@click.option("--seconds", type=FiniteRange(min=2), default=60.0, show_default=True,
              help="How long all of it may take, about.")  # fmt: skip
@click.option("--compare", is_flag=True, help="Measure nothing: list earlier records of TARGET side by side.")
@click.option("--json", "json_wanted", is_flag=True, help="Print what was measured as one JSON object.")
@click.pass_obj
def command(
    roots: Roots, target: str, collate: str | None, settings_file: str | None, section: str, compare: bool,
    json_wanted: bool, **given: Any,
) -> None:  # fmt: skip
    """Measure instead of predicting: run TARGET on one live loader, change its workers and depth while it runs, start
    from the safe side and climb as long as it gains, never over the budget. Shows what was tried, the winner and what
    the model had said, and keeps a record.

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
        # A minute of measuring is worth showing all the same.
        not_kept = problem
    if json_wanted:
        click.echo(json.dumps({**answer, "record": None if record is None else str(record)}, indent=2))
    else:
        from penstock.cli.tune.view import show_tuned

        show_tuned(make_console(), settings, tuned)
        if record is not None:
            click.echo(f"Kept in {record}; penstock tune {target} --compare lists all.")
    if not_kept is not None:
        raise not_kept
    if tuned.winner is None:
        raise click.exceptions.Exit(1)


def _tune(target: str, collate: str | None, own: dict[str, Any], given: dict[str, Any]) -> tuple[Any, Any]:
    from penstock.cli.target import load_function, load_target, prints_aside, unreadable

    with prints_aside(), measuring() as on_progress:
        from penstock.lab.tune import TuneSettings, tune

        workers = own.get("num_workers")
        settings = TuneSettings(
            target=target,
            batch_size=given["batch_size"] or own.get("batch_size") or _BATCH_SIZE,
            memory=given["memory"] or own.get("memory", "auto"),
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
    if json_wanted:
        click.echo(json.dumps(records, indent=2))
        return
    if not records:
        from penstock.environment import state_folder

        raise PenstockError(
            f"there are no records of {target} in {state_folder() / 'tune'}; run penstock tune {target}"
        )
    from penstock.cli.console import make_console
    from penstock.cli.tune.view import show_records

    show_records(make_console(), target, records)
