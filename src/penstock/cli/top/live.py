"""The live view of `penstock top`: a frame a second, keys in between.

In:  a source of trainings; keys.
Out: frames on a terminal; settings changed in the trainings.
Runs in: command line.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from rich.console import Console, RenderableType
from rich.live import Live

from penstock.cli.console import Visible
from penstock.cli.top.keys import Keys
from penstock.cli.top.trainings import TrainingSnapshot, TrainingSource
from penstock.cli.top.view import Choice, Page
from penstock.errors import PenstockError
from penstock.meter import Roots
from penstock.monitor.figures import part
from penstock.monitor.system_levels import system_levels

_GLANCE_S = 0.25
"""Time between checks of the window's size."""
_MESSAGE_S = 6.0
_VALVES = {"+": ("workers", 1), "=": ("workers", 1), "-": ("workers", -1), "]": ("depth", 1), "[": ("depth", -1)}


def run_live(source: TrainingSource, console: Console, keys: Keys, roots: Roots, *, every_s: float) -> None:
    """Draw frames until q is pressed or the terminal is gone."""
    page = Page(console, has_keys=keys.is_there)
    choice, message_s = Choice(), 0.0
    with keys, _painter(console) as paint:
        while True:
            trainings = source.snapshots(choice.training or "")
            if choice.training not in {each.id for each in trainings}:
                # This is the first frame, or the chosen run has ended.
                choice = replace(choice, training=trainings[0].id if trainings else None, loader=0)
                trainings = source.snapshots(choice.training or "")
            due_s = time.monotonic() + every_s
            machine = system_levels(roots)
            paint(page.live(machine, trainings, choice, source.nothing))
            size = console.size
            while (left_s := due_s - time.monotonic()) > 0:
                pressed = keys.read(min(left_s, _GLANCE_S))
                if pressed is None or "q" in pressed or "Q" in pressed:
                    return
                if pressed:
                    for key in pressed:
                        choice = _pressed(key, choice, trainings, source)
                        message_s = time.monotonic()
                    break
                if console.size != size:
                    break
            if choice.message and time.monotonic() - message_s > _MESSAGE_S:
                choice = replace(choice, message="")


@contextlib.contextmanager
def _painter(console: Console) -> Iterator[Callable[[RenderableType], None]]:
    if console.is_dumb_terminal:
        # A dumb terminal cannot move the cursor, so each frame is printed below the last.
        yield lambda frame: console.print(frame, "")
        return
    live = Live(
        console=console, screen=True, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
    )
    with live:
        yield lambda frame: live.update(Visible(frame), refresh=True)


def _pressed(key: str, choice: Choice, trainings: list[TrainingSnapshot], source: TrainingSource) -> Choice:
    chosen = next((each for each in trainings if each.id == choice.training), None)
    if chosen is None:
        return choice
    if key in ("up", "down"):
        place = trainings.index(chosen) + (1 if key == "down" else -1)
        return Choice(training=trainings[place % len(trainings)].id)
    if key in ("left", "right"):
        loaders = max(1, len(chosen.loaders))
        return replace(choice, loader=(choice.loader + (1 if key == "right" else -1)) % loaders)
    if key not in _VALVES:
        return choice
    valve, more = _VALVES[key]
    return replace(choice, message=_change(chosen, choice.loader, valve, more, source))


def _change(training: TrainingSnapshot, loader: int, valve: str, more: int, source: TrainingSource) -> str:
    """Change a setting by one; returns the result in words."""
    recorded = source.recorded(training.id)
    if recorded is None or not training.loaders:
        return f"{training.id} has no loader whose {valve} can be changed from here"
    try:
        # The value is read again: the value on the page may be a second old, and several keys may come within a second.
        now = recorded.snapshot(in_detail=True)
        if now.state != "running":
            return f"{training.id} has ended ({now.state})"
        if not now.loaders or loader >= len(now.loaders) or now.problem:
            return now.problem or f"{training.id} has no such loader"
        known = now.loaders[loader]
        is_set = known["configuration"].get(valve)
        count = is_set if is_set is not None else int(part(now.figures, f"loader.{loader}").get(valve, 0))
        if count + more < 1:
            return f"{known['name']}: {valve} stays at {count}"
        answer = recorded.set_valve({"loader": loader, valve: count + more})
    except PenstockError as problem:
        return str(problem)
    if not answer.get("ok"):
        return str(answer.get("why", "the training refused without a reason"))
    remark = answer.get("now", {}).get("remark")
    return f"{known['name']}: {valve} {count} -> {answer['now'].get(valve)}" + (f" ({remark})" if remark else "")
