"""A file that is written under another name before it replaces the one that was asked for.

In:  a path beside the file that it will replace.
Out: a new, empty file there; never one that another user put there, nor the target of a link.
Runs in: trainer, worker, command line.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_FLAGS = _NEW | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def open_draft(path: Path, *, buffering: int = -1) -> BinaryIO:
    """A new file for writing. What a killed program left under this name is deleted; a link is, not its target."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, _FLAGS, 0o666), "wb", buffering)
