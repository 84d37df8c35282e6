"""`penstock doctor`: what this machine or container allows, and what in it, or in a dataset, will hurt.

In:  ``Roots``; a TARGET.
Out: a page or JSON; exit status 1 when something will hurt.
Runs in: command line. Does not import torch unless there is a TARGET.
"""

from __future__ import annotations

import json

import click

from penstock._version import __version__
from penstock.advice.machine import find_in_machine
from penstock.advice.machine_facts import gather_facts
from penstock.findings import needs_action, worst_first
from penstock.meter import Roots


@click.command(
    epilog="Exit status: 1 when there is a finding of severity hurts or warning, 0 otherwise; "
    "info never counts. 2 is wrong usage."
)
@click.argument("target", required=False)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="How many workers will read TARGET: what they copy is told for so many.  [default: usable CPUs]",
)
@click.option("--json", "json_wanted", is_flag=True, help="Print everything known as one JSON object.")
@click.pass_obj
def command(roots: Roots, target: str | None, workers: int | None, json_wanted: bool) -> None:
    """Show what this machine or container allows (memory, swap, /dev/shm, CPUs, open files, GPUs) and what in
    it will hurt a training run, each with its fix.

    With a TARGET (module:attribute or file.py:attribute: a dataset, or a function that returns one) show also the
    large Python containers in it, which every worker copies as it reads them.
    """
    if workers is not None and target is None:
        raise click.UsageError("--workers is about the workers of a TARGET, and there is none")
    facts = gather_facts(roots)
    found = find_in_machine(facts)
    dataset = None
    if target is not None:
        from penstock.advice.dataset import find_in_dataset, inspect_dataset
        from penstock.cli.target import load_target

        dataset = inspect_dataset(load_target(target))
        found = worst_first([*find_in_dataset(dataset, facts, workers), *found])
    if json_wanted:
        answer = {
            "penstock": __version__,
            **facts.as_json(),
            **({} if dataset is None else {"dataset": dataset.as_json()}),
            "findings": [finding.as_json() for finding in found],
        }
        click.echo(json.dumps(answer, indent=2))
    else:
        from penstock.cli.console import make_console
        from penstock.cli.doctor.view import show_doctor

        show_doctor(make_console(), facts, found, dataset)
    if needs_action(found):
        raise click.exceptions.Exit(1)
