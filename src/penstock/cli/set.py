"""`penstock set`: change workers, depth and memory of a running loader from another terminal.

In:  a run, ``workers=8 depth=3 memory=6GB``, the name of a loader.
Out: the settings after the change, or the reason for the refusal.
Runs in: command line. Does not import torch.
"""

from __future__ import annotations

import json
from typing import Any

import click

from penstock.cli.options import echo, json_option
from penstock.errors import ConfigError, PenstockError
from penstock.formatting import one_line
from penstock.units import format_bytes, parse_size

_COUNTS = ("workers", "depth")
_MOST_DIGITS = 18
_NAMES = {"num_workers": "workers"}


@click.command(no_args_is_help=True)
@click.argument("run")
@click.argument("values", nargs=-1, required=True, metavar="NAME=VALUE...")
@json_option
def command(run: str, values: tuple[str, ...], json_wanted: bool) -> None:
    """Change RUN (an id or its beginning, a name, or "last") while it trains.

    NAME is workers, depth (batches ahead in total) or memory; loader=NAME chooses the loader if the run has several.

    \b
    penstock set last workers=8
    penstock set 261116 workers=8 depth=3 memory=6GB loader=train
    """
    from penstock.environment import state_folder
    from penstock.monitor.runs.reader import ask, open_run

    message = {"do": "set", "who": "terminal", **_read(values)}
    with open_run(state_folder(), run) as found:
        outcome = found.outcome
        if outcome is not None:
            raise PenstockError(f"{found.id} has ended ({outcome.state}): nothing is left to set")
        answer = ask(found, message)
    if not answer.get("ok"):
        raise PenstockError(str(answer.get("why", "the training refused without a reason")))
    now: dict[str, Any] = answer.get("now", {})
    if json_wanted:
        echo(json.dumps({"run": found.id, **now}, indent=2))
        return
    remark = f" ({now['remark']})" if now.get("remark") else ""
    echo(
        f"{found.id}, {one_line(str(now.get('loader')))}: workers {now.get('workers')}, depth {now.get('depth')}, "
        f"memory {format_bytes(now.get('memory_bytes') or 0)}{remark}"
    )


def _read(values: tuple[str, ...]) -> dict[str, Any]:
    wanted: dict[str, Any] = {}
    for each in values:
        name, equals, value = each.partition("=")
        name = _NAMES.get(name.strip(), name.strip())
        if not equals or name not in (*_COUNTS, "memory", "loader"):
            raise click.UsageError(f"{each!r} is not a setting; write workers=8, depth=3, memory=6GB or loader=NAME")
        if name in wanted:
            raise click.UsageError(f"{name} is given twice")
        # Python converts no more than 4,300 digits.
        if name in _COUNTS and not (value.strip().isdecimal() and len(value) <= _MOST_DIGITS):
            raise click.UsageError(f"{one_line(value)!r} is not a number of {name}; write {name}=8")
        try:
            if name == "memory":
                parse_size(value)
        except ConfigError as wrong:
            raise click.UsageError(str(wrong)) from None
        wanted[name] = int(value) if name in _COUNTS else value
    if set(wanted) <= {"loader"}:
        raise click.UsageError("there is nothing to set; write workers=8, depth=3 or memory=6GB")
    return wanted
