"""The output of `penstock watch`: a line for each alert on stdout, a status line on a terminal's stderr.

In:  alerts, figures.
Out: lines, or JSON.
Runs in: command line; results of actions are printed from the threads of the actions.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import click

from penstock.cli.options import echo
from penstock.cli.watch.subjects import Subject
from penstock.monitor.alerts.actions import ActionRunner
from penstock.monitor.alerts.rules import AlertRule
from penstock.units import format_bytes

_STDERR = 2
_STATES = {"raised": "ALERT", "cleared": "over:"}


class AlertPrinter:
    """Prints alerts and the status line, one thread at a time."""

    def __init__(self, subject: Subject, *, json_wanted: bool) -> None:
        self._subject = subject
        self._json = json_wanted
        self._is_live = sys.stderr is not None and sys.stderr.isatty()
        self._lock = threading.Lock()
        self._shown = 0
        """The number of characters of the status line that is on the terminal."""
        self._has_begun = False
        # Only alerts go to stdout: a program may be reading them.
        self.actions = ActionRunner(self._show_result, output=_STDERR)

    def alert(self, facts: dict[str, Any]) -> None:
        self._line(facts, f"{_time(facts['t_s'])} {_STATES[facts['state']]} {facts['text']}")

    def end(self, how: str) -> None:
        facts = {"t_s": time.time(), "state": "ended", "text": how, "subject": self._subject.whose}
        self._line(facts, f"{_time(facts['t_s'])} {how}")

    def status(self, figures: dict[str, float], rules: Sequence[AlertRule], *, is_raised: bool) -> None:
        """Replace the status line; without a terminal, print it once at the start."""
        text = self._status(figures, rules)
        if self._is_live:
            columns = shutil.get_terminal_size().columns
            with self._lock:
                self._wipe()
                line = f"{_time(time.time())[11:]}{' !' if is_raised else ''} {text}"[: columns - 1]
                echo(line, nl=False, err=True)
                self._shown = len(line)
        elif not self._has_begun:
            echo(f"penstock: watching, {text}", err=True)
        self._has_begun = True

    def once(self, figures: dict[str, float], rules: Sequence[AlertRule], found: Sequence[dict[str, Any]]) -> None:
        if self._json:
            answer = {"t_s": time.time(), "subject": self._subject.whose, "figures": figures, "alerts": list(found)}
            echo(json.dumps(answer, indent=2))
        elif found:
            for facts in found:
                echo(f"ALERT {facts['text']}")
        else:
            echo(self._status(figures, rules))

    def close(self) -> None:
        """End the commands that are still running."""
        with self._lock:
            self._wipe()
        self.actions.close(0.0)

    # -- inside -----------------------------------------------------------------------------

    def _line(self, facts: dict[str, Any], text: str) -> None:
        with self._lock:
            self._wipe()
            echo(json.dumps(facts) if self._json else text)
            # A reader at the other end of a pipe must get the line now.
            sys.stdout.flush()

    def _show_result(self, text: str) -> None:
        with self._lock:
            self._wipe()
            echo(f"  {text}", err=True)

    def _wipe(self) -> None:
        if self._shown:
            # Spaces work on terminals without escape sequences too. ``echo`` would show "\\r" as a symbol.
            click.echo("\r" + " " * self._shown + "\r", nl=False, err=True)
            self._shown = 0

    def _status(self, figures: dict[str, float], rules: Sequence[AlertRule]) -> str:
        parts = []
        used, limit = figures.get("used_bytes"), figures.get("limit_bytes")
        if self._subject.is_tree:
            has = figures.get("tree_bytes")
            parts.append(f"{self._subject.whose}: {'memory unknown' if has is None else format_bytes(has)}")
        if used is not None and limit:
            parts.append(f"memory in use {format_bytes(used)} of {format_bytes(limit)} ({used / limit:.0%})")
        if "swap_used_bytes" in figures and any(rule.on == "swap" for rule in rules):
            parts.append(f"swap {format_bytes(figures['swap_used_bytes'])}")
        lines = [f"+{rule.at} swap" if rule.on == "swap" else str(rule.at) for rule in rules]
        return f"{', '.join(parts) or 'no figures yet'}; alert at {' and '.join(lines)}"


def _time(t_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t_s))
