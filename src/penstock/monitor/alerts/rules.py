"""Alerts as values: which threshold, for how long, and what to do about it.

In:  what the user writes: ``AlertRule(on="memory", at="90%", then=[GiveBack(), Webhook(url=...)])``.
Out: frozen, checked rules for ``penstock.Monitor(loader, alerts=[...])`` and ``penstock watch``.
Runs in: trainer, command line. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import urlsplit

from penstock.errors import ConfigError
from penstock.formatting import one_line
from penstock.monitor.runs.facts import without_secrets
from penstock.units import Size, parse_bytes, parse_size

Gauge = Literal["memory", "tree", "swap", "stall", "gpu-idle", "restarts"]
"""memory: in use of the machine's or container's memory, by everybody; tree: of this training and its workers alone;
swap: growth of swap in use; stall: share of the time the training loop waits for data; gpu-idle: share of the time the
GPUs do nothing; restarts: workers that died."""

_SHARES = ("stall", "gpu-idle")
_GROWING = ("swap", "restarts")


@dataclass(frozen=True, kw_only=True)
class Log:
    """Say it: through logging where that is set up, else on stderr; once raised, once when it is over."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """Run a program when the alert is raised, with the facts in its environment.

    ``PENSTOCK_ALERT`` (which), ``PENSTOCK_ALERT_TEXT``, ``PENSTOCK_ALERT_VALUE``, ``PENSTOCK_ALERT_THRESHOLD``,
    ``PENSTOCK_RUN`` (its id) and ``PENSTOCK_PID``, as far as they are known. It gets none of the training's files: no
    input, and its output goes nowhere.
    """

    command: Sequence[str] | str
    """Words of a command, or one line for the shell."""
    within_s: float = 30.0
    """What has not ended by then is ended, with all it has started."""

    def __post_init__(self) -> None:
        words = [self.command] if isinstance(self.command, str) else list(self.command)
        if not words or not all(isinstance(word, str) for word in words) or not words[0].strip():
            raise ConfigError(f"command={self.command!r} is no command; write a line for the shell or a list of words")
        _check_seconds("within_s", self.within_s, least=0.1)
        if not isinstance(self.command, str):
            object.__setattr__(self, "command", tuple(words))

    def __str__(self) -> str:
        words = self.command.split() if isinstance(self.command, str) else self.command
        return one_line(f"command {' '.join(without_secrets(words))}", 100)


@dataclass(frozen=True, kw_only=True)
class Webhook:
    """Send the facts as JSON to an address, when the alert is raised and when it is over: ``text`` is a sentence,
    ``state`` is raised or cleared."""

    url: str
    within_s: float = 10.0
    """How long each exchange may take."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except (ValueError, AttributeError, TypeError):
            is_address = False
        if not is_address:
            raise ConfigError("a webhook's url begins with http:// or https:// and names a host")
        _check_seconds("within_s", self.within_s, least=0.1)

    def __str__(self) -> str:
        # The rest of such an address is often the password.
        return f"webhook to {urlsplit(self.url).hostname}"


@dataclass(frozen=True, kw_only=True)
class GiveBack:
    """Lower the loaders' depth, then their workers, a quarter at a time and never below 1, while the alert stands.

    Nothing is raised again when it is over: that memory was too full once is known, that it will not be again is not.
    """

    every_s: float = 5.0
    """Time between two steps: what the last one freed is seen before the next."""

    def __post_init__(self) -> None:
        _check_seconds("every_s", self.every_s, least=1.0)

    def __str__(self) -> str:
        return "give back"


Action = Log | Command | Webhook | GiveBack


@dataclass(frozen=True, kw_only=True)
class AlertRule:
    """One threshold and what happens when it is reached."""

    on: Gauge
    """What is watched."""
    at: str | float
    """When it is too much. memory, tree: a share of the limit (0.9, "90%") or bytes ("40GB"); swap: bytes; stall,
    gpu-idle: a share of the time; restarts: how many."""
    for_s: float = 5.0
    """Raised once it has been there for so long."""
    calm_s: float = 30.0
    """Over once it has been well below for so long."""
    margin: float = 0.05
    """How far below counts as well below: this share of the threshold."""
    within_s: float = 600.0
    """swap, restarts: growth over so much time counts."""
    then: Sequence[Action] = (Log(),)
    """What to do; each alert is recorded anyway."""

    def __post_init__(self) -> None:
        if self.on not in get_args(Gauge):
            raise ConfigError(f"on={self.on!r} cannot be watched; write one of {', '.join(get_args(Gauge))}")
        _ = self.size if self.on != "restarts" else self.count
        _check_seconds("for_s", self.for_s, least=0.0)
        _check_seconds("calm_s", self.calm_s, least=0.0)
        _check_seconds("within_s", self.within_s, least=1.0)
        if isinstance(self.margin, bool) or not 0 <= self.margin < 1:
            raise ConfigError(f"margin={self.margin!r} is no share of the threshold, 0 up to 1")
        actions = (self.then,) if isinstance(self.then, get_args(Action)) else tuple(self.then)
        wrong = [each for each in actions if not isinstance(each, get_args(Action))]
        if wrong:
            raise ConfigError(f"then={wrong[0]!r} is no action; write Log(), Command(...), Webhook(...) or GiveBack()")
        object.__setattr__(self, "then", actions)

    @property
    def size(self) -> Size:
        """The threshold as a share or bytes."""
        if self.on == "swap":
            return Size(fixed_bytes=parse_bytes(self.at, name="at"))
        size = parse_size(self.at, name="at")
        if size.is_auto or (self.on in _SHARES and size.fraction is None):
            wanted = "a share of the time such as 0.3" if self.on in _SHARES else 'a size or a share such as "90%"'
            raise ConfigError(f"at={self.at!r} is no threshold for {self.on}; write {wanted}")
        return size

    @property
    def count(self) -> int:
        """The threshold as a number of workers."""
        if isinstance(self.at, bool) or not isinstance(self.at, int) or self.at < 1:
            raise ConfigError(f"at={self.at!r} is no number of workers that died; write 1 or more")
        return self.at

    @property
    def is_growth(self) -> bool:
        """Whether growth counts instead of the level."""
        return self.on in _GROWING


def _check_seconds(name: str, value: object, *, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < float("inf"):
        raise ConfigError(f"{name}={value!r} is no number of seconds of at least {least:g}")
