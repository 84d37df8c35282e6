"""What `penstock pack` reads: a dataset, a folder of files, Parquet files or tar shards.

In:  a dataset, or a path.
Out: a ``PackSource``: samples by number, whether they are values, files or rows of tables, and what tells them apart.
Runs in: command line, pack's workers.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from penstock.cache.fingerprint import fingerprint_of
from penstock.data.arrow_dataset import ArrowDataset
from penstock.data.parquet_dataset import SUFFIXES as PARQUET_SUFFIXES
from penstock.data.parquet_dataset import ParquetDataset
from penstock.data.parquet_files import ParquetFiles, arrow
from penstock.data.sources import is_remote, locate, open_source
from penstock.data.tar_dataset import TarDataset
from penstock.data.tar_index import KEY
from penstock.errors import ConfigError, DataError, PenstockError

if TYPE_CHECKING:
    import pyarrow as pa

TAR_SUFFIXES = (".tar",)
_PIECE_ROWS, _PIECE_BYTES = 8192, 8 << 20
"""Read at a time, whichever is less."""


@dataclass(frozen=True, kw_only=True)
class PackSource:
    """Samples to be packed. It goes to workers as it is."""

    description: str
    """For people, and for the manifest."""
    fingerprint: str
    """Another text when the samples are others."""
    samples: Any
    """By number, with a length; None of tables."""
    count: int
    is_raw: bool = False
    """Samples are the bytes of files by extension, and a key."""
    tables: ParquetTables | None = None
    skipped: list[str] = field(default_factory=list)
    """Files that are no part of a sample."""
    locations: list[str] = field(default_factory=list)
    """Shards and Parquet files it reads, as far as is known."""


def source_of(source: Any, *, to: str) -> PackSource:
    """What ``source`` is: a dataset, or a path to files whose names say what they are."""
    if not isinstance(source, (str, os.PathLike)):
        return _dataset_source(source)
    path = os.fspath(source)
    try:
        return _path_source(path, to)
    except OSError as problem:
        if isinstance(problem, PenstockError):
            raise
        raise DataError(f"{path} cannot be read: {problem.strerror}") from problem


def _path_source(path: str, to: str) -> PackSource:
    kind = _kind_of(path)
    if kind == "files":
        files = FolderFiles(Path(path))
        return PackSource(
            description=f"files in {path}",
            fingerprint=files.fingerprint,
            samples=files,
            count=len(files),
            is_raw=True,
            skipped=files.skipped,
        )
    locations = locate(path, suffixes=PARQUET_SUFFIXES if kind == "parquet" else TAR_SUFFIXES)
    description, fingerprint = f"{kind} {path}", _fingerprint_of_files(locations)
    if kind == "parquet" and to == "arrow":
        tables = ParquetTables(locations)
        count = int(tables.files.starts[-1])
        return PackSource(
            description=description,
            fingerprint=fingerprint,
            samples=None,
            tables=tables,
            count=count,
            locations=locations,
        )
    samples, is_raw = ParquetDataset(path) if kind == "parquet" else TarDataset(path, progress=False), False
    if isinstance(samples, TarDataset) and samples.form is None:
        samples, is_raw = TarDataset(path, decode=False, progress=False), True
    return PackSource(
        description=description,
        fingerprint=fingerprint,
        samples=samples,
        count=len(samples),
        is_raw=is_raw,
        locations=locations,
    )


def _dataset_source(dataset: Any) -> PackSource:
    name = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
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
    """Files that penstock's datasets read, also below a Subset or a ConcatDataset."""
    if isinstance(dataset, TarDataset):
        return dataset.shards
    if isinstance(dataset, ArrowDataset):
        return list(dataset._locations)
    if isinstance(dataset, ParquetDataset):
        return list(dataset._files._locations)
    if isinstance(dataset, ConcatDataset):
        return [location for part in dataset.datasets for location in _locations_of(part)]
    return _locations_of(dataset.dataset) if isinstance(dataset, Subset) else []


def _kind_of(path: str) -> str:
    for kind, suffixes in (("parquet", PARQUET_SUFFIXES), ("tar", TAR_SUFFIXES)):
        if path.lower().endswith(suffixes):
            return kind
    if Path(path).is_dir() or is_remote(path):
        for kind, suffixes in (("parquet", PARQUET_SUFFIXES), ("tar", TAR_SUFFIXES)):
            try:
                locate(path, suffixes=suffixes)
            except DataError:
                continue
            return kind
        if not is_remote(path):
            return "files"
    raise ConfigError(
        f"{path} is nothing that can be packed: give module:attribute or file.py:attribute of a dataset, a folder of "
        "files, .parquet files or .tar shards"
    )


