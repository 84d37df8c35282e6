"""`pack`: a dataset rewritten into tar shards or memory-mappable Arrow files.

In:  a dataset, a folder of files, Parquet files or tar shards; a folder to write to.
Out: shards, and a manifest of what they hold.
Runs in: command line or trainer; shards are written by processes it starts.

Which samples a shard holds is decided before the first is written, so the result does not depend on who writes what.
Each shard that was written and read again is noted in a journal; whatever ends the program, the next call goes on
there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from penstock.data.pack_manifest import JOURNAL, MANIFEST
from penstock.data.pack_sources import PackSource, source_of
from penstock.data.pack_workers import LOOK, Crew, PackJob, shard_name
from penstock.data.shard_writers import PARTIAL, ShardRecord, find_fault, sync_folder
from penstock.data.sources import is_remote
from penstock.errors import ConfigError, DataError
from penstock.units import parse_bytes

FORMATS = ("tar", "arrow")
_VERSION = 1
_OWN_PARTIAL = re.compile(rf"(\d{{5,}}\.(tar|arrow)\.\d+|{re.escape(MANIFEST)}){re.escape(PARTIAL)}")

Progress = Callable[[int, int], None]
"""(samples done, samples); called several times a second, and may raise to stop."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """What ``pack`` did."""

    samples: int
    bytes: int
    shards: int
    kept: int
    """Shards that were there already, and are what they should be."""
    skipped: list[str]
    """Files of a folder that are no part of a sample: hidden ones, and those without an extension."""
    seconds: float


def pack(
    source: Any,
    destination: str | os.PathLike[str],
    *,
    to: str = "arrow",
    shard_bytes: object = "256MB",
    workers: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Packed:
    """Write the samples of ``source`` into shards in the folder ``destination``, as ``to`` ("tar" or "arrow").

    ``shard_bytes``: about how large a shard is. ``workers``: processes; by default one per CPU.
    Called again with the same arguments it keeps the shards that are finished. ``force``: starts over whatever
    ``penstock pack`` wrote there before.
    """
    began_s = time.monotonic()
    if to not in FORMATS:
        raise ConfigError(f"to={to!r} is none of {', '.join(FORMATS)}")
    if workers is not None and workers < 1:
        raise ConfigError(f"workers={workers} cannot write anything; give at least 1")
    limit_bytes = parse_bytes(shard_bytes, name="shard_bytes")
    folder = Path(destination)
    _refuse_own_output(source, folder)
    found = source_of(source, to=to)
    _refuse_own_shards(found, folder)
    if not found.count:
        raise DataError(f"{found.description} has no samples, so there is nothing to pack")
    with _locked(folder) as journal:
        job = _plan(found, folder, to, limit_bytes, journal.fd, progress)
        plan = {
            "version": _VERSION, "source": found.description, "fingerprint": found.fingerprint, "format": to,
            "shard_bytes": limit_bytes, "samples": found.count, "samples_per_shard": job.samples_per_shard,
        }  # fmt: skip
        records = _resume(journal, folder, plan, force=force)
        try:
            kept = _write(job, records, journal, workers or _cpus(), progress)
            whole = [records[shard] for shard in range(job.shards)]
            _finish(folder, plan, whole)
        finally:
            _remove_partials(folder)
    return Packed(
        samples=sum(record.samples for record in whole),
        bytes=sum(record.bytes for record in whole),
        shards=len(whole),
        kept=kept,
        skipped=found.skipped,
        seconds=time.monotonic() - began_s,
    )


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _refuse_own_output(source: Any, folder: Path) -> None:
    if isinstance(source, (str, os.PathLike)) and "://" not in os.fspath(source):
        read, written = Path(source).resolve(), folder.resolve()
        if read == written or read in written.parents or written in read.parents:
            raise ConfigError(f"{os.fspath(source)} and {folder} lie in each other: shards would be their own source")


def _refuse_own_shards(source: PackSource, folder: Path) -> None:
    written = folder.resolve()
    for location in source.locations:
        path = Path(location.removeprefix("file://"))
        if not is_remote(location) and (written in path.resolve().parents or written == path.parent.resolve()):
            raise ConfigError(
                f"{source.description} reads {location}, which lies in {folder}: shards would be their own source; "
                "choose another folder"
            )


def _plan(
    source: PackSource, folder: Path, to: str, limit_bytes: int, lock_fd: int, progress: Progress | None
) -> PackJob:
    """How many samples a shard gets, from a few of them."""
    job, probe = PackJob(source=source, folder=folder, to=to, samples_per_shard=1, probe=None), None
    if source.tables is not None:
        sample_bytes = source.tables.row_bytes()
    else:
        with contextlib.closing(Crew(job, 1, lock_fd)) as crew:
            for _, _, found in crew.run([LOOK]):
                probe = found or probe
                if progress is not None:
                    progress(0, source.count)
        assert probe is not None
        sample_bytes = probe.sample_bytes
    return replace(job, samples_per_shard=max(1, int(limit_bytes / max(1.0, sample_bytes))), probe=probe)


def _write(
    job: PackJob, records: dict[int, ShardRecord], journal: _Journal, workers: int, progress: Progress | None
) -> int:
    """Write what is missing; returns how many shards were there already."""
    total = job.source.count
    done = dict.fromkeys(range(job.shards), 0)

    def show() -> None:
        if progress is not None:
            progress(sum(done.values()), total)

    show()
    for shard, record in list(records.items()):
        is_ours = 0 <= shard < job.shards and record.name == job.name(shard)
        if not is_ours or find_fault(job.folder / record.name, record) is not None:
            del records[shard]
        else:
            done[shard] = record.samples
        show()
    kept = len(records)
    missing = [shard for shard in range(job.shards) if shard not in records]
    if not missing:
        return kept
    with contextlib.closing(Crew(job, min(workers, len(missing)), journal.fd)) as crew:
        for shard, samples, record in crew.run(missing):
            if shard is not None:
                done[shard] = samples
            if shard is not None and record is not None:
                done[shard] = record.samples
                journal.note(shard, record)
                records[shard] = record
            show()
    return kept


# -- what is known of the folder ------------------------------------------------------------------


class _Journal:
    """The plan, then a line per finished shard. It is locked while a program packs into the folder."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    def read(self) -> list[Any]:
        """Its lines. One that a program was killed over, or that says nothing, is removed with all after it."""
        lines, end = [], 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                lines.append(json.loads(line) if line.endswith(b"\n") else None)
            except ValueError:
                break
            if not isinstance(lines[-1], dict):
                lines.pop()
                break
            end += len(line)
        os.ftruncate(self.fd, end)
        return lines

    def begin(self, plan: dict[str, Any]) -> None:
        with _writing(self.path):
            os.ftruncate(self.fd, 0)
        self._append(plan)

    def note(self, shard: int, record: ShardRecord) -> None:
        self._append({"shard": shard, **asdict(record)})

    def _append(self, line: Any) -> None:
        text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        with _writing(self.path):
            if os.write(self.fd, text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self.fd)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise DataError(f"{path} cannot be written: {problem.strerror}. Mend that, then run this again") from problem


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[_Journal]:
    path = folder / JOURNAL
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as problem:
        raise ConfigError(f"{folder} cannot be written to: {problem.strerror}") from problem
    try:
        with contextlib.suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(f"another program is packing into {folder}; wait for it, or end it") from None
            if not path.exists() or path.stat().st_ino != os.fstat(fd).st_ino:
                raise ConfigError(f"another program has just packed into {folder}; run this again")
        try:
            yield _Journal(path, fd)
        finally:
            if path.exists() and not path.stat().st_size:
                path.unlink()
    finally:
        os.close(fd)


