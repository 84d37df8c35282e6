"""Where runs are kept: one folder of this user's, that nobody else can look into.

In:  the environment.
Out: paths; the folders themselves once somebody writes.
Runs in: trainer, command line.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from penstock.environment import runtime_folder, user_id
from penstock.errors import PenstockError

LONGEST_SOCKET_PATH_BYTES = 100
"""The kernel takes 107, some 103."""


def runs_folder(home: Path) -> Path:
    return home / "runs"


def make_private(folder: Path) -> Path:
    """Make a folder only this user can enter. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def socket_path(home: Path, run_id: str) -> Path:
    """Where a run's socket goes: in its home, or, where that path is too long for a socket, in a short one.

    Makes the folder. Raises OSError, or PenstockError where another user has been there first.
    """
    wanted = home / "sockets" / run_id
    if len(os.fsencode(wanted)) <= LONGEST_SOCKET_PATH_BYTES:
        make_private(wanted.parent)
        return wanted
    base = runtime_folder()
    is_short = base is not None and len(str(base)) < 60
    folder = base / "penstock-runs" if base is not None and is_short else Path("/tmp") / f"penstock-runs-{user_id()}"
    make_private(folder)
    found = folder.lstat()
    # /tmp is everybody's: who made the folder first could put a socket of his own there.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user_id() or found.st_mode & 0o077:
        raise PenstockError(f"{folder} must be a directory that belongs to you and nobody else can read; remove it")
    return folder / run_id
