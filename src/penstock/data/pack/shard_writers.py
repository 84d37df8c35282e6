"""One shard of `penstock pack`: written under another name, given its own when it is whole, read again.

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
from penstock.data.tar.stored_index import build_index
from penstock.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

PARTIAL = ".partial"
"""What the name of a shard that is being written ends with."""
_BATCH_BYTES = 8 << 20
"""A record batch: large enough to be written in one go, small enough to be shuffled with others."""
_BATCH_ROWS = 1 << 16
_CHUNK_BYTES = 1 << 20
_TAR_BLOCK_BYTES = 512
_TAR_RECORD_BYTES = 10240

Samples = Callable[[], Iterator[Any]]
"""The samples of a shard, from its first; called again where a shard is begun anew."""


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """What a shard holds."""

    name: str
    samples: int
    bytes: int
    checksum: str
    """BLAKE2b of all its bytes, 16 of them, in hexadecimal digits."""


class ShardFile(io.RawIOBase):
    """A file to write one shard to; its checksum is taken on the way."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
        self._file = self._partial.open("wb", buffering=_CHUNK_BYTES)
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
        """On disk, under its own name, before anybody is told."""
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
    """Without this a rename may be forgotten by a machine that loses power."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -- tar ------------------------------------------------------------------------------------------


def write_tar(path: Path, samples: Iterable[tuple[str, Any]], shard_form: str) -> ShardRecord:
    """Samples by key, each value a member."""
    with shard_file(path) as file:
        file.write(tarfile.TarInfo.create_pax_global_header({FORM_HEADER: shard_form}))
        count = 0
        for key, sample in samples:
            form, members = to_members(sample)
            if form != shard_form:
                members.append((OWN_FORM, form.encode()))
            for member, data in members:
                _write_member(file, f"{key}.{member}", data)
            count += 1
        _end_tar(file)
        return file.finish(count)


def write_raw_tar(path: Path, samples: Iterable[dict[str, Any]]) -> ShardRecord:
    """Samples that are files already: their bytes, under their names."""
    with shard_file(path) as file:
        count = 0
        for sample in samples:
            for extension, data in sample.items():
                if extension != KEY:
                    _write_member(file, f"{sample[KEY]}.{extension}", data)
            count += 1
        _end_tar(file)
        return file.finish(count)


def tar_bytes(sample: Any) -> int:
    """What a sample takes in a tar shard."""
    return sum(2 * _TAR_BLOCK_BYTES + len(data) for _, data in to_members(sample)[1])


def _write_member(file: ShardFile, name: str, data: bytes) -> None:
    about = tarfile.TarInfo(name)
    about.size = len(data)
    file.write(about.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
    file.write(data)
    file.write(bytes(-len(data) % _TAR_BLOCK_BYTES))


def _end_tar(file: ShardFile) -> None:
    file.write(bytes(2 * _TAR_BLOCK_BYTES))
    file.write(bytes(-file.tell() % _TAR_RECORD_BYTES))


# -- Arrow ----------------------------------------------------------------------------------------


def write_arrow(path: Path, samples: Samples, layout: Layout) -> ShardRecord:
    """Samples in columns. ``layout`` is what is known of them; where one does not fit, all are looked at first."""
    with shard_file(path) as file:
        try:
            return file.finish(_write_samples(file, samples(), layout))
        except Misfit:
            file.begin_again()
        wider = layout.copy()
        for sample in samples():
            wider.learn(sample)
        try:
            return file.finish(_write_samples(file, samples(), wider))
        except Misfit:
            # Samples that are others every time they are read.
            file.begin_again()
        return file.finish(_write_samples(file, samples(), Layout.of_anything()))


def arrow_bytes(sample: Any) -> int:
    """What a sample takes in an Arrow shard."""
    layout = Layout()
    layout.learn(sample)
    builder = BatchBuilder(layout)
    builder.add(sample)
    return builder.data_bytes


def write_tables(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> ShardRecord:
    """Columns as they are."""
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
    """What is wrong with a shard, from its bytes on disk; None if it is what was written."""
    try:
        with path.open("rb") as file:
            if hasattr(os, "posix_fadvise"):
                # What is in memory says nothing about the disk.
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
