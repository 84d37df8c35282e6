"""The source of `penstock pack`: a dataset, a folder of files, Parquet files, tar shards or Arrow files.

In:  a dataset, or a path.
Out: a ``PackSource``: samples by number, their kind (values, files or rows of tables), and a fingerprint.
Runs in: command line, pack's workers.
"""

from __future__ import annotations

import glob
import hashlib
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from torch.utils.data import ConcatDataset, IterableDataset, Subset

from penstock.cache.fingerprint import fingerprint_of
from penstock.data.arrow.dataset import ArrowDataset
from penstock.data.pack.folders import SUFFIXES, FolderFiles, kind_in, kind_of_name, refuse_compressed, walk
from penstock.data.pack.tables import ParquetRows, ParquetTables
from penstock.data.parquet.dataset import ParquetDataset
from penstock.data.sources import is_remote, locate, open_source
from penstock.data.tar.brace_names import expand_braces
from penstock.data.tar.dataset import TarDataset
from penstock.data.tar.index import KEY, NAMES
from penstock.data.tar.members import TarMember
from penstock.data.tar.members import walk as members_of
from penstock.errors import ConfigError, DataError, PenstockError

_MAY_BE = (
    "SRC may be a dataset (module:attribute or file.py:attribute), a folder of files, or Parquet files, tar shards or "
    "Arrow files: one file, a glob, a name with braces such as shards-{000..009}.tar, or a folder of them"
)


@dataclass(frozen=True, kw_only=True)
class PackSource:
    """The samples to pack. It is pickled to the workers."""

    description: str
    """What the source is, in words for messages and the manifest."""
    fingerprint: str
    """A text that changes when the samples change."""
    samples: Any
    """A sequence of samples."""
    count: int
    is_raw: bool = False
    """Whether each sample is a dict of a key and the bytes of its files, by extension."""
    tables: ParquetTables | None = None
    """The same rows as columns, if they are packed as columns."""
    skipped: list[str] = field(default_factory=list)
    """Files that belong to no sample, and folders that were left out; the names of folders end with a slash."""
    locations: list[str] = field(default_factory=list)
    """Shards and tables that the source reads, as far as penstock can find out."""


def source_of(source: Any, *, to: str) -> PackSource:
    """The PackSource for ``source``, which is a dataset, or a path to files whose names show their kind."""
    if not isinstance(source, (str, os.PathLike)):
        return _dataset_source(source)
    path = os.fspath(source)
    try:
        return _path_source(path.removeprefix("file://"), to)
    except OSError as problem:
        if isinstance(problem, PenstockError):
            raise
        raise DataError(f"{path} cannot be read: {problem.strerror}") from problem


def _path_source(path: str, to: str) -> PackSource:
    # A file may have this very name, braces included.
    names = [path] if "{" not in path or Path(path).exists() else expand_braces(path)
    kinds = [_kind_of(name) for name in names]
    kind, skipped = kinds[0][0], [left for _, left_out in kinds for left in left_out]
    if len({each for each, _ in kinds}) > 1:
        raise ConfigError(f"{path} names {' and '.join(sorted({each for each, _ in kinds}))}; pack them one by one")
    if kind == "files":
        if len(names) > 1:
            raise ConfigError(f"{path} names {len(names)} folders of files; pack them one by one")
        files = FolderFiles(Path(names[0]))
        return PackSource(
            description=f"files in {path}",
            fingerprint=files.fingerprint,
            samples=files,
            count=len(files),
            is_raw=True,
            skipped=files.skipped,
        )
    samples: Any
    given = names[0] if len(names) == 1 else names
    locations = locate(given, suffixes=SUFFIXES[kind])
    tables, is_raw = None, False
    if kind == "parquet":
        tables = ParquetTables(locations)
        samples = ParquetRows(tables)
    elif kind == "arrow":
        with warnings.catch_warnings():
            # ArrowDataset warns about compressed files with the advice to pack them, which is what happens here.
            warnings.simplefilter("ignore", RuntimeWarning)
            samples = ArrowDataset(given)
    else:
        try:
            samples = TarDataset(given, progress=False)
        except DataError as error:
            raise _without_options(error) from None
        is_raw = samples.form is None
        if is_raw:
            samples = TarDataset(given, decode=False, progress=False)
            samples = NamedMembers(samples) if to == "tar" else samples
    return PackSource(
        description=f"{kind} {path}",
        fingerprint=_fingerprint_of_files(locations),
        samples=samples,
        count=len(samples),
        is_raw=is_raw,
        tables=tables if to == "arrow" else None,
        skipped=skipped,
        locations=locations,
    )


