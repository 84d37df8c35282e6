"""Results of earlier tunings, which are kept in the user's state folder.

In:  the environment; a result to keep.
Out: a file ``tune/NAME-TIME.json``, and the earlier records of the same dataset.
Runs in: command line.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.drafts import open_draft
from penstock.environment import private_folder, state_folder
from penstock.errors import PenstockError


def identity(target: str) -> str:
    """A name for the dataset that does not depend on the current folder."""
    where, _, attribute = target.rpartition(":")
    return f"{Path(where).resolve()}:{attribute}" if where.endswith(".py") else target


def keep(target: str, answer: Mapping[str, Any]) -> Path:
    """Write a record. Raises PenstockError if the record cannot be written."""
    now = datetime.now(UTC)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", target.rpartition("/")[2]).strip("-.")
    folder = state_folder() / "tune"
    record = {"dataset": identity(target), "time": now.isoformat(timespec="seconds"), **answer}
    file = folder / f"{name}-{now:%Y%m%dT%H%M%S}-{os.getpid()}.json"
    try:
        private_folder(folder)
        # The rename makes the whole record appear at once, so that no reader finds half a record.
        draft = file.with_suffix(".part")
        with open_draft(draft) as page:
            page.write(json.dumps(record, indent=2).encode())
        draft.replace(file)
    except OSError as refused:
        raise PenstockError(
            f"the measurements cannot be written to {folder}: {refused.strerror}; "
            "set PENSTOCK_HOME to a folder that you can write to"
        ) from None
    return file


def earlier(target: str) -> list[dict[str, Any]]:
    """The records of this dataset, oldest first; files that are not records are skipped."""
    wanted, found = identity(target), []
    for file in (state_folder() / "tune").glob("*.json"):
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(record, dict) and record.get("dataset") == wanted:
            found.append({**record, "file": str(file)})
    return sorted(found, key=lambda record: str(record.get("time", "")))
