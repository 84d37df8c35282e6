"""What ``penstock pack`` leaves beside its shards: a journal while it is at work, a manifest when all is there.

In:  a folder.
Out: whether what was packed into it is whole.
Runs in: trainer, command line.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from penstock.data.sources import is_remote
from penstock.errors import DataError

MANIFEST = "penstock-pack.json"
JOURNAL = "penstock-pack.journal"


def check_whole(path: Any) -> None:
    """Refuse a folder that was packed in part: it would pass for a smaller dataset."""
    if not isinstance(path, (str, os.PathLike)) or is_remote(os.fspath(path)):
        return
    folder = Path(path).expanduser()
    try:
        shards = json.loads((folder / MANIFEST).read_bytes())["shards"]
        missing = [shard["name"] for shard in shards if not (folder / shard["name"]).exists()]
    except (ValueError, TypeError, KeyError):
        raise DataError(f"{folder / MANIFEST} is no manifest of penstock pack; pack again, with --force") from None
    except OSError:
        if (folder / JOURNAL).exists():
            raise DataError(f"{folder} is not packed to its end; run the same penstock pack again") from None
        return
    if missing:
        raise DataError(f"{folder} has lost {len(missing)} of {len(shards)} shards, such as {missing[0]}; pack again")
