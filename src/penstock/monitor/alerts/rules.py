"""Alert rules: a threshold, how long it must be exceeded, and the actions; the value of a rule over time, and when it
raises an alert.

In:  what the user writes: ``AlertRule(on="memory", at="90%", then=[GiveBack(), Webhook(url=...)])``; figures over time.
Out: frozen, checked rules for ``penstock.Monitor(loader, alerts=[...])`` and ``penstock watch``; ``WatchedValue``;
     ``next_state``; ``in_words``.
Runs in: trainer, command line. Does not import torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import urlsplit

from penstock.errors import ConfigError
from penstock.formatting import duration, one_line
from penstock.monitor.figures import part
from penstock.monitor.runs.facts import without_secrets
from penstock.units import Size, format_bytes, parse_bytes, parse_size

Gauge = Literal["memory", "tree", "swap", "stall", "gpu-idle", "restarts"]
"""memory: memory in use on the machine or in the container, by all processes; tree: memory of this training and its
workers; swap: growth of the swap in use; stall: share of the time in which the training loop waits for data; gpu-idle:
share of the time in which the GPUs are idle; restarts: workers that crashed."""

_SHARES = ("stall", "gpu-idle")
_LEVELS = {"memory": "used_bytes", "tree": "tree_bytes", "stall": "wait_fraction"}
_GROWTHS = {"swap": "swap_used_bytes", "restarts": "worker_restarts"}
_MOST_GPUS = 64


@dataclass(frozen=True, kw_only=True)
class Log:
    """Log a line when the alert is raised and when it is over: through logging if that is set up, else to stderr."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """Run a program when the alert is raised, with the facts in its environment.

    ``PENSTOCK_ALERT`` (the rule), ``PENSTOCK_ALERT_TEXT``, ``PENSTOCK_ALERT_VALUE``, ``PENSTOCK_ALERT_THRESHOLD``,
    ``PENSTOCK_RUN`` (its id) and ``PENSTOCK_PID``, as far as they are known. The program inherits no open file of the
    training; its input is empty and its output is discarded.
    """

    command: Sequence[str] | str
    """The words of the command, or one line for the shell."""
    within_s: float = 30.0
    """Time limit; after this time the program is ended with everything that it has started."""

    def __post_init__(self) -> None:
        words = [self.command] if isinstance(self.command, str) else list(self.command)
        if not words or not all(isinstance(word, str) for word in words) or not words[0].strip():
            raise ConfigError(
                f"command={self.command!r} is not a command; write a line for the shell or a list of words"
            )
        _check_seconds("within_s", self.within_s, least=0.1)
        if not isinstance(self.command, str):
            object.__setattr__(self, "command", tuple(words))

    def __str__(self) -> str:
        words = self.command.split() if isinstance(self.command, str) else self.command
        return one_line(f"command {' '.join(without_secrets(words))}", 100)


@dataclass(frozen=True, kw_only=True)
class Webhook:
    """Send the facts as JSON to an address when the alert is raised and when it is over: ``text`` is a sentence,
    ``state`` is raised or cleared. A name and password before the host are sent as basic authentication."""

    url: str
    within_s: float = 10.0
    """Time limit of the exchange, from the connection to the end of the answer."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            # urlsplit silently removes some forbidden characters; http.client refuses the others when an alert is
            # raised.
            is_plain = self.url.isascii() and self.url.isprintable() and " " not in self.url
            is_address = is_plain and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except (ValueError, AttributeError, TypeError):
            is_address = False
        if not is_address:
            raise ConfigError(
                "a webhook's url begins with http:// or https:// and names a host; write spaces and letters outside "
                "ASCII as codes such as %20"
            )
        _check_seconds("within_s", self.within_s, least=0.1)

    def __str__(self) -> str:
        # The rest of a webhook's address is often the password.
        return f"webhook to {urlsplit(self.url).hostname}"


