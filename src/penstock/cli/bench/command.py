"""`penstock bench`: the user's dataset through torch's DataLoader and ours, side by side.

In:  a TARGET and loader arguments, a settings file.
Out: a page or JSON.
Runs in: command line; imports torch once it runs.
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
from penstock.meter import Roots

_BATCH_SIZE = 32


@click.command(epilog="Exit status: 1 when TARGET cannot be read or gives no batch, 0 otherwise. 2 is wrong usage.")
@click.argument("target")
@click.option("--batch-size", type=click.IntRange(min=1), default=None, help="Samples in a batch.  [default: 32]")
@click.option("--workers", type=click.IntRange(min=0), default=None, help="Workers of both.  [default: usable CPUs]")
@click.option("--memory", default=None, callback=check_size, metavar="SIZE",
              help="Budget of penstock's loader, such as 4GB.  [default: auto, half of what is free]")  # fmt: skip
@click.option("--device", default=None, help="Deliver on this device, such as cuda: shows the link's own speed too.")
@click.option("--shuffle", is_flag=True, help="Read in random order.")
@click.option("--collate", default=None, metavar="TARGET", help="A collate function of your own.")
@click.option("--settings", "settings_file", default=None, metavar="FILE",
              help="Take what is not given here from a settings file.")  # fmt: skip
@section_option
@click.option("--step-time", type=FiniteRange(min=0), default=0.0, metavar="SECONDS",
              help="How long a pretended training step takes.  [default: 0]")  # fmt: skip
@click.option("--seconds", type=FiniteRange(min=0.1), default=3.0, show_default=True, help="Length of a round.")
@click.option("--rounds", type=click.IntRange(min=1), default=2, show_default=True, help="Rounds of each, in turns.")
@click.option("--json", "json_wanted", is_flag=True, help="Print what was measured as one JSON object.")
@click.pass_obj
def command(
    roots: Roots, target: str, collate: str | None, settings_file: str | None, section: str, json_wanted: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Run TARGET through torch's DataLoader and penstock's, with the same arguments, in turns, and compare samples per
    second, bytes per second, time to the first batch and growth of memory.

    TARGET is module:attribute or file.py:attribute: a dataset, or a function that returns one.
    """
    from penstock.cli.bench.view import show_bench
    from penstock.cli.console import make_console
    from penstock.cli.target import load_function, load_target, prints_aside, unreadable

    facts = gather_facts(roots)
    own, _ = read_own_settings(settings_file, section)
    given = _filled(given, own, max(1, int(facts.limits.cpu_usable)))
    with prints_aside(), measuring() as on_progress:
        from penstock.lab.bench import BenchSettings, bench, check_device

        settings = BenchSettings(target=target, **given)
        check_device(settings.device)
        on_progress(f"loading {target}", 0.0)
        dataset = load_target(target)
        collate_fn = None if collate is None else load_function(collate)
        try:
            measured = bench(dataset, collate_fn, settings, on_progress=on_progress)
        except Exception as error:
            raise unreadable(target, error, has_collate=collate is not None) from error

    if json_wanted:
        answer: dict[str, Any] = {
            "penstock": __version__,
            "machine": facts.as_json(),
            "settings": asdict(settings),
            **measured.as_json(),
        }
        click.echo(json.dumps(answer, indent=2))
    else:
        show_bench(make_console(), settings, measured)


def _filled(given: dict[str, Any], own: dict[str, Any], cores: int) -> dict[str, Any]:
    """What is given counts, then the file, then what is usual."""
    workers = own.get("num_workers") if given["workers"] is None else given["workers"]
    return {
        **given,
        "batch_size": given["batch_size"] or own.get("batch_size") or _BATCH_SIZE,
        "workers": workers if isinstance(workers, int) else cores,
        "memory": given["memory"] or own.get("memory", "auto"),
        "prefetch_factor": own.get("prefetch_factor"),
        "shuffle": given["shuffle"] or bool(own.get("shuffle")),
    }
