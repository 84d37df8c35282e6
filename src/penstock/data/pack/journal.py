"""The state of a folder that `penstock pack` writes to: the arguments of the call, and which shards are finished.

In:  a folder.
Out: a journal, locked while a program packs there; an earlier packing to continue; at the end, a manifest.
Runs in: command line or trainer.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.data.pack.job import shard_name
from penstock.data.pack.manifest import JOURNAL, MANIFEST
from penstock.data.pack.shard_writers import PARTIAL, ShardRecord, sync_folder
from penstock.drafts import open_draft
from penstock.errors import ConfigError, DataError

_OWN_PARTIAL = re.compile(rf"(\d{{5,}}\.(tar|arrow)\.\d+|{re.escape(MANIFEST)}){re.escape(PARTIAL)}")
_SHARD_SUFFIXES = (".tar", ".arrow")
_LOCK_PATIENCE_S = 2.0
"""How long to wait for the lock: a worker that was forked just before its program was killed holds it for a moment."""

Plan = dict[str, Any]
"""The arguments of the call; once packing has begun, also ``samples_per_shard`` and the ``form`` of tar shards."""


class Journal:
    """A file with the plan, then a line for each finished shard."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    def read(self) -> list[Any]:
        """The lines. An incomplete or unreadable line is removed with all lines after it."""
        lines, end = [], 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                lines.append(json.loads(line) if line.endswith(b"\n") else None)
            except (ValueError, RecursionError):
                break
            if not isinstance(lines[-1], dict):
                lines.pop()
                break
            end += len(line)
        os.ftruncate(self.fd, end)
        return lines

    def begin(self, plan: Plan) -> None:
        """Start over: delete the shards of an earlier packing and write the plan."""
        folder = self.path.parent
        with writing(folder):
            for path in _shards_in(folder):
                path.with_name(f"{path.name}.penstock-index").unlink(missing_ok=True)
                path.unlink()
            (folder / MANIFEST).unlink(missing_ok=True)
        with writing(self.path):
            os.ftruncate(self.fd, 0)
        self._append(plan)

    def note(self, shard: int, record: ShardRecord) -> None:
        self._append({"shard": shard, **asdict(record)})

    def finish(self, plan: Plan, records: list[ShardRecord]) -> None:
        """Write the manifest, which says that all shards are there; delete the journal after that."""
        folder = self.path.parent
        text = json.dumps({**plan, "shards": [asdict(record) for record in records]}, indent=2) + "\n"
        partial = folder / f"{MANIFEST}{PARTIAL}"
        with writing(folder / MANIFEST):
            with open_draft(partial) as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            partial.replace(folder / MANIFEST)
            self.path.unlink(missing_ok=True)
            sync_folder(folder)

    def _append(self, line: Any) -> None:
        text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        with writing(self.path):
            if os.write(self.fd, text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self.fd)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise DataError(f"{path} cannot be written: {problem.strerror}. Fix that, then run this again") from problem


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[Journal]:
    path = folder / JOURNAL
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as problem:
        raise ConfigError(f"{folder} cannot be written to: {problem.strerror}") from problem
    try:
        with contextlib.suppress(ImportError):
            _lock(fd, folder)
            if not path.exists() or path.stat().st_ino != os.fstat(fd).st_ino:
                raise ConfigError(f"another program has just packed into {folder}; run this again")
        try:
            yield Journal(path, fd)
        finally:
            if path.exists() and not path.stat().st_size:
                path.unlink()
    finally:
        os.close(fd)


