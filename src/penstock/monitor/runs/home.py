"""The folders of recorded runs, which only this user can enter.

In:  the environment.
Out: paths; the folders are made when a run is recorded.
Runs in: trainer, command line.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from penstock.environment import runtime_folder, user_id
from penstock.errors import PenstockError

LONGEST_SOCKET_PATH_BYTES = 100
"""Linux allows 107, other kernels 103."""


def runs_folder(home: Path) -> Path:
    return home / "runs"


def make_private(folder: Path) -> Path:
    """Make a folder that only this user can enter. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def socket_path(home: Path, run_id: str) -> Path:
    """The path of a run's socket: in its home, or in a folder with a short path where that is too long for a socket.

    Makes the folder. Raises OSError, or PenstockError where the folder belongs to another user.
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
    # Any user can write to /tmp: the owner of the folder could put another socket there.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user_id() or found.st_mode & 0o077:
        raise PenstockError(f"{folder} must be a directory of yours that no other user can read; remove it")
    return folder / run_id
