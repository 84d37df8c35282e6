"""A configuration in words: ``"workers=0,pin_memory=false,target=other.py:dataset"``.

In:  text of the command line.
Out: changes to a configuration.
Runs in: command line.
"""

from __future__ import annotations

from typing import Any

from penstock.errors import ConfigError
from penstock.units import parse_size

_TRUE, _FALSE = {"true", "on", "yes", "1"}, {"false", "off", "no", "0"}
_LEAST = {"batch_size": 1, "workers": 0, "depth": 1, "prefetch_factor": 1}
KNOWN = ("target", *_LEAST, "memory", "pin_memory")


def read_configuration(text: str) -> dict[str, Any]:
    """Name -> value. Raises ConfigError."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        name = {"num_workers": "workers"}.get(name, name).replace("-", "_")
        if not equals or name not in KNOWN:
            raise ConfigError(f"{part.strip()!r} changes nothing; write NAME=VALUE, NAME one of {', '.join(KNOWN)}")
        found[name] = _value(name, value)
    return found


def _value(name: str, text: str) -> Any:
    if name in _LEAST:
        if not text.isdecimal() or int(text) < _LEAST[name]:
            raise ConfigError(f"{name}={text} is not a whole number of at least {_LEAST[name]}")
        return int(text)
    if name == "pin_memory":
        if text.lower() not in _TRUE | _FALSE:
            raise ConfigError(f"{name}={text} is neither true nor false")
        return text.lower() in _TRUE
    if name == "memory":
        parse_size(text)
    return text
