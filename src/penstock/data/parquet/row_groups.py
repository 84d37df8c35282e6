"""Reads row groups of Parquet files, which are numbered across all files.

In:  locations of files, and the wanted columns.
Out: where row groups begin, how large they are, and their rows as record batches.
Runs in: trainer and worker. The process that creates the dataset parses the footers; forked workers share the parsed
footers.
"""

from __future__ import annotations

import contextlib
import functools
import io
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.data.shared.shared_bytes import SharedBytes
from penstock.data.sources import Source, is_remote, open_source
from penstock.environment import chooses_arrow_pool
from penstock.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_MAGIC = b"PAR1"
_TAIL_BYTES = 64 << 10
"""Bytes that are read first, from the end of a file; most footers are smaller."""
_BUFFER_BYTES = 64 << 10
_PREFETCHED_BYTES, _LEAST_BUFFER_BYTES = 64 << 20, 1 << 20
"""A remote row group of up to the first size is fetched in a few large requests. A larger row group is read through
buffers that have the first size in total, and at least the second size each."""
_READERS = 8
_MOST_ROWS = 1 << 50
_PARSED_BYTES = 8 << 20
"""A process keeps parsed footers that take up to this many bytes in their files, and 4 to 7 times as many in memory. Of
the footers beyond that, it keeps only the one that it used last."""


