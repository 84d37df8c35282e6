"""The page of `penstock top`: lines of text that fit any terminal; the least important lines are left out first.

In:  trainings, the machine's figures, the size of the terminal.
Out: a rich renderable.
Runs in: command line.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from penstock.cli.top.trainings import TrainingSnapshot
from penstock.formatting import duration, memory, one_line, rate, share
from penstock.monitor.figures import FIGURES, MEMORY_PARTS, part, shown

_LABEL = 13
_OF_ANY_PROCESS = {"trainer_bytes": "process", "workers_bytes": "children", "other_bytes": "shared"}
"""Labels of the memory of a training without a record; ``FIGURES`` has the labels of a recorded training."""
_STYLES = {"running": "green", "failed": "red", "killed": "red"}
_FULL = 0.9
_EIGHTHS = "▏▎▍▌▋▊▉"
_STALE_S = 10.0
_MOST_GPUS, _MOST_EVENTS = 16, 10
_SLOW_S = 1.0
"""If a worker has had its sample for longer than this, the page shows for how long."""
_EVENTS_AT_LEAST, _LINES_AT_LEAST = 2, 2
_FIRST_LIST = 3
"""The blocks before this one are the training, its memory and its speed."""
KEYS = "+ - workers   [ ] depth   up/down run   left/right loader   q quit"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The run and the loader that the keys act on."""

    training: str | None = None
    """Id of the run; None for the first run."""
    loader: int = 0
    message: str = ""
    """The result of the last key."""


