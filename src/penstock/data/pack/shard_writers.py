"""Writes a shard of `penstock pack` under a temporary name, renames it once it is complete, and reads it again.

In:  samples, one after another.
Out: a tar or Arrow file, and its record: samples, bytes, checksum.
Runs in: pack's workers.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.data.arrow.columns import BatchBuilder, Layout, Misfit
from penstock.data.arrow.mapped_file import ArrowFile
from penstock.data.parquet.row_groups import arrow
from penstock.data.sample_forms import FORM_HEADER, OWN_FORM, to_members
from penstock.data.sources import open_source
from penstock.data.tar.index import KEY
from penstock.data.tar.index_files import build_index
from penstock.drafts import open_draft
from penstock.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

PARTIAL = ".partial"
"""The end of the name of a shard that is being written."""
_BATCH_BYTES = 8 << 20
"""Size of a record batch: large enough for fast writes, small enough to shuffle several together."""
_BATCH_ROWS = 1 << 16
_CHUNK_BYTES = 1 << 20
_TAR_BLOCK_BYTES = 512
_TAR_RECORD_BYTES = 10240

Samples = Callable[[], Iterator[Any]]
"""A function that returns the samples of a shard, from the first one on. It is called again if the shard must be
written again."""


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """What a shard holds."""

    name: str
    samples: int
    bytes: int
    checksum: str
    """BLAKE2b of all bytes, 16 bytes long, in hexadecimal digits."""


class ShardFile(io.RawIOBase):
    """A file for one shard, which computes the checksum of what is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
        self._file = open_draft(self._partial, buffering=_CHUNK_BYTES)
        self._taken = hashlib.blake2b(digest_size=16)
        self._size_bytes = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size_bytes

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self._taken.update(view)
        self._file.write(view)
        self._size_bytes += len(view)
        return len(view)

    def begin_again(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._taken, self._size_bytes = hashlib.blake2b(digest_size=16), 0

    def finish(self, samples: int) -> ShardRecord:
        """Make sure the shard is on disk under its own name; only then return its record."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self._path)
        sync_folder(self._path.parent)
        return ShardRecord(
            name=self._path.name, samples=samples, bytes=self._size_bytes, checksum=self._taken.hexdigest()
        )

    def abandon(self) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)


@contextlib.contextmanager
def shard_file(path: Path) -> Iterator[ShardFile]:
    file = ShardFile(path)
    try:
        yield file
    except BaseException:
        file.abandon()
        raise


def sync_folder(folder: Path) -> None:
    """Make renames in the folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -- tar ------------------------------------------------------------------------------------------


def write_tar(path: Path, samples: Iterable[tuple[str, Any]], shard_form: str) -> ShardRecord:
    """Write samples with their keys; each value becomes a member."""

    def members() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
        for key, sample in samples:
            form, found = to_members(sample)
            yield key, found if form == shard_form else [*found, (OWN_FORM, form.encode())]

    return _write_members(path, tarfile.TarInfo.create_pax_global_header({FORM_HEADER: shard_form}), members())


def write_raw_tar(path: Path, samples: Iterable[dict[str, Any]]) -> ShardRecord:
    """Write samples that consist of the bytes of files, under the names of the files."""
    members = (
        (sample[KEY], [(extension, data) for extension, data in sample.items() if extension != KEY])
        for sample in samples
    )
    return _write_members(path, b"", members)


def tar_bytes(sample: Any) -> int:
    """The size of a sample in a tar shard."""
    return sum(2 * _TAR_BLOCK_BYTES + len(data) for _, data in to_members(sample)[1])


def _write_members(path: Path, header: bytes, samples: Iterable[tuple[str, list[tuple[str, bytes]]]]) -> ShardRecord:
    with shard_file(path) as file:
        file.write(header)
        count = 0
        for key, members in samples:
            for name, data in members:
                about = tarfile.TarInfo(f"{key}.{name}")
                about.size = len(data)
                file.write(about.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
                file.write(data)
                file.write(bytes(-len(data) % _TAR_BLOCK_BYTES))
            count += 1
        file.write(bytes(2 * _TAR_BLOCK_BYTES))
        file.write(bytes(-file.tell() % _TAR_RECORD_BYTES))
        return file.finish(count)


# -- Arrow ----------------------------------------------------------------------------------------


def write_arrow(path: Path, samples: Samples, layout: Layout) -> ShardRecord:
    """Write samples as columns. If a sample does not fit ``layout``, all samples are read once more to find a layout
    that fits all."""
    wider = layout.copy()
    with shard_file(path) as file:
        for tried in (layout, wider, Layout.of_anything()):
            if tried is wider:
                for sample in samples():
                    wider.learn(sample)
            try:
                return file.finish(_write_samples(file, samples(), tried))
            except Misfit:
                # Samples that differ each time they are read may not even fit the wider layout.
                file.begin_again()
    raise AssertionError("every sample fits the last layout")


def arrow_bytes(sample: Any) -> int:
    """The size of a sample in an Arrow shard."""
    layout = Layout()
    layout.learn(sample)
    builder = BatchBuilder(layout)
    builder.add(sample)
    return builder.data_bytes


def write_tables(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> ShardRecord:
    """Write record batches, unchanged."""
    with shard_file(path) as file:
        count = 0
        with arrow().ipc.new_file(file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
                count += batch.num_rows
        return file.finish(count)


def _write_samples(file: ShardFile, samples: Iterable[Any], layout: Layout) -> int:
    count = 0
    builder = BatchBuilder(layout)
    with arrow().ipc.new_file(file, layout.to_schema()) as writer:
        for sample in samples:
            builder.add(sample)
            count += 1
            if builder.data_bytes >= _BATCH_BYTES or builder.rows >= _BATCH_ROWS:
                writer.write_batch(builder.finish())
        if builder.rows:
            writer.write_batch(builder.finish())
    return count


# -- reading again --------------------------------------------------------------------------------


def find_fault(path: Path, record: ShardRecord) -> str | None:
    """What is wrong with a shard on disk; None if it equals what was written."""
    try:
        with path.open("rb") as file:
            if hasattr(os, "posix_fadvise"):
                # Drop the page cache: a check must read what is on the disk.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes != record.bytes:
                return f"it has {size_bytes} bytes, not {record.bytes}"
            taken = hashlib.blake2b(digest_size=16)
            while chunk := file.read(_CHUNK_BYTES):
                taken.update(chunk)
    except OSError as problem:
        return f"it cannot be read: {problem.strerror}"
    if taken.hexdigest() != record.checksum:
        return "its bytes are not those that were written"
    try:
        samples = _count(path)
    except DataError as problem:
        return str(problem)
    return None if samples == record.samples else f"it has {samples} samples, not {record.samples}"


def _count(path: Path) -> int:
    if path.suffix == ".arrow":
        return int(ArrowFile(str(path)).batch_rows.sum())
    with contextlib.closing(open_source(str(path))) as source:
        index = build_index(source, source.version)
    if index.faults:
        raise DataError(index.faults[0].text)
    return len(index)