def _dataset_source(dataset: Any) -> PackSource:
    name = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    # torch's class has a __getitem__ that only raises, so an IterableDataset may seem to have both.
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"{name} is an IterableDataset: its samples have no numbers, but shards are ranges of numbered samples. "
            "Pack a dataset that has __getitem__ and __len__, such as the one that this dataset reads"
        )
    if not hasattr(type(dataset), "__getitem__") or not hasattr(type(dataset), "__len__"):
        raise ConfigError(
            f"{name} cannot be packed: shards are ranges of its samples, so it needs __getitem__ and __len__"
        )
    return PackSource(
        description=f"dataset {name}",
        fingerprint=fingerprint_of(dataset),
        samples=dataset,
        count=len(dataset),
        locations=_locations_of(dataset),
    )


def _locations_of(dataset: Any) -> list[str]:
    """Files that penstock's datasets read, also inside a Subset or a ConcatDataset."""
    if isinstance(dataset, TarDataset):
        return dataset.shards
    if isinstance(dataset, ArrowDataset):
        return list(dataset._locations)
    if isinstance(dataset, ParquetDataset):
        return list(dataset._files._locations)
    if isinstance(dataset, ConcatDataset):
        return [location for part in dataset.datasets for location in _locations_of(part)]
    return _locations_of(dataset.dataset) if isinstance(dataset, Subset) else []


def _kind_of(path: str) -> tuple[str, list[str]]:
    """The kind of source at a path, and the names in it that are left out."""
    if not is_remote(path) and Path(path).is_dir():
        names, passed = walk(Path(path))
        kind, left_out = kind_in(path, names)
        return kind, sorted(left_out + passed)
    if is_remote(path) or glob.has_magic(path) or Path(path).exists():
        refuse_compressed(path)
    kind = kind_of_name(path)
    if kind is not None:
        return kind, []
    if is_remote(path):
        names = [PurePosixPath(location).name for location in locate(path, suffixes=("",))]
        kind, left_out = kind_in(path, names)
        if kind != "files":
            return kind, left_out
        raise ConfigError(
            f"{path} contains no Parquet, tar or Arrow files; a folder of other files must be on this machine"
        )
    what = f"{path} cannot be packed" if Path(path).exists() else f"there is no {path}"
    raise ConfigError(f"{what}. {_MAY_BE}")


def _fingerprint_of_files(locations: list[str]) -> str:
    taken = hashlib.blake2b(digest_size=16)
    for location in locations:
        source = open_source(location)
        taken.update(f"{location}\0{source.version}\n".encode("utf-8", "surrogateescape"))
        source.close()
    return taken.hexdigest()


def _without_options(error: DataError) -> DataError:
    """The error with advice that fits ``penstock pack``, which has no ``on_error``."""
    text = str(error)
    what, is_compressed, _ = text.partition(": decompress it")
    if is_compressed:
        return DataError(f"{what}. Unpack it first; for gzip: gzip -dc OLD.tar > NEW.tar")
    what, is_damage, _ = text.partition(" (on_error=")
    return DataError(f"{what}; write this shard again, or pack without it") if is_damage else error


class NamedMembers:
    """Samples of tar shards as bytes, under their original extensions, which ``TarDataset`` puts in lower case."""

    def __init__(self, dataset: TarDataset) -> None:
        self._dataset = dataset
        self._shard, self._extensions = -1, dict[int, str]()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = self._dataset._catalog.find(index)
        if found.shard != self._shard:
            self._extensions = self._capitals_of(found.shard)
            self._shard = found.shard
        data = self._dataset._raw(found)
        names = [self._extensions.get(at, name) for at, name in zip(found.offsets, found.suffixes, strict=True)]
        return {KEY: found.key, **dict(zip(names, data, strict=True))}

    def first_alike(self, samples_per_shard: int) -> tuple[str, str, str] | None:
        """A key with which one shard ends and the next shard begins, and these two shards, if both samples would go
        into one new shard, where they would be read as one sample; else None."""
        catalog = self._dataset._catalog
        for place in sorted(set(catalog.blocks[1:-1].tolist()) - {0, len(self)}):
            before, after = catalog.find(place - 1), catalog.find(place)
            if before.key == after.key and place % samples_per_shard:
                return after.key, catalog.locations[before.shard], catalog.locations[after.shard]
        return None

    def _capitals_of(self, shard: int) -> dict[int, str]:
        """Extensions with capital letters, by the offset of the member's data."""
        source = self._dataset._open.get(shard)
        names = (
            (one.offset, one.name.decode(*NAMES).rpartition("/")[2].partition(".")[2])
            for one in members_of(source.read, source.size_bytes)
            if isinstance(one, TarMember)
        )
        return {offset: extension for offset, extension in names if extension != extension.lower()}
