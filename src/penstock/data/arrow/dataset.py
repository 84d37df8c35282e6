"""`ArrowDataset`: samples of Arrow files, mapped and read in place.

In:  a file, a glob, a folder of ``.arrow`` files, or a list of these, from ``penstock pack`` or another program.
Out: the samples that were packed, unchanged; for files of other programs, a dict per row.
Runs in: trainer and worker.
"""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np
from torch.utils.data import Dataset

from penstock.data.arrow.mapped_file import READY_COMPRESSED, ArrowFile
from penstock.data.pack.manifest import check_whole
from penstock.data.sources import is_remote, locate
from penstock.errors import ConfigError, DataError
from penstock.units import MIB, format_bytes

_WARNED_FROM_BYTES = 8 * MIB
"""A warning is given from this many decompressed bytes on; fewer bytes are little compared with the other memory of a
worker."""


class ArrowDataset(Dataset[Any]):
    """Samples of Arrow files, by number.

    Arrays and tensors of 1 MiB or more are pages of the file, mapped for this sample only; a page is copied when it is
    written to. Smaller arrays are copied, which is faster than mapping them. In both cases, what a program writes into
    a sample changes neither the file nor the samples that the program reads later.
    """

    splittable = True

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[Any],
        columns: Sequence[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        *,
        in_place: bool = False,
    ) -> None:
        """``columns``: for samples that are dicts, read only these. ``transform``: called with each sample.

        ``in_place``: arrays and tensors of every size are views of one mapping, so nothing is copied. Use it for
        samples that are only read: what a transform writes into a sample does not reach the file, but it is still
        there when the same process reads the sample again.
        """
        self.transform = transform
        self.in_place = in_place
        if isinstance(columns, str):
            raise ConfigError(f"columns={columns!r} is a single text; give a list of names")
        self._columns = None if columns is None else tuple(columns)
        check_whole(path)
        locations = locate(path, suffixes=(".arrow",))
        remote = next(filter(is_remote, locations), None)
        if remote is not None:
            raise ConfigError(
                f"{remote} is not on this machine, but Arrow files are mapped; copy the file to this machine"
            )
        self._locations = [location.removeprefix("file://") for location in locations]
        self._opened = _OpenArrowFiles()
        self._identities: list[tuple[int, ...]] = []
        files = [self._file(number) for number in range(len(self._locations))]
        self._identities = [file.identity for file in files]
        _check(files, self._columns)
        _warn_of_compressed(files)
        batches = [len(file.batch_rows) for file in files]
        self._batch_file = np.repeat(np.arange(len(files)), batches)
        self._first_batch = np.cumsum([0, *batches])
        self._starts = np.cumsum(np.concatenate([[0], *(file.batch_rows for file in files)]), dtype=np.int64)
        self._batch_bytes = np.concatenate([np.empty(0, np.int64), *(file.batch_bytes for file in files)])

    @property
    def blocks(self) -> np.ndarray:
        """The index of the first sample of each record batch; the last entry is the count of all samples."""
        return self._starts

    @property
    def block_bytes(self) -> np.ndarray:
        """Size of each record batch in bytes."""
        return self._batch_bytes

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: SupportsIndex) -> Any:
        place, count = operator.index(index), len(self)
        if place < 0:
            place += count
        if not 0 <= place < count:
            raise IndexError(f"sample {index} of {count}")
        block = int(np.searchsorted(self._starts, place, "right")) - 1
        file = int(self._batch_file[block])
        read = self._file(file).reader(block - int(self._first_batch[file]), self._columns)
        sample = read(place - int(self._starts[block]))
        return sample if self.transform is None else self.transform(sample)

    def __getitems__(self, indices: Iterable[SupportsIndex]) -> list[Any]:
        return [self[index] for index in indices]

    def made_of(self) -> tuple[Any, ...]:
        """What the samples depend on, for the fingerprint by which a cache finds samples of earlier runs."""
        return self._locations, self._identities, self._columns, self.transform

    def __repr__(self) -> str:
        return f"ArrowDataset({len(self)} samples in {len(self._locations)} files from {self._locations[0]})"

    def _file(self, number: int) -> ArrowFile:
        files = self._opened.files()
        file = files.get(number)
        if file is None:
            file = ArrowFile(self._locations[number], in_place=self.in_place)
            if self._identities and file.identity != self._identities[number]:
                raise DataError(f"{file.location} has changed since the dataset was made; make the dataset again")
            file = files.setdefault(number, file)
        return file


class _OpenArrowFiles:
    """The files that a process has open, by number. These files are not attributes of the dataset, because its
    attributes are part of its fingerprint, which must not change while the dataset is used."""

    def __init__(self) -> None:
        self._files: dict[int, ArrowFile] = {}
        self._pid = os.getpid()

    def files(self) -> dict[int, ArrowFile]:
        # A lock that another thread held at the fork would stay locked in the child for ever.
        if self._pid != os.getpid():
            self._files, self._pid = {}, os.getpid()
        return self._files

    def __reduce__(self) -> Any:
        return _OpenArrowFiles, ()


def _check(files: list[ArrowFile], columns: tuple[str, ...] | None) -> None:
    """Raise DataError for files that do not fit together, and for columns that they do not have."""
    first = files[0]
    for file in files:
        if (file.layout is None) != (first.layout is None):
            raise DataError(f"{file.location} does not fit {first.location}: only one of them is from penstock pack")
        if file.layout is None and file.schema.remove_metadata() != first.schema.remove_metadata():
            raise DataError(
                f"{file.location} has the columns {_columns_of(file)}; {first.location} has {_columns_of(first)}"
            )
    if columns is None:
        return
    outlines = [outline for file in files if file.layout is not None for outline in file.layout.outlines]
    other = next((outline for outline in outlines if outline.kind != "dict"), None)
    if other is not None:
        raise ConfigError(
            f"columns={list(columns)}: samples in {first.location} are not dicts, but of kind {other.kind}"
        )
    known = {name for outline in outlines for name in outline.names} | set(first.schema.names if not outlines else ())
    missing = [name for name in columns if name not in known]
    if missing:
        raise DataError(f"{first.location} has no column {', '.join(missing)}; it has {', '.join(sorted(known))}")


def _warn_of_compressed(files: list[ArrowFile]) -> None:
    """Warn about the memory that compressed files need, because compressed data cannot be mapped."""
    found = [file for file in files if file.compressed.any()]
    sizes = np.concatenate([file.batch_bytes[file.compressed] for file in found]) if found else np.zeros(1, np.int64)
    if sizes.sum() < _WARNED_FROM_BYTES:
        return
    held = int(np.sort(sizes)[-READY_COMPRESSED:].sum())
    named = f"{found[0].location} is" if len(found) == 1 else f"{found[0].location} and {len(found) - 1} more files are"
    warnings.warn(
        f"{named} compressed and cannot be mapped: decompressed, the data take {format_bytes(sizes.sum())}, and each "
        f"worker holds up to {format_bytes(held)} of that (record batches of up to {format_bytes(sizes.max())}). "
        "Rewrite the data with `penstock pack`, so that all workers share one mapping",
        RuntimeWarning,
        stacklevel=3,
    )


def _columns_of(file: ArrowFile) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in file.schema)
