"""`penstock doctor`: what this machine or container allows, and what will hurt, there or in a dataset.

In:  ``Roots``; a TARGET.
Out: a page or JSON; exit status 1 if something will hurt.
Runs in: command line. Imports torch only with a TARGET.
"""

from __future__ import annotations

import click

from penstock.advice.machine import find_in_machine, gather_facts
from penstock.cli.console import make_console
from penstock.cli.doctor.view import show_doctor
from penstock.cli.options import json_option, print_json
from penstock.findings import needs_action, worst_first
from penstock.meter import Roots


@click.command(
    epilog="Exit status: 1 if a finding has the severity 'hurts' or 'warning', 2 for wrong usage; otherwise 0, also if "
    "there are findings of severity 'info'."
)
@click.argument("target", required=False)
@click.option("--workers", type=click.IntRange(min=1),
              help="Number of workers that will read TARGET, from which the size of all copies is computed.  "
              "[default: usable CPUs]")  # fmt: skip
@json_option
@click.pass_obj
def command(roots: Roots, target: str | None, workers: int | None, json_wanted: bool) -> None:
    """Show what this machine or container allows (memory, swap, /dev/shm, CPUs, open files, GPUs) and what will hurt a
    training run there, with a fix for each finding.

    With a TARGET (module:attribute or file.py:attribute: a dataset, or a function that returns one) also show the large
    Python containers in the dataset. Every worker copies the parts of these containers that it reads.
    """
    if workers is not None and target is None:
        raise click.UsageError("--workers is the number of workers that read TARGET; give a TARGET too")
    facts = gather_facts(roots)
    found = find_in_machine(facts)
    dataset = None
    if target is not None:
        from penstock.advice.dataset import find_in_dataset, inspect_dataset
        from penstock.cli.target import load_target

        dataset = inspect_dataset(load_target(target))
        found = worst_first([*find_in_dataset(dataset, facts, workers), *found])
    if json_wanted:
        of_dataset = {} if dataset is None else {"dataset": dataset.as_json()}
        print_json({**facts.as_json(), **of_dataset, "findings": [finding.as_json() for finding in found]})
    else:
        show_doctor(make_console(), facts, found, dataset)
    if needs_action(found):
        raise click.exceptions.Exit(1)
