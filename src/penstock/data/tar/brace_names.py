"""Expands one text that names many shards, in the notation of WebDataset: ``shards-{000..009}.tar``,
``{train,valid}.tar``.

In:  a path or URL with braces.
Out: every name that the text stands for, in order.
Runs in: trainer, command line.
"""

from __future__ import annotations

import itertools
import re

from penstock.errors import ConfigError

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(\d+))?")
_MOST_NAMES = 1_000_000


def expand_braces(text: str) -> list[str]:
    """All names that a text stands for; only the text itself if no braces in it contain a range or a list."""
    parts = _BRACES.split(text)
    choices = [[part] if place % 2 == 0 else _choices(part, text) for place, part in enumerate(parts)]
    total = 1
    for choice in choices:
        total *= len(choice)
    if total > _MOST_NAMES:
        raise ConfigError(
            f"{text} stands for {total} shards, more than the limit of {_MOST_NAMES}; is a range mistyped?"
        )
    return ["".join(name) for name in itertools.product(*choices)]


def _choices(inside: str, text: str) -> list[str]:
    match = _RANGE.fullmatch(inside)
    if match is None:
        return inside.split(",") if "," in inside else [f"{{{inside}}}"]
    first, last, step = match.group(1), match.group(2), int(match.group(3) or 1)
    if step == 0 or max(len(first), len(last)) > 18:
        raise ConfigError(f"{text}: {{{inside}}} is not a valid range")
    start, end = int(first), int(last)
    if abs(end - start) // step >= _MOST_NAMES:
        raise ConfigError(f"{text} stands for more shards than the limit of {_MOST_NAMES}; is a range mistyped?")
    is_padded = any(len(number.lstrip("-")) > 1 and number.lstrip("-").startswith("0") for number in (first, last))
    width = max(len(first), len(last)) if is_padded else 0
    numbers = range(start, end + 1, step) if start <= end else range(start, end - 1, -step)
    return [f"{number:0{width}d}" for number in numbers]
