"""Warnings that arise inside the engine, kept until the training thread can give them to the user.

In:  texts, from any thread, usually under the engine's lock.
Out: warnings, given in next(). A filter that turns warnings into exceptions then raises between two batches.
Runs in: trainer.
"""

from __future__ import annotations

import sys
import warnings
from collections import deque
from pathlib import Path

import torch.utils.data

_NOT_THE_USERS = (str(Path(__file__).parents[1]), str(Path(torch.utils.data.__file__).parent))


class Notices:
    def __init__(self) -> None:
        self.texts: deque[str] = deque()

    def add(self, text: str) -> None:
        self.texts.append(text)

    def give(self) -> None:
        """Warn, with the user's line as the place. The training thread calls this without the lock."""
        while self.texts:
            warnings.warn(self.texts.popleft(), RuntimeWarning, stacklevel=_users_level())


def _users_level() -> int:
    """The ``stacklevel`` with which the caller's warning points to the frame that called penstock."""
    frame, level = sys._getframe(1), 1
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    return level