@functools.cache
def arrow() -> Any:
    """pyarrow with its Parquet reader, set up so that workers forked from this process need not repeat this."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError:
        raise ConfigError('Parquet and Arrow files need pyarrow: pip install "penstock[parquet]"') from None
    if not chooses_arrow_pool():
        # Arrow's own pool keeps freed memory: tens of megabytes in every worker.
        pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    # The first read of a process sets up 50 MB of state. Reading once here lets forked workers share this state.
    written = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"]}), written)
    table = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(written.getvalue())).read_row_group(0, use_threads=False)
    table.to_batches()[0].take(np.zeros(1, np.int64)).to_pylist()
    return pyarrow


@contextlib.contextmanager
def readable(what: str) -> Iterator[None]:
    """Turn an exception of pyarrow for a damaged file into an error that names ``what``."""
    try:
        yield
    except DataError:
        raise
    except (arrow().ArrowException, OSError, OverflowError, ValueError, IndexError, MemoryError) as problem:
        raise DataError(f"{what} cannot be read: {problem}") from problem


class ParquetFiles:
    """Row groups of one or several files with the same columns."""

    def __init__(self, locations: Sequence[str], columns: Sequence[str] | None) -> None:
        arrow()
        with ThreadPoolExecutor(_READERS) as readers:
            footers = list(readers.map(_read_footer, locations))
        self._locations = tuple(locations)
        self._versions = tuple(version for _, version in footers)
        self._forget_footers()
        schema: Any = None
        starts, groups, group_bytes = [0], [], []
        for number, (location, (footer, _)) in enumerate(zip(locations, footers, strict=True)):
            about = self._keep_footer(number, footer)
            own = _wanted(location, about, columns)
            if schema is None:
                schema = own
            _compare(locations[0], schema, location, own)
            with readable(f"the footer of {location}"):
                leaves = _leaves_of(about, schema)
                widths = sum(getattr(field.type, "bit_width", 0) for field in own if _has_width(field.type))
                for group in range(about.num_row_groups):
                    row_group = about.row_group(group)
                    rows = row_group.num_rows
                    if not 0 <= rows <= _MOST_ROWS - starts[-1]:
                        raise ValueError(f"row group {group} claims {rows} rows")
                    if rows:
                        stored = sum(max(0, row_group.column(leaf).total_uncompressed_size) for leaf in leaves)
                        starts.append(starts[-1] + rows)
                        groups.append((number, group))
                        # A repeated value is stored once; after decoding, each row has its own copy.
                        group_bytes.append(max(stored, rows * widths // 8))
        self.schema: pa.Schema = schema
        self.columns = None if columns is None else list(columns)
        self._read_as = _without_views(schema)
        self.has_texts = any(not _has_width(field.type) for field in schema)
        """Whether the size of rows is unknown until rows are read, because a repeated text is stored once."""
        self.texts = [field.name for field in schema if _is_text(field.type)] if self._read_as is None else []
        """Columns that can be read as dictionaries."""
        numbers = [np.array(starts, np.int64), np.array(group_bytes, np.int64), np.array(groups, np.int32)]
        self._numbers = SharedBytes.of(numbers)
        self._count = len(groups)
        self._open_numbers()

    def _open_numbers(self) -> None:
        count = self._count
        self.starts = self._numbers.array(np.int64, 0, count + 1)
        """The index of the first row of each group; the last entry is the count of all rows."""
        self.starts_view = self.starts.data
        """``starts`` as a memoryview, from which reading one number takes a tenth of the time that it takes from an
        array."""
        self.group_bytes = self._numbers.array(np.int64, 8 * (count + 1), count)
        """About how much memory the wanted columns of each group take when they are read."""
        self._groups = self._numbers.array(np.int32, 8 * (2 * count + 1), 2 * count).reshape(count, 2)
        """For each group, the number of its file, and its own number in the file."""

    def _forget_footers(self) -> None:
        # No lock, because a fork could inherit it locked: two threads may parse the same footer.
        self._parsed: dict[int, Any] = {}
        self._room_bytes = _PARSED_BYTES
        self._latest: tuple[int, Any] = (-1, None)

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("starts", "starts_view", "group_bytes", "_groups", "_parsed", "_room_bytes", "_latest")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open_numbers()
        self._forget_footers()

    def made_of(self) -> tuple[Any, ...]:
        """What the rows depend on."""
        return self._locations, self._versions, self.columns

    def name(self, group: int) -> str:
        file, number = self._groups[group]
        return f"row group {number} of {self._locations[file]}"

    def read_pieces(self, group: int, rows: int, *, repeated: bool = False) -> Iterator[pa.RecordBatch]:
        """Yields the wanted columns of a group, ``rows`` rows at a time. With ``repeated``, columns of texts are
        dictionary columns, which hold a repeated text once."""
        with self._opened(group, self.texts if repeated else None) as (file, number):
            for piece in file.iter_batches(rows, row_groups=[number], columns=self.columns, use_threads=False):
                yield self._in_order(piece)

    # -- inside -------------------------------------------------------------------------------

    def _in_order(self, rows: Any) -> Any:
        rows = rows if rows.schema.names == self.schema.names else rows.select(self.schema.names)
        return rows if self._read_as is None else rows.cast(self._read_as)

    @contextlib.contextmanager
    def _opened(self, group: int, repeated: list[str] | None = None) -> Iterator[tuple[pq.ParquetFile, int]]:
        """The file of a group, and the group's number in it. The file is opened for one read, which is fast because its
        footer is parsed already."""
        index, number = (int(value) for value in self._groups[group])
        location = self._locations[index]
        with contextlib.ExitStack() as opened:
            source = opened.enter_context(contextlib.closing(open_source(location)))
            if source.version != self._versions[index]:
                raise DataError(f"{location} has changed since the dataset was made; make the dataset again")
            about = self._footer(index, source)
            buffer_bytes = _BUFFER_BYTES
            if is_remote(location):
                with readable(f"the footer of {location}"):
                    leaves = _leaves_of(about, self.schema)
                    row_group = about.row_group(number)
                    stored = sum(row_group.column(leaf).total_compressed_size for leaf in leaves)
                # A request to a store takes as long as the transfer of many megabytes, so pyarrow fetches neighbouring
                # ranges together.
                buffer_bytes = (
                    0 if stored <= _PREFETCHED_BYTES else max(_LEAST_BUFFER_BYTES, _PREFETCHED_BYTES // len(leaves))
                )
                file = arrow().PythonFile(_SourceFile(source), mode="r")
            else:
                file = opened.enter_context(arrow().OSFile(str(Path(location.removeprefix("file://")))))
            with readable(self.name(group)):
                reader = arrow().parquet.ParquetFile(
                    file,
                    metadata=about,
                    buffer_size=buffer_bytes,
                    pre_buffer=not buffer_bytes,
                    read_dictionary=repeated,
                )
                yield opened.enter_context(reader), number

    def _footer(self, index: int, source: Source) -> Any:
        about = self._parsed.get(index)
        if about is not None:
            return about
        latest, about = self._latest
        if latest == index:
            return about
        return self._keep_footer(index, _footer_in(source))

    def _keep_footer(self, index: int, footer: bytes) -> Any:
        about = _parse(self._locations[index], footer)
        if len(footer) <= self._room_bytes:
            self._room_bytes -= len(footer)
            self._parsed[index] = about
        else:
            self._latest = index, about
        return about


class _SourceFile(io.RawIOBase):
    """A source with a position, as pyarrow needs it. pyarrow seeks and reads under a lock of its own."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.size_bytes}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        length = self._source.size_bytes - self._position if size is None or size < 0 else size
        data = self._source.read(self._position, length)
        self._position += len(data)
        return data


