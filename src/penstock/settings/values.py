"""Converts one value of a settings file for the argument that it sets.

In:  a value from YAML, TOML or JSON, and the alias of its key.
Out: the value of the argument and a remark; or the reason why the value is invalid.
Runs in: trainer, command line.
"""

from __future__ import annotations

import math
import re
from numbers import Integral, Real
from typing import Any

from penstock.errors import ConfigError
from penstock.settings.aliases import Alias
from penstock.units import GIB, LARGEST_BYTES, MIB, parse_size

LARGEST_COUNT = 10**9
"""The largest number of workers or samples; a larger number is a typing mistake."""

_RANGE = re.compile(r"\s*(\d+)\s*(?:-|–|—|~|\.\.+|to)\s*(\d+)\s*")
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_DEVICE = re.compile(r"[a-z]+(:\d+)?")
_LEAST = {"num_workers": 0, "prefetch_factor": 1}


class Wrong(Exception):
    """A value is invalid. The text gives the reason, without the file and the key."""


def read_value(alias: Alias, given: Any) -> tuple[Any, str]:
    """The value of the argument and a remark. The value is None if the file leaves it to penstock. Raises ``Wrong``."""
    if given is None:
        return None, "null: left to penstock"
    if isinstance(given, str) and ("${" in given or given.strip() == "???"):
        raise Wrong(
            "is a reference that another program resolves; write the value, or load the file with that program and "
            "pass the resulting mapping to penstock"
        )
    match alias.reads:
        case "workers" if _is_auto(given):
            return "auto", ""
        case "count" if _is_auto(given):
            return None, "auto: left to penstock"
        case "workers" | "count":
            return _count(given, least=_LEAST.get(alias.target, 1))
        case "steps":
            steps, remark = _count(given, least=-1)
            return (steps, remark) if steps > 0 else (None, "no limit")
        case "flag":
            return _flag(given)
        case "seconds":
            seconds = _number(given)
            if seconds < 0:
                raise Wrong("is negative; a number of seconds of at least 0 is needed")
            return seconds, "seconds"
        case "gib":
            return _gib(alias, given)
        case "size":
            return _size(alias, given)
        case "device":
            if type(given) is int and given >= 0:
                return given, ""
            if isinstance(given, str) and _DEVICE.fullmatch(given):
                return given, ""
            raise Wrong('is not a device; write "cuda", "cuda:1" or "cpu"')
        case "seeding":
            return _one_of(given, ("batch", "worker"))
        case "backend":
            return _one_of(given, ("process", "thread", "ray"))
        case "start":
            return _one_of(given, ("fork", "spawn", "forkserver"))
        case "text":
            if isinstance(given, str):
                return given, ""
            raise Wrong("is not text")


def _is_auto(given: Any) -> bool:
    return isinstance(given, str) and given.strip().lower() == "auto"


def _one_of(given: Any, words: tuple[str, ...]) -> tuple[str, str]:
    if isinstance(given, str) and given.strip().lower() in words:
        return given.strip().lower(), ""
    raise Wrong(f"is unknown; write {', '.join(words[:-1])} or {words[-1]}")


def _number(given: Any) -> float:
    if isinstance(given, str):
        if span := _RANGE.fullmatch(given):
            raise Wrong(f"is a range; write one number, such as {span.group(1)}")
        try:
            given = float(given)
        except ValueError:
            raise Wrong("is text; a number is needed") from None
    if isinstance(given, bool) or not isinstance(given, Real):
        what = "true or false" if isinstance(given, bool) else f"a {type(given).__name__}"
        raise Wrong(f"is {what.replace('a ListValue', 'a list')}; a number is needed")
    if isinstance(given, Integral):
        return int(given)
    if not math.isfinite(given):
        raise Wrong("is not a finite number")
    return float(given)


def _count(given: Any, *, least: int) -> tuple[int, str]:
    number = _number(given)
    if number != int(number):
        raise Wrong("is not a whole number")
    if number < least:
        raise Wrong(f"is {'negative' if number < 0 else 'too small'}; at least {least} is needed")
    if number > LARGEST_COUNT:
        raise Wrong(f"is more than {LARGEST_COUNT:,}")
    return int(number), "written as text" if isinstance(given, str) else ""


def _flag(given: Any) -> tuple[bool, str]:
    if isinstance(given, bool):
        return given, ""
    if isinstance(given, str) and given.strip().lower() in _FLAGS:
        return _FLAGS[given.strip().lower()], "written as text"
    if given in (0, 1) and not isinstance(given, str):
        return bool(given), ""
    raise Wrong("is neither true nor false")


def _gib(alias: Alias, given: Any) -> tuple[int | None, str]:
    number = _number(given)
    if number < 0:
        raise Wrong("is negative; a number of GiB is needed")
    count = int(number * GIB)
    if count > LARGEST_BYTES:
        raise Wrong(f"is too large; {alias.key} is in GiB, not in bytes")
    if count == 0:
        if alias.target == "cache" and number == 0:
            return None, "0: no cache"
        raise Wrong("is less than one byte; a number of GiB is needed")
    return count, "a key with _GB is read in GiB"


def _size(alias: Alias, given: Any) -> tuple[Any, str]:
    if alias.target == "cache":
        if given is False or (isinstance(given, int) and given == 0):
            return None, "no cache"
        if given is True:
            return "auto", "size chosen for the machine"
    try:
        size = parse_size(given, name=alias.target)
    except ConfigError as refused:
        # The caller writes the file's own key and the value before this text.
        shown = f"{alias.target}={given!r} "
        raise Wrong(str(refused).removeprefix(shown)) from None
    if size.fixed_bytes is not None and size.fixed_bytes < MIB:
        raise Wrong(f'is {size.fixed_bytes:,} bytes; write a unit, such as "8GB"')
    return given, ""
