"""The folders of recorded runs, which only this user can enter.

In:  the environment.
Out: paths; the folders are made when a run is recorded.
Runs in: trainer, command line.
"""

from __future__ import annotations

import os
from pathlib import Path

from penstock.environment import private_folder, runtime_folder, user_id

LONGEST_SOCKET_PATH_BYTES = 100
"""Less than any kernel allows: Linux allows 107, other kernels 103."""


def runs_folder(home: Path) -> Path:
    return home / "runs"


def socket_path(home: Path, run_id: str) -> Path:
    """The path of a run's socket: in its home, or in a folder with a short path if the path in the home is too long for
    a socket.

    Makes the folder. Raises PenstockError if the folder cannot be made or belongs to another user.
    """
    wanted = home / "sockets" / run_id
    if len(os.fsencode(wanted)) <= LONGEST_SOCKET_PATH_BYTES:
        private_folder(wanted.parent)
        return wanted
    base = runtime_folder()
    is_short = base is not None and len(str(base)) < 60
    folder = base / "penstock-runs" if base is not None and is_short else Path("/tmp") / f"penstock-runs-{user_id()}"
    # Any user can write to /tmp: the owner of the folder could put another socket there.
    return private_folder(folder, is_in_public=True) / run_id