@dataclass(frozen=True, kw_only=True)
class GiveBack:
    """Lower the loaders' depth, then their workers, a quarter at a time and never below 1, until the value is well
    below its threshold or the alert is over.

    The values stay lowered when the alert is over, because raising them could raise the alert again.
    """

    every_s: float = 5.0
    """Time between two steps, so that the effect of one is measured before the next."""

    def __post_init__(self) -> None:
        _check_seconds("every_s", self.every_s, least=1.0)

    def __str__(self) -> str:
        return "give back"


Action = Log | Command | Webhook | GiveBack


@dataclass(frozen=True, kw_only=True)
class AlertRule:
    """One threshold, and the actions when it is reached."""

    on: Gauge
    """The gauge that is watched."""
    at: str | float
    """The threshold. memory, tree: a share of the limit (0.9, "90%") or bytes ("40GB"); swap: bytes; stall, gpu-idle: a
    share of the time; restarts: a number of workers."""
    for_s: float = 5.0
    """The alert is raised once the value has been at or above the threshold for this long."""
    calm_s: float = 30.0
    """The alert is over once the value has been well below the threshold for this long."""
    margin: float = 0.05
    """The value is well below the threshold if the difference is at least this share of the threshold."""
    within_s: float = 600.0
    """For the gauges swap and restarts: the time over which growth is summed."""
    then: Sequence[Action] = (Log(),)
    """The actions; each alert is also recorded."""

    def __post_init__(self) -> None:
        if self.on not in get_args(Gauge):
            raise ConfigError(f"on={self.on!r} cannot be watched; write one of {', '.join(get_args(Gauge))}")
        _ = self.size if self.on != "restarts" else self.count
        _check_seconds("for_s", self.for_s, least=0.0)
        _check_seconds("calm_s", self.calm_s, least=0.0)
        _check_seconds("within_s", self.within_s, least=1.0)
        if isinstance(self.margin, bool) or not 0 <= self.margin < 1:
            raise ConfigError(f"margin={self.margin!r} is not a share of the threshold, from 0 to below 1")
        actions = (self.then,) if isinstance(self.then, get_args(Action)) else tuple(self.then)
        wrong = [each for each in actions if not isinstance(each, get_args(Action))]
        if wrong:
            raise ConfigError(
                f"then={wrong[0]!r} is not an action; write Log(), Command(...), Webhook(...) or GiveBack()"
            )
        object.__setattr__(self, "then", actions)

    @property
    def size(self) -> Size:
        """The threshold as a share or bytes."""
        if self.on == "swap":
            return Size(fixed_bytes=parse_bytes(self.at, name="at"))
        size = parse_size(self.at, name="at")
        if size.is_auto or (self.on in _SHARES and size.fraction is None):
            wanted = "a share of the time such as 0.3" if self.on in _SHARES else 'a size or a share such as "90%"'
            raise ConfigError(f"at={self.at!r} is not a threshold for {self.on}; write {wanted}")
        return size

    @property
    def count(self) -> int:
        """The threshold as a number of workers."""
        if isinstance(self.at, bool) or not isinstance(self.at, int) or self.at < 1:
            raise ConfigError(f"at={self.at!r} is not a number of crashed workers; write 1 or more")
        return self.at