def _lock(fd: int, folder: Path) -> None:
    import fcntl

    until_s = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until_s:
                raise ConfigError(f"another program is packing into {folder}; wait for it, or end it") from None
        except OSError as problem:
            warnings.warn(
                f"{folder} is on a file system without locks ({problem.strerror}): nothing prevents a second program "
                "from packing into it at the same time",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        time.sleep(0.02)


def earlier(journal: Journal, asked: Plan, *, force: bool) -> tuple[Plan | None, dict[int, ShardRecord]]:
    """The plan of an earlier call with the same arguments, and its finished shards; no plan means to start over.

    Raises ConfigError if the folder holds anything that does not belong to this packing.
    """
    folder = journal.path.parent
    before, records = _known(journal, folder)
    if before is not None and not force:
        _compare(folder, before, asked)
    finished = {record.name for record in records.values()}
    strange = sorted(
        path.name
        for path in _shards_in(folder)
        if path.is_dir() or not (path.name in finished or _is_planned(path, before))
    )
    if strange:
        raise ConfigError(
            f"{folder} holds {strange[0]}, which no manifest of penstock pack lists and which would be read as one of "
            "the new shards; choose an empty folder, or delete the file if it is an old shard"
        )
    if before is None:
        _refuse_strangers(folder)
    return (None, {}) if force else (before, records)


def _compare(folder: Path, before: Plan, asked: Plan) -> None:
    changed = [name for name in asked if before.get(name) != asked[name]]
    if not changed:
        return
    if "version" in changed:
        why = "another version of penstock packed them"
    elif changed == ["fingerprint"]:
        why = f"{asked['source']} has changed since: its files, its code or what it was made with"
    else:
        # The fingerprint changes with everything else and means nothing to people.
        shown = [name for name in changed if name != "fingerprint"]
        why = "; ".join(f"{name} was {before.get(name)!r} and is {asked[name]!r}" for name in shown[:3])
    raise ConfigError(f"{folder} holds shards of another packing: {why}. Choose another folder, or use --force")


def _refuse_strangers(folder: Path) -> None:
    """Refuse a folder with other files: new shards among such files would be hard to recognise and to remove."""
    strangers = sorted(
        f"{path.name}{'/' if path.is_dir() else ''}"
        for path in folder.iterdir()
        if not path.name.startswith(".") and path.name != JOURNAL and not _is_own_partial(path)
    )
    if strangers:
        others = f" and {len(strangers) - 3:,} more" if len(strangers) > 3 else ""
        raise ConfigError(
            f"{folder} is not empty: it holds {', '.join(strangers[:3])}{others}, which penstock pack did not write; "
            "choose an empty or a new folder"
        )


def _shards_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix in _SHARD_SUFFIXES]


def _is_planned(path: Path, plan: Plan | None) -> bool:
    """Whether the plan has a shard of this name. A killed program may have written the shard without noting that in the
    journal."""
    if plan is None or not re.fullmatch(r"[0-9]{5,20}", path.stem):
        return False
    try:
        shard, shards = int(path.stem), -(-plan["samples"] // plan["samples_per_shard"])
        return shard < shards and path.name == shard_name(shard, shards, plan["format"])
    except (KeyError, TypeError, ZeroDivisionError):
        return False


def remove_partials(folder: Path) -> None:
    """Delete partial files of this program and of killed ones, but no files of other programs with similar names."""
    for left in folder.iterdir():
        if _is_own_partial(left):
            left.unlink(missing_ok=True)


def _is_own_partial(path: Path) -> bool:
    return _OWN_PARTIAL.fullmatch(path.name) is not None and not path.is_dir()


def _known(journal: Journal, folder: Path) -> tuple[Plan | None, dict[int, ShardRecord]]:
    """The plan of the packing in this folder, and its finished shards."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        plan, lines = {name: value for name, value in manifest.items() if name != "shards"}, manifest["shards"]
        return plan, {shard: ShardRecord(**line) for shard, line in enumerate(lines)}
    except FileNotFoundError:
        pass
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ConfigError(f"{folder / MANIFEST} is not a manifest of penstock pack; choose another folder") from None
    lines = journal.read()
    if not lines:
        return None, {}
    try:
        return lines[0], {line.pop("shard"): ShardRecord(**line) for line in lines[1:]}
    except (TypeError, KeyError, AttributeError):
        raise ConfigError(f"{journal.path} is not a journal of penstock pack; choose another folder") from None
