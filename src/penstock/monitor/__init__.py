"""The monitor: records a training while it runs, for people and for other tools.

Public names load on first use, so that reading a record does not import the code that writes one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.monitor.alerts.rules import AlertRule, Command, GiveBack, Log, Webhook
    from penstock.monitor.export.sinks import Call, TensorBoard, WandB
    from penstock.monitor.monitor import Monitor

_LAZY = {
    "AlertRule": "alerts.rules",
    "Call": "export.sinks",
    "Command": "alerts.rules",
    "GiveBack": "alerts.rules",
    "Log": "alerts.rules",
    "Monitor": "monitor",
    "TensorBoard": "export.sinks",
    "WandB": "export.sinks",
    "Webhook": "alerts.rules",
}
"""Public name -> the file that defines it."""

__all__ = ["AlertRule", "Call", "Command", "GiveBack", "Log", "Monitor", "TensorBoard", "WandB", "Webhook"]


def __getattr__(name: str) -> object:
    file = _LAZY.get(name)
    if file is None:
        raise AttributeError(f"module 'penstock.monitor' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"penstock.monitor.{file}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
