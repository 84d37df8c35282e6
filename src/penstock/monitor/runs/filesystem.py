"""What kind of file system a folder is on.

In:  /proc/self/mountinfo.
Out: whether processes can share memory through a file there, which SQLite's write-ahead log needs.
Runs in: trainer.
"""

from __future__ import annotations

import os
from pathlib import Path

_NETWORKS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "9p", "fuse", "ceph", "afs", "glusterfs", "virtiofs")


def shares_memory(folder: Path, *, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """False on a network, and where there may be one behind: machines do not see each other's memory."""
    try:
        device = os.stat(folder).st_dev  # noqa: PTH116 - the number is all that is wanted
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return True
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) > 2 and fields[2] == number:
            return not after.startswith(_NETWORKS)
    return True
