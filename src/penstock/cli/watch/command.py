"""`penstock watch`: an alert when memory or swap goes over a line, with no change to the training.

In:  a threshold; a machine, a process, a pattern or a run.
Out: a line per alert, commands, webhooks; a status line on a terminal.
Runs in: command line. Does not import torch.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.options import check_size
from penstock.cli.signals import sigterm_as_exit
from penstock.errors import ConfigError
from penstock.meter import Roots

if TYPE_CHECKING:
    from penstock.cli.watch.subjects import Subject
    from penstock.monitor.alerts.rules import Action, AlertRule

_SECONDS = click.FloatRange(0.1, 86400)
_CALM_LOOKS = 2
"""So many looks well below the line, and an alert is over."""


@click.command(
    epilog="Exit status: 0 when what is watched has ended; 1 when --once found it over the line, or there is nothing "
    "to watch; 2 wrong usage; 130 after Ctrl-C."
)
@click.argument("run", required=False)
@click.option("--above", metavar="SIZE", callback=check_size, help="Alert at so much memory: 40GB, 85% of the limit.")
@click.option("--swap-growth", metavar="SIZE", help="Alert when swap in use grows by so much within 10 minutes: 1GB.")
@click.option("--every", type=_SECONDS, metavar="SECONDS", default=5.0, show_default=True, help="Time between looks.")
@click.option("--for", "for_s", type=_SECONDS, metavar="SECONDS", help="Alert only when it has been over for so long.")
@click.option("--pid", type=click.IntRange(1), metavar="N", help="Watch a process and its descendants.")
@click.option("--match", metavar="REGEX", help="Watch all processes whose command line matches, with descendants.")
@click.option(
    "--run",
    "commands",
    metavar="CMD",
    multiple=True,
    help="Run this in a shell at each alert; the facts are in PENSTOCK_ALERT_TEXT, PENSTOCK_ALERT_VALUE (bytes), "
    "PENSTOCK_ALERT_THRESHOLD, PENSTOCK_PID and PENSTOCK_RUN.",
)
@click.option("--webhook", "urls", metavar="URL", multiple=True, help="Send each alert, and its end, there as JSON.")
@click.option("--once", is_flag=True, help="Look once and leave (with --swap-growth twice, --every seconds apart).")
@click.option("--json", "json_wanted", is_flag=True, help="Print one JSON object per alert; with --once, per look.")
@click.pass_obj
def command(
    roots: Roots, run: str | None, above: str | None, swap_growth: str | None, every: float, for_s: float | None,
    pid: int | None, match: str | None, commands: tuple[str, ...], urls: tuple[str, ...], once: bool, json_wanted: bool,
) -> None:  # fmt: skip
    """Watch memory and alert once each time it goes over a line: of this machine or container, or of one training: RUN
    (an id, the beginning of one, a name, or "last"), --pid or --match.

    \b
    penstock watch --above 40GB --every 5
    penstock watch --above 85% --run 'notify-send "$PENSTOCK_ALERT_TEXT"'
    penstock watch --match train.py --above 30GB --swap-growth 1GB
    """
    if sum(each is not None for each in (run, pid, match)) > 1:
        raise click.UsageError("RUN, --pid and --match are three ways to say what to watch; give one")
    if above is None and swap_growth is None:
        raise click.UsageError("give a line to watch: --above 40GB, or --swap-growth 1GB")
    is_tree = any(each is not None for each in (run, pid, match))
    rules = _rules(above, swap_growth, every=every, for_s=for_s or 0.0, is_tree=is_tree, commands=commands, urls=urls)
    from penstock.cli.watch.loop import look_once, watch_on
    from penstock.cli.watch.view import Report

    subject = _subject(run, pid, match, roots)
    # Commands that are under way are ended with the watch, however it is ended.
    with sigterm_as_exit():
        report = Report(subject, json_wanted=json_wanted)
        try:
            if once:
                if look_once(subject, rules, report, every_s=every, twice=swap_growth is not None):
                    raise click.exceptions.Exit(1)
            else:
                watch_on(subject, rules, report, every_s=every, sleep=time.sleep)
        finally:
            report.close()
            subject.close()


def _rules(
    above: str | None, swap_growth: str | None, *, every: float, for_s: float, is_tree: bool,
    commands: tuple[str, ...], urls: tuple[str, ...],
) -> list[AlertRule]:  # fmt: skip
    from penstock.monitor.alerts.rules import AlertRule, Command, Webhook

    try:
        then: list[Action] = [Command(command=each) for each in commands]
        then += [Webhook(url=each) for each in urls]
        timing: dict[str, Any] = {"for_s": for_s, "calm_s": _CALM_LOOKS * every, "then": then}
        rules = []
        if above is not None:
            rules.append(AlertRule(on="tree" if is_tree else "memory", at=above, **timing))
        if swap_growth is not None:
            rules.append(AlertRule(on="swap", at=swap_growth, **timing))
    except ConfigError as wrong:
        raise click.UsageError(str(wrong)) from None
    return rules


def _subject(run: str | None, pid: int | None, match: str | None, roots: Roots) -> Subject:
    from penstock.cli.watch.subjects import Machine, Matching, OneProcess, RecordedRun

    if run is not None:
        return RecordedRun(run)
    if pid is not None:
        return OneProcess(pid, roots)
    if match is None:
        return Machine(roots)
    return Matching(pattern_of(match), roots)


def pattern_of(text: str) -> re.Pattern[str]:
    """Raises UsageError."""
    try:
        return re.compile(text)
    except re.error as wrong:
        raise click.UsageError(f"--match {text!r} is no regular expression: {wrong}") from None