def _check_seconds(name: str, value: object, *, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < float("inf"):
        raise ConfigError(f"{name}={value!r} is not a number of seconds of at least {least:g}")


# -- the value of a rule --------------------------------------------------------------------


class WatchedValue:
    """The value of one rule over time."""

    def __init__(self, rule: AlertRule) -> None:
        self._rule = rule
        self._lowest: deque[tuple[float, float]] = deque()
        """Times and levels within ``within_s`` that were not followed by a lower level, so that the first is the
        lowest."""

    def value(self, figures: Mapping[str, float], now_s: float) -> float | None:
        """The value now; None if these figures do not include it."""
        rule = self._rule
        if rule.on == "gpu-idle":
            return _gpu_idle(figures)
        if rule.on not in _GROWTHS:
            return figures.get(_LEVELS[rule.on])
        level = figures.get(_GROWTHS[rule.on])
        return None if level is None else self._growth(level, now_s)

    def threshold(self, figures: Mapping[str, float]) -> float | None:
        """The threshold in the unit of the value; None if it is a share of a limit that is unknown."""
        rule = self._rule
        if rule.on == "restarts":
            return float(rule.count)
        size = rule.size
        if size.fixed_bytes is not None:
            return float(size.fixed_bytes)
        assert size.fraction is not None
        if rule.on in _SHARES:
            return size.fraction
        limit = figures.get("limit_bytes")
        return size.fraction * limit if limit else None

    def _growth(self, level: float, now_s: float) -> float:
        lowest = self._lowest
        while lowest and lowest[-1][1] >= level:
            lowest.pop()
        lowest.append((now_s, level))
        while lowest[0][0] < now_s - self._rule.within_s:
            lowest.popleft()
        return level - lowest[0][1]


def in_words(rule: AlertRule, value: float, threshold: float, figures: Mapping[str, float], *, whose: str) -> str:
    """Fact, numbers, threshold; ``whose`` is the owner of the memory: "this training", "process 4242"."""
    if rule.on in ("memory", "tree"):
        limit = figures.get("limit_bytes")
        of = f" of {format_bytes(limit)} ({value / limit:.1%})" if limit else ""
        subject = "memory in use is" if rule.on == "memory" else f"{whose} has"
        return f"{subject} {format_bytes(value)}{of}, alert at {format_bytes(threshold)}"
    within = duration(rule.within_s)
    if rule.on == "swap":
        return f"swap in use has grown by {format_bytes(value)} within {within}, alert at {format_bytes(threshold)}"
    if rule.on == "restarts":
        workers = f"{value:.0f} worker" + "s" * (value != 1)
        return f"{workers} of {whose} crashed within {within}, alert at {threshold:.0f}"
    doing = "waits for data" if rule.on == "stall" else "leaves its GPUs idle"
    return f"{whose} {doing} {value:.0%} of the time, alert at {threshold:.0%}"


def _gpu_idle(figures: Mapping[str, float]) -> float | None:
    """The share of the time that the GPUs with memory of this process are idle; if these are unknown, of all GPUs."""
    gpus = [each for number in range(_MOST_GPUS) if (each := part(figures, f"gpu.{number}"))]
    mine = [each for each in gpus if each.get("reserved_bytes")] or gpus
    busy = [each["busy_fraction"] for each in mine if "busy_fraction" in each]
    return 1 - sum(busy) / len(busy) if busy else None


# -- raised, over ---------------------------------------------------------------------------

Transition = Literal["raised", "cleared"]


@dataclass(frozen=True, kw_only=True)
class AlertState:
    """The state of one alert."""

    is_raised: bool = False
    turning_s: float | None = None
    """Since when, without interruption, the value has been in the range that would change ``is_raised``; None if it is
    not in that range."""


def next_state(
    state: AlertState, rule: AlertRule, value: float | None, threshold: float | None, now_s: float
) -> tuple[AlertState, Transition | None]:
    """The state after one sample, and what has changed. After an unknown value, the time for a change counts from
    zero."""
    is_raised = state.is_raised
    if value is None or threshold is None:
        return AlertState(is_raised=is_raised), None
    # An alert is over only when the value is well below the threshold: otherwise a value that fluctuates around the
    # threshold would raise an alert every few seconds.
    is_turning = value < threshold * (1 - rule.margin) if is_raised else value >= threshold
    if not is_turning:
        return AlertState(is_raised=is_raised), None
    since_s = now_s if state.turning_s is None else state.turning_s
    if now_s - since_s < (rule.calm_s if is_raised else rule.for_s):
        return AlertState(is_raised=is_raised, turning_s=since_s), None
    return AlertState(is_raised=not is_raised), "cleared" if is_raised else "raised"
