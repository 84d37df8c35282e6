"""`pack` rewrites a dataset into tar shards or Arrow files that can be mapped.

In:  a dataset, a folder of files, Parquet files, tar shards or Arrow files; a folder to write to.
Out: shards, and a manifest of what they hold.
Runs in: command line or trainer; processes that `pack` starts write the shards.

The samples of each shard are decided before the first shard is written, so the result does not depend on which worker
writes which shard. A journal lists each shard once it is written and checked by reading it again; if the program ends
early, the next call continues from there.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.data.pack.job import PackJob
from penstock.data.pack.journal import Journal, Plan, earlier, locked, remove_partials
from penstock.data.pack.shard_writers import ShardRecord, find_fault
from penstock.data.pack.sources import NamedMembers, PackSource, source_of
from penstock.data.pack.workers import PROBE, PackWorkers
from penstock.data.sources import is_remote
from penstock.errors import ConfigError, DataError
from penstock.units import parse_bytes

FORMATS = ("tar", "arrow")
_VERSION = 2

Progress = Callable[[int, int], None]
"""Called with (samples done, all samples) several times a second; it may raise an exception to stop."""


@dataclass(frozen=True, kw_only=True)
class PackResult:
    """What ``pack`` has done."""

    samples: int
    bytes: int
    shards: int
    kept: int
    """Shards that an earlier call had written and that are intact."""
    skipped: list[str]
    """Files of a folder that belong to no sample, such as hidden ones and those without an extension, and folders that
    were left out (hidden ones and links); the names of folders end with a slash."""
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
) -> PackResult:
    """Write the samples of ``source`` into shards in the folder ``destination``; ``to`` is "tar" or "arrow".

    ``shard_bytes``: about how large a shard is. ``workers``: the number of processes; by default one per CPU. A second
    call with the same arguments keeps the shards that are finished. ``force``: start over and replace everything that
    ``penstock pack`` wrote there before.
    """
    began_s = time.monotonic()
    if to not in FORMATS:
        raise ConfigError(f"to={to!r} is not one of {', '.join(FORMATS)}")
    if workers is not None and workers < 1:
        raise ConfigError(f"workers={workers} cannot write anything; give at least 1")
    limit_bytes = parse_bytes(shard_bytes, name="shard_bytes")
    folder = Path(destination)
    _refuse_own_output(source, folder)
    found = source_of(source, to=to)
    _refuse_own_shards(found, folder)
    if not found.count:
        raise DataError(f"{found.description} has no samples, so there is nothing to pack")
    asked = {
        "version": _VERSION, "source": found.description, "fingerprint": found.fingerprint, "format": to,
        "shard_bytes": limit_bytes, "samples": found.count,
    }  # fmt: skip
    with locked(folder) as journal:
        before, records = earlier(journal, asked, force=force)
        job = _plan(found, folder, to, limit_bytes, before, journal, progress)
        _refuse_equal_keys(job)
        plan = {**asked, "samples_per_shard": job.samples_per_shard, "form": job.form}
        if before is None:
            journal.begin(plan)
        try:
            kept = _write(job, records, journal, workers or _cpus(), progress)
            whole = [records[shard] for shard in range(job.shards)]
            journal.finish(plan, whole)
        finally:
            remove_partials(folder)
    return PackResult(
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
            raise ConfigError(
                f"{os.fspath(source)} and {folder} overlap: pack would read the shards it writes; choose another folder"
            )


def _refuse_own_shards(source: PackSource, folder: Path) -> None:
    written = folder.resolve()
    for location in source.locations:
        path = Path(location.removeprefix("file://"))
        if not is_remote(location) and (written in path.resolve().parents or written == path.parent.resolve()):
            raise ConfigError(
                f"{source.description} reads {location}, which is inside {folder}: pack would read what it writes; "
                "choose another folder"
            )


def _refuse_equal_keys(job: PackJob) -> None:
    if not isinstance(job.source.samples, NamedMembers):
        return
    found = job.source.samples.first_alike(job.samples_per_shard)
    if found is not None:
        key, before, after = found
        raise DataError(
            f"{before} ends and {after} begins with a sample whose key is {key!r}: in one new shard, these two "
            "samples would be read as one. Rename one sample, or pack into Arrow files, which keep both"
        )


def _plan(
    source: PackSource,
    folder: Path,
    to: str,
    limit_bytes: int,
    before: Plan | None,
    journal: Journal,
    progress: Progress | None,
) -> PackJob:
    """The number of samples in a shard and their layout, from an earlier call or from a few samples.

    The sizes of samples may differ each time they are read, so the numbers of an earlier call are used again.
    """
    job = PackJob(source=source, folder=folder, to=to, samples_per_shard=1)
    if before is not None:
        try:
            job = replace(job, samples_per_shard=max(1, int(before["samples_per_shard"])), form=str(before["form"]))
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{journal.path} contains no plan; choose another folder, or use --force") from None
        if source.tables is not None or to == "tar":
            return job
    if source.tables is not None:
        return replace(job, samples_per_shard=_samples_in(limit_bytes, source.tables.row_bytes()))
    probe = None
    with contextlib.closing(PackWorkers(job, 1, journal.fd)) as pack_workers:
        for _, _, found in pack_workers.run([PROBE]):
            probe = found or probe
            if progress is not None:
                progress(0, source.count)
    assert probe is not None
    if before is not None:
        return replace(job, layout=probe.layout)
    if probe.is_random:
        warnings.warn(
            f"{type(source.samples).__name__} draws random numbers, and pack stores what it drew: every epoch gets the "
            "same samples. Pack the samples before the random part, and apply that part when you read the shards "
            "(transform=)",
            RuntimeWarning,
            stacklevel=3,
        )
    form = probe.form if to == "tar" and not source.is_raw else ""
    samples_per_shard = _samples_in(limit_bytes, probe.sample_bytes)
    return replace(job, samples_per_shard=samples_per_shard, form=form, layout=probe.layout)


def _samples_in(limit_bytes: int, sample_bytes: float) -> int:
    return max(1, int(limit_bytes / max(1.0, sample_bytes)))


def _write(
    job: PackJob, records: dict[int, ShardRecord], journal: Journal, workers: int, progress: Progress | None
) -> int:
    """Write the missing shards; returns the number of shards that were kept."""
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
    with contextlib.closing(PackWorkers(job, min(workers, len(missing)), journal.fd)) as pack_workers:
        for shard, samples, record in pack_workers.run(missing):
            if shard is not None:
                done[shard] = samples
            if shard is not None and record is not None:
                done[shard] = record.samples
                journal.note(shard, record)
                records[shard] = record
            show()
    return kept