def _read_footer(location: str) -> tuple[bytes, str]:
    """The footer of a file, and the version of the file that it belongs to."""
    with contextlib.closing(open_source(location)) as source:
        return _footer_in(source), source.version


def _footer_in(source: Source) -> bytes:
    location, size = source.location, source.size_bytes
    if size < 12:
        raise DataError(f"{location} has {size} bytes: it is {'empty' if not size else 'no Parquet file'}")
    tail = source.read(max(0, size - _TAIL_BYTES), _TAIL_BYTES)
    if tail[-4:] == b"PARE":
        raise DataError(f"{location} is encrypted")
    if tail[-4:] != _MAGIC:
        what = "cut short" if source.read(0, 4) == _MAGIC else "no Parquet file"
        raise DataError(f"{location} ({size} bytes) does not end as a Parquet file does: it is {what}")
    length = struct.unpack("<I", tail[-8:-4])[0] + 8
    if length > size - 4:
        raise DataError(f"{location} says its footer has {length - 8} bytes; the whole file has {size}")
    footer = tail[-length:] if length <= len(tail) else source.read(size - length, length)
    if len(footer) != length:
        raise DataError(f"{location} was changed while its footer was read")
    return footer


def _parse(location: str, footer: bytes) -> Any:
    pa = arrow()
    with readable(f"the footer of {location}"):
        return pa.parquet.read_metadata(pa.BufferReader(_MAGIC + footer))


def _wanted(location: str, about: Any, columns: Sequence[str] | None) -> pa.Schema:
    with readable(f"the footer of {location}"):
        schema = about.schema.to_arrow_schema().remove_metadata()
    if len(set(schema.names)) < len(schema.names):
        twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
        raise DataError(f"{location} has several columns of the same name: {', '.join(twice)}")
    if columns is None:
        return schema
    missing = [name for name in columns if name not in schema.names]
    if missing:
        raise DataError(f"{location} has no column {', '.join(missing)}; it has {', '.join(schema.names)}")
    return arrow().schema([schema.field(name) for name in columns])


def _without_views(schema: pa.Schema) -> pa.Schema | None:
    """The schema with plain types in place of view types, from which pyarrow cannot take rows; None if it has no view
    types."""
    pa = arrow()
    plain = {
        kind: target
        for name, target in (("string_view", pa.large_string()), ("binary_view", pa.large_binary()))
        for kind in ([getattr(pa, name)()] if hasattr(pa, name) else [])
    }
    fields = [field.with_type(plain.get(field.type, field.type)) for field in schema]
    return pa.schema(fields) if fields != list(schema) else None


def _compare(first: str, schema: pa.Schema, location: str, own: pa.Schema) -> None:
    """Refuse a file whose columns are not those of the first file."""
    differences = [f"no column {name}" for name in schema.names if name not in own.names]
    differences += [f"an additional column {name}" for name in own.names if name not in schema.names]
    differences += [
        f"{name} is {own.field(name).type}, not {schema.field(name).type}"
        for name in own.names
        if name in schema.names and own.field(name).type != schema.field(name).type
    ]
    if differences:
        raise DataError(f"{location} does not fit {first}: {'; '.join(differences)}")


def _has_width(kind: Any) -> bool:
    types = arrow().types
    return types.is_primitive(kind) and not types.is_boolean(kind)


def _is_text(kind: Any) -> bool:
    types = arrow().types
    return types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind)


def _leaves_of(about: Any, schema: pa.Schema) -> list[int]:
    """Numbers of the stored columns that the columns of ``schema`` consist of; names of columns may contain dots."""
    names = about.schema.to_arrow_schema().names
    wanted = set(schema.names)
    found: list[int] = []
    for leaf in range(about.num_columns):
        path = about.schema.column(leaf).path
        parents = (name for name in names if path == name or path.startswith(f"{name}."))
        if max(parents, key=len, default=path) in wanted:
            found.append(leaf)
    return found