def _resume(journal: _Journal, folder: Path, plan: dict[str, Any], *, force: bool) -> dict[int, ShardRecord]:
    """Records of the shards that an earlier call with the same plan finished."""
    before, records = _known(journal, folder)
    shards = [path for path in folder.iterdir() if path.suffix in (".tar", ".arrow")]
    finished = {record.name for record in records.values()}
    if before is not None and before != plan and not force:
        changed = [name for name in plan if before.get(name) != plan[name]]
        told = "; ".join(f"{name} was {before.get(name)!r} and is {plan[name]!r}" for name in changed[:3])
        raise ConfigError(f"{folder} holds shards of another packing: {told}. Choose another folder, or --force")
    strange = sorted(
        path.name for path in shards if path.is_dir() or not (path.name in finished or _is_planned(path, before))
    )
    if strange:
        raise ConfigError(
            f"{folder} holds {strange[0]}, which no manifest of penstock pack tells of, and which would be read as one "
            "of the new shards; choose an empty folder, or remove it if it is an old shard"
        )
    if force or before is None:
        with _writing(folder):
            for path in shards:
                path.with_name(f"{path.name}.penstock-index").unlink(missing_ok=True)
                path.unlink()
            (folder / MANIFEST).unlink(missing_ok=True)
        journal.begin(plan)
        return {}
    return records


def _is_planned(path: Path, plan: dict[str, Any] | None) -> bool:
    """Whether a packing would have come to a shard of this name; one that was killed may not have noted it."""
    if plan is None or not re.fullmatch(r"[0-9]{5,20}", path.stem):
        return False
    try:
        shard, shards = int(path.stem), -(-plan["samples"] // plan["samples_per_shard"])
        return shard < shards and path.name == shard_name(shard, shards, plan["format"])
    except (KeyError, TypeError, ZeroDivisionError):
        return False


def _remove_partials(folder: Path) -> None:
    """What this program, or one that was killed, did not finish; nothing that others may have called so."""
    for left in folder.iterdir():
        if _OWN_PARTIAL.fullmatch(left.name) and not left.is_dir():
            left.unlink(missing_ok=True)


def _known(journal: _Journal, folder: Path) -> tuple[dict[str, Any] | None, dict[int, ShardRecord]]:
    """The plan of the packing that was here before, and its finished shards."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        plan, lines = {name: value for name, value in manifest.items() if name != "shards"}, manifest["shards"]
        return plan, {shard: ShardRecord(**line) for shard, line in enumerate(lines)}
    except FileNotFoundError:
        pass
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"{folder / MANIFEST} is no manifest of penstock pack; choose another folder") from None
    lines = journal.read()
    if not lines:
        return None, {}
    try:
        return lines[0], {line.pop("shard"): ShardRecord(**line) for line in lines[1:]}
    except (TypeError, KeyError, AttributeError):
        raise ConfigError(f"{journal.path} is no journal of penstock pack; choose another folder") from None


def _finish(folder: Path, plan: dict[str, Any], records: list[ShardRecord]) -> None:
    """The manifest tells that all is there; only then the journal goes."""
    text = json.dumps({**plan, "shards": [asdict(record) for record in records]}, indent=2) + "\n"
    partial = folder / f"{MANIFEST}{PARTIAL}"
    with _writing(folder / MANIFEST):
        with partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / MANIFEST)
        (folder / JOURNAL).unlink(missing_ok=True)
        sync_folder(folder)
