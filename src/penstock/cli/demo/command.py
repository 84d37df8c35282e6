"""`penstock demo`: this machine in short, then torch's DataLoader and ours on a built-in dataset.

In:  ``Roots`` for the machine; nothing else.
Out: a page or JSON.
Runs in: command line; imports torch once it runs.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from penstock._version import __version__
from penstock.advice.machine import find_in_machine
from penstock.advice.machine_facts import gather_facts
from penstock.cli.progress import measuring
from penstock.meter import Roots


@click.command()
@click.option("--json", "json_wanted", is_flag=True, help="Print what was measured as one JSON object.")
@click.pass_obj
def command(roots: Roots, json_wanted: bool) -> None:
    """Run torch's DataLoader and penstock's side by side for about 20 seconds, on a built-in dataset of big
    samples that each take a while to arrive, with the same arguments and a memory budget for penstock's.
    """
    from penstock.cli.console import make_console
    from penstock.cli.demo.view import show_comparison, show_machine

    facts = gather_facts(roots)
    found = find_in_machine(facts)
    page = make_console()
    if not json_wanted:
        show_machine(page, facts, found)

    with measuring() as on_progress:
        from penstock.lab.demo import DemoSettings, compare

        def on_turn(name: str, done: float) -> None:
            on_progress(f"{name}'s DataLoader", done)

        on_turn("torch", 0.0)
        settings = DemoSettings()
        comparison = compare(settings, on_progress=on_turn)

    if json_wanted:
        answer: dict[str, Any] = {
            "penstock": __version__,
            "machine": facts.as_json(),
            "settings": asdict(settings),
            **comparison.as_json(),
        }
        click.echo(json.dumps(answer, indent=2))
    else:
        show_comparison(page, settings, comparison)
