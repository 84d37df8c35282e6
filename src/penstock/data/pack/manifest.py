"""Files that ``penstock pack`` writes beside its shards: a journal while it works, then a manifest of all shards.

In:  a folder.
Out: whether all its shards are there.
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
    """Refuse a folder that is only partly packed: it would look like a smaller dataset."""
    if not isinstance(path, (str, os.PathLike)) or is_remote(os.fspath(path)):
        return
    folder = Path(path).expanduser()
    try:
        shards = json.loads((folder / MANIFEST).read_bytes())["shards"]
        missing = [shard["name"] for shard in shards if not (folder / shard["name"]).exists()]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise DataError(f"{folder / MANIFEST} is not a manifest of penstock pack; pack again with --force") from None
    except OSError:
        if (folder / JOURNAL).exists():
            raise DataError(f"{folder} is only partly packed; run the same penstock pack command again") from None
        return
    if missing:
        raise DataError(f"{folder} lacks {len(missing)} of {len(shards)} shards, such as {missing[0]}; pack again")