def _fingerprint_of_files(locations: list[str]) -> str:
    taken = hashlib.blake2b(digest_size=16)
    for location in locations:
        source = open_source(location)
        taken.update(f"{location}\0{source.version}\n".encode("utf-8", "surrogateescape"))
        source.close()
    return taken.hexdigest()


class FolderFiles:
    """Files that share a path up to the first dot of their names are one sample: their bytes by extension."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.skipped: list[str] = []
        groups: dict[str, list[tuple[str, int]]] = {}
        taken = hashlib.blake2b(str(folder.resolve()).encode("utf-8", "surrogateescape"), digest_size=16)
        for path in sorted(self._walk(folder)):
            name = path.relative_to(folder).as_posix()
            head, slash, tail = name.rpartition("/")
            stem, _, extension = tail.partition(".")
            is_meta = re.match(r"__[^/]*__(/|$)", name)
            if not stem or not extension or extension.lower() == KEY or is_meta or not path.is_file():
                self.skipped.append(name)
                continue
            about = path.stat()
            group = groups.setdefault(f"{head}{slash}{stem}", [])
            if any(extension.lower() == other.lower() for other, _ in group):
                raise DataError(f"{path} and another file differ in capitals only, which readers of shards do not see")
            group.append((extension, about.st_size))
            taken.update(f"{name}\0{about.st_size}-{about.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
        if not groups:
            raise DataError(f"there is no file with an extension in {folder}, so there is nothing to pack")
        self._keys = sorted(groups)
        self._groups = groups
        self.fingerprint = taken.hexdigest()

    def _walk(self, folder: Path) -> Iterator[Path]:
        for where, folders, names in os.walk(folder, onerror=_refuse):
            folders[:] = [name for name in folders if not name.startswith(".")]
            yield from (Path(where, name) for name in names)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> dict[str, Any]:
        key = self._keys[index]
        sample: dict[str, Any] = {KEY: key}
        for extension, size_bytes in self._groups[key]:
            path = self._folder / f"{key}.{extension}"
            try:
                data = path.read_bytes()
            except OSError as problem:
                raise DataError(f"{path} cannot be read: {problem.strerror}") from problem
            if len(data) != size_bytes:
                raise DataError(f"{path} has {len(data)} bytes; it had {size_bytes} when packing began")
            sample[extension] = data
        return sample


def _refuse(problem: OSError) -> None:
    raise DataError(f"{problem.filename} cannot be listed: {problem.strerror}") from problem


class ParquetTables:
    """Rows of Parquet files as Arrow columns, by number of their first and end."""

    def __init__(self, locations: list[str]) -> None:
        self.files = ParquetFiles(locations, None)
        pa = arrow()
        # A file of Arrow's may have one dictionary per column; row groups have one each.
        fields = [
            each.with_type(each.type.value_type) if pa.types.is_dictionary(each.type) else each
            for each in self.files.schema
        ]
        self.schema: pa.Schema = pa.schema(fields)

    def row_bytes(self) -> float:
        return float(self.files.group_bytes.sum()) / max(1, int(self.files.starts[-1]))

    def batches(self, first: int, end: int) -> Iterator[pa.RecordBatch]:
        """Rows from ``first`` up to ``end``."""
        starts = self.files.starts
        group = int(np.searchsorted(starts, first, "right")) - 1
        while group < len(starts) - 1 and starts[group] < end:
            at = int(starts[group])
            rows = int(starts[group + 1]) - at
            at_a_time = _PIECE_BYTES * rows // max(1, int(self.files.group_bytes[group]))
            for piece in self.files.read_pieces(group, min(max(1, at_a_time), _PIECE_ROWS)):
                low, high = max(first - at, 0), min(end - at, piece.num_rows)
                at += piece.num_rows
                if low < high:
                    yield piece.slice(low, high - low).cast(self.schema)
                if at >= end:
                    return
            if at != starts[group + 1]:
                raise DataError(f"{self.files.name(group)} has other rows than its footer says; the file is damaged")
            group += 1
