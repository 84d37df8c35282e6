"""A draft: a file that is written under a temporary name before it replaces the requested file.

In:  a path for the draft, in the folder of the file that the draft will replace.
Out: a new, empty file at that path; never a file that another user put there, nor the target of a link.
Runs in: trainer, worker, command line.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_FLAGS = _NEW | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def open_draft(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Open a new file for writing. A file or a link that a killed program left at ``path`` is deleted; the target of
    the link is kept."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, _FLAGS, 0o666), "wb", buffering)
