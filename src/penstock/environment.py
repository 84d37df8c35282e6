"""The folder where penstock keeps what it can make again.

In:  the environment.
Out: a folder of this user.
Runs in: trainer, worker, command line.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def user_cache_folder(part: str) -> Path:
    """``$XDG_CACHE_HOME/penstock/part``, or that below ``~/.cache``; who has no home keeps it among temporary files."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path there is to be ignored, by its own specification.
    if root.startswith("/"):
        return Path(root) / "penstock" / part
    try:
        return Path.home() / ".cache" / "penstock" / part
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}" / part
