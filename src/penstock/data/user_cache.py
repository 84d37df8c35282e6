"""The folder where penstock keeps what it can make again.

In:  the environment.
Out: a folder of this user.
Runs in: trainer, worker, command line.
"""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_folder(part: str) -> Path:
    """``$XDG_CACHE_HOME/penstock/part``, or that below ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path there is to be ignored, by its own specification.
    base = Path(root) if root.startswith("/") else Path.home() / ".cache"
    return base / "penstock" / part