class Page:
    """The page on one console."""

    def __init__(self, console: Console, *, has_keys: bool) -> None:
        self._console = console
        self._has_keys = has_keys
        self._is_ascii = console.options.ascii_only

    def live(
        self, machine: dict[str, float], trainings: Sequence[TrainingSnapshot], choice: Choice, nothing: str
    ) -> Group:
        """One screen: a line for each training, and the chosen training in detail."""
        chosen = next((each for each in trainings if each.id == choice.training), trainings[0] if trainings else None)
        head = [self._machine(machine, len(trainings))]
        foot = [self._line(one_line(choice.message, 300), "yellow")] if choice.message else []
        foot += [self._line(KEYS, "dim")] if self._has_keys else []
        rows = max(4, self._console.size.height)
        if chosen is None:
            return Group(*head, Text(""), Text(nothing), *foot)
        if len(trainings) > 1:
            number = trainings.index(chosen)
            room = max(1, min(len(trainings), rows // 6))
            first = max(0, min(number - room // 2, len(trainings) - room))
            head += [self._in_short(each, is_chosen=each is chosen) for each in trainings[first : first + room]]
        blocks = self._blocks(chosen, choice.loader)
        return Group(*_fitted(head, blocks, self._events(chosen), foot, rows))

    def once(self, machine: dict[str, float], trainings: Sequence[TrainingSnapshot], nothing: str) -> Group:
        """All trainings in detail, of any length."""
        lines = [self._machine(machine, len(trainings))]
        if not trainings:
            lines.append(Text(nothing))
        for each in trainings:
            lines += [Text(""), *(line for block in self._blocks(each, None) for line in block), *self._events(each)]
        return Group(*lines)

    # -- parts ------------------------------------------------------------------------------

    def _blocks(self, training: TrainingSnapshot, loader: int | None) -> list[list[Text]]:
        """The training, its memory, its speed; then lists, which may be long."""
        blocks = [self._about(training), self._memory(training), self._speed(training)]
        blocks += self._loaders(training, loader)
        if training.processes:
            blocks.append(self._processes(training))
        return blocks

    def _events(self, training: TrainingSnapshot) -> list[Text]:
        return [self._event(each) for each in reversed(training.events[-_MOST_EVENTS:])]

    def _machine(self, machine: dict[str, float], count: int) -> Text:
        used, limit = machine.get("used_bytes", 0.0), machine.get("limit_bytes", 0.0)
        is_full = bool(limit) and used >= _FULL * limit
        text = f"memory in use {memory(used)} of {memory(limit)} ({share(used / limit if limit else None)})"
        swap = f", swap {memory(machine['swap_used_bytes'])}" if machine.get("swap_used_bytes") else ""
        several = f", {count} trainings" if count > 1 else ""
        return self._line(f"{time.strftime('%H:%M:%S')}  {text}{swap}{several}", "bold red" if is_full else "bold")

    def _in_short(self, training: TrainingSnapshot, *, is_chosen: bool) -> Text:
        figures = training.figures
        mark = ">" if is_chosen else " "
        facts = f"{memory(figures.get('tree_bytes')):>9}"
        if training.is_recorded:
            waits = share(figures.get("wait_fraction"))
            facts += f" {rate(figures.get('samples_per_s')):>7}/s {waits:>5} waits"
        else:
            facts += f" {share(figures.get('processors_busy')):>6} CPU"
        if training.state != "running":
            facts += f" {training.state}"
        room = self._console.width - len(facts) - len(training.id) - 5
        name = one_line(training.name, max(4, room))
        return self._line(f"{mark} {training.id} {name:<{max(0, room)}} {facts}", "reverse" if is_chosen else "")

    def _about(self, training: TrainingSnapshot) -> list[Text]:
        is_over = training.state != "running"
        ran_s = max(0.0, (training.heard_s if is_over else time.time()) - training.started_s)
        words = [f"{training.state} {duration(ran_s)}"]
        if training.is_recorded:
            words.append(f"process {training.pid}")
        if training.figures.get("processes", 0) > 1:
            words.append(f"{training.figures['processes']:.0f} processes")
        if "step" in training.figures:
            words.append(f"step {training.figures['step']:,.0f}")
        old_s = time.time() - training.heard_s
        if not is_over and training.heard_s and old_s > _STALE_S:
            words.append(f"figures are {duration(old_s)} old")
        lines = [
            self._line(f"{training.id}  {one_line(training.name, 200)}", "bold"),
            self._line(", ".join(words), _STYLES.get(training.state, "")),
        ]
        if training.what:
            lines.append(self._line(one_line(training.what, 200), "red"))
        lines += [self._line(f"ALERT {one_line(each, 200)}", "bold red") for each in training.alerts]
        if training.problem:
            lines.append(self._line(one_line(training.problem, 200), "yellow"))
        return lines

    def _memory(self, training: TrainingSnapshot) -> list[Text]:
        figures = training.figures
        total, limit = figures.get("tree_bytes"), figures.get("limit_bytes")
        if total is None:
            return [self._row("memory", "unknown")]
        how = "" if training.measure in ("pss", "") else f", {training.measure}"
        of = f"of {memory(limit)} ({share(total / limit)})" if limit else ""
        lines = [self._bar("memory", total, limit, f"{of}{how}".strip(", "), is_total=True)]
        labels = {name: FIGURES[name].label for name in MEMORY_PARTS} if training.is_recorded else _OF_ANY_PROCESS
        for name, label in labels.items():
            if figures.get(name) or name in ("trainer_bytes", "workers_bytes"):
                note = ""
                if name == "arena_bytes" and figures.get("budget_bytes"):
                    note = f"budget {memory(figures['budget_bytes'])}"
                lines.append(self._bar(f"  {label}", figures.get(name, 0.0), limit, note))
        return lines

    def _speed(self, training: TrainingSnapshot) -> list[Text]:
        figures = training.figures
        lines: list[Text] = []
        rates = [name for name in ("samples_per_s", "steps_per_s") if name in figures]
        words = [f"{shown(name, figures[name])} {FIGURES[name].label}" for name in rates]
        if "wait_fraction" in figures:
            words.append(f"waits for data {share(figures['wait_fraction'])} of the time")
        if "processors_busy" in figures:
            words.append(f"{figures['processors_busy']:.2f} processors busy")
        if figures.get("read_bytes_per_s"):
            words.append(f"reads {shown('read_bytes_per_s', figures['read_bytes_per_s'])}")
        if words:
            lines.append(self._row("speed", ", ".join(words)))
        for number in range(_MOST_GPUS):
            if gpu := part(figures, f"gpu.{number}"):
                lines.append(self._gpu(number, gpu, training))
        if figures.get("gpu_tree_bytes"):
            lines.append(self._row("", f"{memory(figures['gpu_tree_bytes'])} used by this training"))
        hits, misses = figures.get("cache_hits"), figures.get("cache_misses")
        if hits is not None and misses is not None:
            recent = figures.get("cache_hit_rate", hits / (hits + misses) if hits + misses else None)
            counts = f"{shown('cache_hits', hits)} hits, {shown('cache_misses', misses)} misses"
            has = memory(figures.get("cache_bytes"))
            lines.append(self._row("cache", f"{has}, {FIGURES['cache_hit_rate'].label} {share(recent)}, {counts}"))
        return lines

    def _gpu(self, number: int, gpu: dict[str, float], training: TrainingSnapshot) -> Text:
        name = one_line(training.gpus[number].removeprefix("NVIDIA "), 20) if number < len(training.gpus) else ""
        words = [f"busy {share(gpu.get('busy_fraction'))}"]
        if "used_bytes" in gpu:
            words.append(f"{memory(gpu['used_bytes'])} of {memory(gpu.get('total_bytes'))}")
        if "allocated_bytes" in gpu:
            words.append(f"torch {memory(gpu['allocated_bytes'])}, reserved {memory(gpu.get('reserved_bytes'))}")
        return self._row(f"GPU {number} {name}".rstrip(), ", ".join(words))

    def _loaders(self, training: TrainingSnapshot, chosen: int | None) -> list[list[Text]]:
        blocks = []
        for place, loader in enumerate(training.loaders):
            figures = part(training.figures, f"loader.{loader.get('number', place)}")
            count, depth = int(figures.get("workers", 0)), int(figures.get("depth", 0))
            words = [f"{count} worker" + "s" * (count != 1), f"depth {depth}" if depth else "not read yet"]
            if len(training.loaders) > 1 and depth and "samples_per_s" in figures:
                words.append(f"{rate(figures['samples_per_s'])}/s, waits {share(figures.get('wait_fraction'))}")
            if figures.get("worker_restarts"):
                words.append(f"{figures['worker_restarts']:.0f} restarted")
            if figures.get("lent_bytes"):
                words.append(f"lent {memory(figures['lent_bytes'])}")
            if loader.get("kind") == "torch":
                words.append("torch's own")
            is_chosen = len(training.loaders) > 1 and place == chosen
            label = ("> " if is_chosen else "") + one_line(str(loader.get("name")), 40)
            lines = [self._row(label, ", ".join(words), style="bold")]
            for each in loader.get("workers") or []:
                lines.append(self._line(_worker(each), "yellow" if each.get("restarts") else ""))
            blocks.append(lines)
        return blocks

    def _processes(self, training: TrainingSnapshot) -> list[Text]:
        first, *rest = training.processes
        lines = [self._line(f"  {'pid':>8}  {'name':<16} {'doing':<18} {'CPU':>6} {'own':>10}", "dim")]
        for each in (first, *sorted(rest, key=lambda each: -each["bytes"])):
            busy = share(each["processors"])
            text = f"  {each['pid']:>8}  {one_line(each['name'], 16):<16} {each['doing']:<18} {busy:>6}"
            lines.append(self._line(f"{text} {memory(each['bytes']):>10}"))
        return lines

    def _event(self, event: dict[str, Any]) -> Text:
        when = time.strftime("%H:%M:%S", time.localtime(event["t_s"]))
        said = {"raised": "ALERT ", "cleared": "over: "}.get(event["kind"], "")
        text = f"{when} {one_line(event['who'], 10):<10} {said}{one_line(event['what'], 300)}"
        is_bad = event["kind"] in ("raised", "restart", "warning")
        return self._line(text, "yellow" if is_bad else "")

    # -- lines ------------------------------------------------------------------------------

    def _bar(self, label: str, count: float, limit: float | None, note: str, *, is_total: bool = False) -> Text:
        width = max(6, min(40, self._console.width - 48))
        filled = self._filled(width, min(1.0, count / limit) if limit else 0.0)
        is_full = bool(limit) and count >= _FULL * (limit or 0.0)
        line = Text(f"{label:<{_LABEL}}", style="bold" if is_total else "", no_wrap=True, overflow="crop", end="\n")
        line.append(filled, style="red" if is_full else "green")
        line.append(("." if self._is_ascii else "·") * (width - len(filled)), style="dim")
        line.append(f" {memory(count):>9}  {note}".rstrip())
        return self._cut(line)

    def _filled(self, width: int, fraction: float) -> str:
        if self._is_ascii:
            return "#" * round(width * fraction)
        # The bar grows by eighths of a cell, so that a training of 2 GiB is visible on a machine of 512 GiB.
        whole, eighths = divmod(math.ceil(width * fraction * 8), 8)
        return "█" * whole + (_EIGHTHS[eighths - 1] if eighths else "")

    def _row(self, label: str, text: str, style: str = "") -> Text:
        gap = " " * max(1, _LABEL - len(label))
        return self._line(f"{label}{gap}{text}".rstrip(), style)

    def _line(self, text: str, style: str = "") -> Text:
        return self._cut(Text(text, style=style, no_wrap=True, overflow="crop"))

    def _cut(self, line: Text) -> Text:
        # A line is cut by cells, not by characters: Chinese characters are two cells wide.
        line.truncate(self._console.width, overflow="crop" if self._is_ascii else "ellipsis")
        return line


def _worker(worker: dict[str, Any]) -> str:
    doing = str(worker.get("doing"))
    if worker.get("batch") is not None:
        doing += f" {worker['index']}, batch {worker['batch']}" if worker.get("index") else f" batch {worker['batch']}"
    if worker.get("leaving"):
        doing = f"leaving, {doing}"
    if worker.get("restarts"):
        doing = f"restarted {worker['restarts']}, {doing}"
    since_s = worker.get("since_s")
    if since_s is not None and since_s >= _SLOW_S:
        doing += f", {since_s:.1f} s"
    pid = "thread" if worker.get("pid") is None else str(worker["pid"])
    has = f"{worker.get('samples', 0):>9,} samples {memory(worker.get('private_bytes')):>9}"
    return f"  {worker.get('worker_id'):>3} {pid:>8}  {one_line(doing, 35):<35} {has}"


def _fitted(head: list[Text], blocks: list[list[Text]], events: list[Text], foot: list[Text], rows: int) -> list[Text]:
    """Shorten the longest block until all blocks fit, lists of workers first, and count the lines left out. Events,
    newest first, fill the remaining lines."""
    room = max(0, rows - len(head) - len(foot) - 1)
    sizes = [len(block) for block in blocks]
    for places in (range(_FIRST_LIST, len(sizes)), range(len(sizes))):
        while sum(sizes) + min(len(events), _EVENTS_AT_LEAST) > room and max(
            (sizes[place] for place in places), default=0
        ) > _LINES_AT_LEAST:  # fmt: skip
            sizes[max(places, key=lambda place: sizes[place])] -= 1
    lines: list[Text] = []
    for block, size in zip(blocks, sizes, strict=True):
        if size < len(block):
            lines += [*block[: size - 1], Text(f"  and {len(block) - size + 1} more", style="dim")]
        else:
            lines += block
    return [*head, Text(""), *[*lines, *events][:room], *foot]
