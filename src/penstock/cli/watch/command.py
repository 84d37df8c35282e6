"""`penstock watch`: an alert when memory or swap rises above a threshold; the training itself is not changed.

In:  a threshold; a machine, a process, a pattern or a run.
Out: a line for each alert, commands, webhooks; a status line on a terminal.
Runs in: command line. Does not import torch.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.options import check_size
from penstock.cli.signals import sigterm_as_exit
from penstock.errors import ConfigError, PenstockError
from penstock.meter import Roots

if TYPE_CHECKING:
    from penstock.cli.watch.subjects import Subject
    from penstock.cli.watch.view import AlertPrinter
    from penstock.monitor.alerts.rules import Action, AlertRule, Transition

_SECONDS = click.FloatRange(0.1, 86400)
_CALM_CHECKS = 2
"""An alert ends after this many checks well below the threshold."""
_LAST_ACTIONS_S = 40.0
"""How long the command waits at its end for commands and webhooks, which have time limits of their own."""


@click.command(
    epilog="Exit status: 0 when the watched process or run has ended; 1 if --once found memory above the threshold, or "
    "if there is nothing to watch; 2 for wrong usage; 130 after Ctrl-C."
)
@click.argument("run", required=False)
@click.option(
    "--above", metavar="SIZE", callback=check_size, help="Alert at this much memory, such as 40GB or 85% of the limit."
)
@click.option(
    "--swap-growth", metavar="SIZE", help="Alert if swap use grows by this much within 10 minutes, such as 1GB."
)
@click.option("--every", type=_SECONDS, metavar="SECONDS", default=5.0, show_default=True, help="Time between checks.")
@click.option("--for", "for_s", type=_SECONDS, metavar="SECONDS",
              help="Alert only after this long above the threshold.")  # fmt: skip
@click.option("--pid", type=click.IntRange(1), metavar="N", help="Watch a process and its descendants.")
@click.option("--match", metavar="REGEX", help="Watch all processes whose command line matches, with descendants.")
@click.option("--run", "commands", metavar="CMD", multiple=True,
              help="Run this in a shell at each alert, with the facts in PENSTOCK_ALERT_TEXT, PENSTOCK_ALERT_VALUE "
              "(bytes), PENSTOCK_ALERT_THRESHOLD, PENSTOCK_PID and PENSTOCK_RUN.")  # fmt: skip
@click.option("--webhook", "urls", metavar="URL", multiple=True,
              help="Send the start and the end of each alert to this address, as JSON.")  # fmt: skip
@click.option(
    "--once", is_flag=True, help="Check once and exit; with --swap-growth, check twice, --every seconds apart."
)
@click.option("--json", "json_wanted", is_flag=True, help="Print one JSON object per alert; with --once, per check.")
@click.pass_obj
def command(
    roots: Roots, run: str | None, above: str | None, swap_growth: str | None, every: float, for_s: float | None,
    pid: int | None, match: str | None, commands: tuple[str, ...], urls: tuple[str, ...], once: bool, json_wanted: bool,
) -> None:  # fmt: skip
    """Watch the memory of this machine or container, or of one training: RUN (an id or its beginning, a name, or
    "last"), --pid or --match. Alert once each time the memory rises above the threshold.

    \b
    penstock watch --above 40GB --every 5
    penstock watch --above 85% --run 'notify-send "$PENSTOCK_ALERT_TEXT"'
    penstock watch --match train.py --above 30GB --swap-growth 1GB
    """
    if sum(each is not None for each in (run, pid, match)) > 1:
        raise click.UsageError("RUN, --pid and --match each choose what to watch; give one of them")
    if above is None and swap_growth is None:
        raise click.UsageError("give a threshold: --above 40GB or --swap-growth 1GB")
    is_tree = any(each is not None for each in (run, pid, match))
    rules = _rules(above, swap_growth, every=every, for_s=for_s or 0.0, is_tree=is_tree, commands=commands, urls=urls)
    from penstock.cli.watch.view import AlertPrinter

    subject = _subject(run, pid, match, roots)
    # However this command ends, it ends the commands that it has started.
    with sigterm_as_exit():
        printer = AlertPrinter(subject, json_wanted=json_wanted)
        try:
            if not once:
                _watch(subject, rules, printer, every_s=every)
            elif _check_once(subject, rules, printer, every_s=every, twice=swap_growth is not None):
                raise click.exceptions.Exit(1)
        finally:
            printer.close()
            subject.close()


def _rules(
    above: str | None, swap_growth: str | None, *, every: float, for_s: float, is_tree: bool,
    commands: tuple[str, ...], urls: tuple[str, ...],
) -> list[AlertRule]:  # fmt: skip
    from penstock.monitor.alerts.rules import AlertRule, Command, Webhook

    try:
        then: list[Action] = [Command(command=each) for each in commands]
        then += [Webhook(url=each) for each in urls]
        timing: dict[str, Any] = {"for_s": for_s, "calm_s": _CALM_CHECKS * every, "then": then}
        rules = []
        if above is not None:
            rules.append(AlertRule(on="tree" if is_tree else "memory", at=above, **timing))
        if swap_growth is not None:
            rules.append(AlertRule(on="swap", at=swap_growth, **timing))
    except ConfigError as wrong:
        raise click.UsageError(str(wrong)) from None
    return rules


def _subject(run: str | None, pid: int | None, match: str | None, roots: Roots) -> Subject:
    from penstock.cli.watch.subjects import RecordedRun, WatchedMachine, WatchedProcesses

    if run is not None:
        return RecordedRun(run)
    if pid is None and match is None:
        return WatchedMachine(roots)
    return WatchedProcesses(pid, None if match is None else pattern_of(match), roots)


def pattern_of(text: str) -> re.Pattern[str]:
    """Raises UsageError."""
    try:
        return re.compile(text)
    except re.error as wrong:
        raise click.UsageError(f"--match {text!r} is not a regular expression: {wrong}") from None


# -- checks -----------------------------------------------------------------------------------------------------------


def _watch(subject: Subject, rules: Sequence[AlertRule], printer: AlertPrinter, *, every_s: float) -> None:
    """Check until the subject has ended."""
    from penstock.monitor.alerts.rules import AlertState, WatchedValue, next_state

    watched = [WatchedValue(rule) for rule in rules]
    states = [AlertState()] * len(rules)
    due_s = time.monotonic()
    while True:
        figures = subject.sample()
        if isinstance(figures, str):
            printer.end(figures)
            printer.actions.close(_LAST_ACTIONS_S)
            return
        now_s = time.monotonic()
        for number, rule in enumerate(rules):
            value, threshold = watched[number].value(figures, now_s), watched[number].threshold(figures)
            states[number], change = next_state(states[number], rule, value, threshold, now_s)
            if change is not None and value is not None and threshold is not None:
                printer.alert(_act(subject, rule, change, value, threshold, figures, printer))
        printer.status(figures, rules, is_raised=any(each.is_raised for each in states))
        # Checks that were missed while the machine slept or swapped are left out.
        due_s = max(due_s + every_s, time.monotonic())
        time.sleep(max(0.0, due_s - time.monotonic()))


def _check_once(
    subject: Subject, rules: Sequence[AlertRule], printer: AlertPrinter, *, every_s: float, twice: bool
) -> bool:
    """Whether any value is above its threshold."""
    from penstock.monitor.alerts.rules import WatchedValue

    watched = [WatchedValue(rule) for rule in rules]
    if twice:
        figures = subject.sample()
        if not isinstance(figures, str):
            for each in watched:
                each.value(figures, time.monotonic())
        time.sleep(every_s)
    figures = subject.sample()
    if isinstance(figures, str):
        raise PenstockError(figures)
    found = []
    for rule, each in zip(rules, watched, strict=True):
        value, threshold = each.value(figures, time.monotonic()), each.threshold(figures)
        if value is not None and threshold is not None and value >= threshold:
            found.append(_act(subject, rule, "raised", value, threshold, figures, printer))
    printer.once(figures, rules, found)
    printer.actions.close(_LAST_ACTIONS_S)
    return bool(found)


def _act(
    subject: Subject, rule: AlertRule, state: Transition, value: float, threshold: float, figures: dict[str, float],
    printer: AlertPrinter,
) -> dict[str, Any]:  # fmt: skip
    """Start the actions of an alert; returns its facts."""
    from penstock.monitor.alerts.rules import Command, Webhook, in_words

    facts: dict[str, Any] = {
        "t_s": time.time(), "alert": rule.on, "state": state, "value": value, "threshold": threshold,
        "text": in_words(rule, value, threshold, figures, whose=subject.whose),
        "subject": subject.whose, **subject.facts,
    }  # fmt: skip
    for action in rule.then:
        if isinstance(action, Webhook) or (isinstance(action, Command) and state == "raised"):
            printer.actions.perform(action, facts)
    return facts
