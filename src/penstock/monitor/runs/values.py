"""Values of a record in the types that everybody relies on: the one place where they are checked.

In:  what lies in a file: a column of any type, JSON of any shape. Files are copied, damaged, and written by others.
Out: facts, totals, points, entries, outcomes; None, or nothing, for what is not of its kind.
Runs in: command line, web page; pure.

Numbers are finite and small enough to count with, times are on a calendar, text can be printed, and JSON is as deep as
a record needs: one that nobody can show would take the list of all runs down with it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from penstock.monitor.runs.format import LONGEST_NAME, Alert, Note, Point, RunOutcome, TriedSettings

_LARGEST = 1 << 63
"""More is no figure of a run, and does not fit where it goes: floats, SQLite, other programs' integers."""
_SMALLEST = 1e-9
"""Less is nothing: a rate over so short a time would be infinite."""
_LAST_S = 1e11
"""The year 5138. Calendars end soon after."""
_MOST_PID = 1 << 22
"""The kernel's own limit."""
_DEEPEST = 20
_MOST_LOADERS = 1 << 16


def parsed(text: Any) -> Any:
    """JSON of a column, made plain; None: it is none."""
    try:
        return plain(json.loads(text)) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None


def plain(value: Any, depth: int = 0) -> Any:
    """The same, with None for numbers that are none and for what lies too deep."""
    if isinstance(value, str):
        return text(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return value if -_LARGEST < value < _LARGEST else None
    if depth < _DEEPEST:
        if isinstance(value, list):
            return [plain(each, depth + 1) for each in value]
        if isinstance(value, dict):
            return {str(text(name)): plain(each, depth + 1) for name, each in value.items()}
    return None


def text(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    # Half a character of a broken file name can be kept in JSON, but not written to a terminal.
    return value[:LONGEST_NAME].encode("utf-8", "replace").decode()


def number(value: Any) -> float | None:
    """From 0 up."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _LARGEST:
        return None
    return float(value) if value >= _SMALLEST else 0.0


def count(value: Any) -> int | None:
    found = number(value)
    return None if found is None else int(value)


def time_s(value: Any) -> float | None:
    """Seconds since 1970."""
    found = number(value)
    return found if found is not None and found < _LAST_S else None


# -- facts ----------------------------------------------------------------------------------


def facts(rows: Iterable[Sequence[Any]]) -> dict[str, Any]:
    """By name. One that is not of its kind is left out: a reader does without any of them."""
    found: dict[str, Any] = {}
    for name, value in rows:
        if not isinstance(name, str):
            continue
        known = parsed(value)
        checked = _FACTS.get(name, plain)(known)
        if checked is not None or known is None:
            found[name] = checked
    return found


def _process(value: Any) -> int | None:
    found = count(value)
    return found if found is not None and 0 < found <= _MOST_PID else None


def _object(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


def _objects(value: Any) -> list[dict[str, Any]] | None:
    # What is none keeps its place: figures are told by number.
    return [_object(each) or {} for each in value] if isinstance(value, list) else None


def _texts(value: Any) -> list[str] | None:
    return [str(each) for each in value] if isinstance(value, list) else None


def _rank(value: Any) -> dict[str, int] | None:
    return {name: int(each) for name, each in value.items() if count(each) is not None} if _object(value) else None


def _loaders(value: Any) -> list[dict[str, Any]] | None:
    found = _objects(value)
    for each in found or ():
        for name, kind in _OF_LOADER.items():
            if name in each and each[name] is not None:
                each[name] = kind(each[name])
    return found


def settings(value: Any) -> dict[str, Any]:
    """Of a loader: those with a meaning of their own are of their kind, or not there."""
    found = _object(value) or {}
    return {name: each for name, each in found.items() if name not in _SETTINGS or _SETTINGS[name](each)}


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, list | dict)


def _is_amount(value: Any) -> bool:
    return value is None or number(value) is not None


_SETTINGS: dict[str, Callable[[Any], bool]] = {
    "workers": _is_scalar,
    "num_workers": _is_scalar,
    "depth": _is_scalar,
    "prefetch_factor": _is_scalar,
    "batch_size": _is_scalar,
    "memory": lambda value: isinstance(value, str) or _is_amount(value),
    "cache_bytes": _is_amount,
}
_OF_LOADER: dict[str, Callable[[Any], Any]] = {
    "name": text,
    "kind": text,
    "dataset": text,
    "dataset_length": count,
    "arguments": settings,
    "keys": _object,
    "prediction": _object,
}
_FACTS: dict[str, Callable[[Any], Any]] = {
    "id": text,
    "name": text,
    "started_s": time_s,
    "pid": _process,
    "process_started_s": time_s,
    "host": text,
    "boot_id": text,
    "user": count,
    "command": _texts,
    "folder": text,
    "python": _object,
    "machine": _object,
    "gpus": _objects,
    "rank": _rank,
    "loaders": _loaders,
    "tree_measure": text,
    "every": count,
    "warn_at": number,
    "socket": text,
}
"""The kinds of ``record_format.FACTS``; of others, any JSON."""


# -- the other tables -----------------------------------------------------------------------


def totals(rows: Iterable[Sequence[Any]]) -> dict[str, float]:
    kinds = {"t_s": time_s}
    checked = ((name, kinds.get(name, number)(value)) for name, value in rows if isinstance(name, str))
    return {name: value for name, value in checked if value is not None}


def point(row: Sequence[Any], names: Sequence[str]) -> Point | None:
    t_ms, span_s, body = row
    if type(t_ms) is not int or not 0 < t_ms < _LAST_S * 1000 or not isinstance(body, bytes):
        return None
    span = time_s(span_s)
    values = array("d")
    values.frombytes(body[: len(body) // 8 * 8])
    # NaN, which says "not known", is not between anything.
    known = {name: value for name, value in zip(names, values, strict=False) if -_LARGEST < value < _LARGEST}
    return None if span is None else Point(t_ms / 1000, span, known)


def body_length(row: Sequence[Any]) -> int:
    """How many figures a row of points has."""
    return len(row[2]) // 8 if isinstance(row[2], bytes) else 0


def note(row: Sequence[Any]) -> Note | None:
    entry = _entry(row)
    if entry is None:
        return None
    place, t_s, who, kind, what, details = entry
    return Note(number=place, t_s=t_s, who=who, kind=kind, what=what, details=details)


def alert(row: Sequence[Any]) -> Alert | None:
    entry = _entry(row)
    if entry is None or entry[3] not in ("raised", "cleared"):
        return None
    place, t_s, rule, state, what, details = entry
    if not _is_scalar(details.get("threshold")):
        # Alerts are told apart by it.
        del details["threshold"]
    return Alert(number=place, t_s=t_s, rule=rule, state=state, what=what, details=details)


def _entry(row: Sequence[Any]) -> tuple[int, float, str, Any, str, dict[str, Any]] | None:
    """Number, time, who or which rule, kind or state, words, details."""
    place, t_s, first, second, words = row[0], time_s(row[1]), text(row[2]), text(row[3]), text(row[4])
    if type(place) is not int or t_s is None or first is None or second is None or words is None:
        return None
    return place, t_s, first, second, words, _object(parsed(row[5])) or {}


def tried(row: Sequence[Any]) -> TriedSettings | None:
    loader, configuration = row[0], parsed(row[1])
    known = [each for each in (*map(time_s, row[2:4]), *map(number, row[4:8])) if each is not None]
    if type(loader) is not int or not 0 <= loader < _MOST_LOADERS or not isinstance(configuration, dict):
        return None
    if len(known) < 6:
        return None
    began_s, ended_s, active_s, samples, wait_s, peak_bytes = known
    return TriedSettings(
        loader=loader, configuration=settings(configuration), began_s=began_s, ended_s=ended_s,
        active_s=active_s, samples=samples, wait_s=wait_s, peak_bytes=peak_bytes,
    )  # fmt: skip


def outcome(state: Any, ended_s: Any, what: Any, *, heard_s: float) -> RunOutcome:
    """What was written of the end; where that cannot be read, the run was over without a word all the same."""
    when_s = time_s(ended_s)
    return RunOutcome(
        state=state if state in ("finished", "failed") else "killed",
        t_s=heard_s if when_s is None else when_s,
        what=text(what),
    )
