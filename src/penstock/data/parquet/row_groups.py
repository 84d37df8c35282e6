"""Parquet files as row groups, numbered through: what each holds, and reading one.

In:  locations of files, the columns wanted.
Out: where row groups begin, how large they are, and their rows as record batches.
Runs in: trainer and worker. Footers are read once, by whoever makes the dataset; workers share what was read.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.data.parquet.footer import cuts_of, lean_metadata, of_one_group, reads_alike
from penstock.data.parquet.remote_columns import RemoteColumns, buffer_bytes_for
from penstock.data.shared.shared_bytes import SharedBytes
from penstock.data.sources import is_remote, open_source
from penstock.environment import chooses_arrow_pool
from penstock.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_MAGIC = b"PAR1"
_TAIL_BYTES = 64 << 10
"""What is read first of a file's end: most footers fit."""
_BUFFER_BYTES = 64 << 10
_LEAN_FROM_BYTES = 4 << 10
"""Smaller footers are kept with their statistics: to take those out of many files takes longer than they cost."""
_READERS = 8
_MOST_PARSED, _PARSED_BYTES = 64, 1 << 20
"""Footers that are kept ready for use; of those larger than this, one."""


@functools.cache
def arrow() -> Any:
    """pyarrow with its Parquet reader, ready for workers to be forked from here."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError:
        raise ConfigError('Parquet and Arrow files are read through pyarrow: pip install "penstock[parquet]"') from None
    if not chooses_arrow_pool():
        # Arrow's own pool keeps what was freed: tens of megabytes in every worker.
        pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    # What is set up by the first read of a process takes 50 MB: better here, once, than in every worker.
    written = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"]}), written)
    table = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(written.getvalue())).read_row_group(0, use_threads=False)
    table.to_batches()[0].take(np.zeros(1, np.int64)).to_pylist()
    return pyarrow


@contextlib.contextmanager
def readable(what: str) -> Iterator[None]:
    """What pyarrow raises over damaged files, as an error that says which file."""
    try:
        yield
    except DataError:
        raise
    except (arrow().ArrowException, OSError, OverflowError, ValueError, IndexError, MemoryError) as problem:
        raise DataError(f"{what} cannot be read: {problem}") from problem


class ParquetFiles:
    """Row groups of one or several files of the same columns."""

    def __init__(self, locations: Sequence[str], columns: Sequence[str] | None) -> None:
        arrow()
        with ThreadPoolExecutor(_READERS) as readers:
            footers = list(readers.map(_read_footer, locations))
        self._locations = tuple(locations)
        self._versions = tuple(version for _, version in footers)
        schema: Any = None
        starts, groups, group_bytes, cuts = [0], [], [], []
        kept: list[bytes] = []
        for number, (location, (footer, _)) in enumerate(zip(locations, footers, strict=True)):
            about = _parse(location, footer)
            kept.append(_lean(location, footer, about))
            own = _wanted(location, about, columns)
            if schema is None:
                schema = own
            _compare(locations[0], schema, location, own)
            with readable(f"the footer of {location}"):
                tops = _top_names(about)
                places = _cuts(kept[-1], about)
                for group in range(about.num_row_groups):
                    rows = about.row_group(group).num_rows
                    if rows < 0:
                        raise ValueError(f"row group {group} claims {rows} rows")
                    if not rows:
                        continue
                    starts.append(starts[-1] + rows)
                    groups.append((number, group))
                    cuts.append((places[0], *places[group + 1 : group + 3], places[-1]) if places else (0, 0, 0, 0))
                    group_bytes.append(_decoded_bytes(about.row_group(group), tops, own))
        self.schema: pa.Schema = schema
        self.columns = None if columns is None else list(columns)
        self._read_as = _without_views(schema)
        ends = np.cumsum([0] + [len(footer) for footer in kept])
        numbers = [np.array(starts, np.int64), np.array(group_bytes, np.int64), np.array(groups, np.int32)]
        numbers += [np.array(cuts, np.int64), ends]
        self._numbers = SharedBytes.of(numbers)
        self._footers = SharedBytes.of(kept)
        self._count = len(groups)
        self._ready()

    def _ready(self) -> None:
        count = self._count
        self.starts = self._numbers.array(np.int64, 0, count + 1)
        """Number of each group's first row, and of all rows."""
        self.group_bytes = self._numbers.array(np.int64, 8 * (count + 1), count)
        """What a group's wanted columns take, about, when they are read."""
        self._groups = self._numbers.array(np.int32, 8 * (2 * count + 1), 2 * count).reshape(count, 2)
        self._cuts = self._numbers.array(np.int64, 8 * (3 * count + 1), 4 * count).reshape(count, 4)
        """Where in its file's footer a group is, and what is before and after all groups; zeros if not known."""
        self._ends = self._numbers.array(np.int64, 8 * (7 * count + 1))
        # No lock, which a fork could inherit locked: threads may parse the same footer twice.
        self._parsed: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("starts", "group_bytes", "_groups", "_cuts", "_ends", "_parsed"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._ready()

    def made_of(self) -> tuple[Any, ...]:
        """What rows depend on."""
        return self._locations, self._versions, self.columns

    def name(self, group: int) -> str:
        file, number = self._groups[group]
        return f"row group {number} of {self._locations[file]}"

    def read(self, group: int) -> pa.RecordBatch:
        """The rows of a group, wanted columns only."""
        with self._opened(group) as (file, number):
            table = file.read_row_group(number, columns=self.columns, use_threads=False)
        rows = int(self.starts[group + 1] - self.starts[group])
        if len(table) != rows:
            raise DataError(f"{self.name(group)} has {len(table)} rows, its footer says {rows}; the file is damaged")
        batches = self._in_order(table).to_batches()
        return batches[0] if len(batches) == 1 else arrow().concat_batches(batches)

    def read_pieces(self, group: int, rows: int) -> Iterator[pa.RecordBatch]:
        """The same, so many rows at a time, without ever holding all of them."""
        with self._opened(group) as (file, number):
            for piece in file.iter_batches(rows, row_groups=[number], columns=self.columns, use_threads=False):
                yield self._in_order(piece)

    def forget(self) -> None:
        """Keep nothing for the next read, and give back what the last ones took."""
        self._parsed.clear()
        arrow().default_memory_pool().release_unused()

    # -- inside -------------------------------------------------------------------------------

    def _in_order(self, rows: Any) -> Any:
        rows = rows if rows.schema.names == self.schema.names else rows.select(self.schema.names)
        return rows if self._read_as is None else rows.cast(self._read_as)

    @contextlib.contextmanager
    def _opened(self, group: int) -> Iterator[tuple[pq.ParquetFile, int]]:
        """The file a group is in, and its number there. Opened for one read: a footer at hand makes that cheap."""
        pa = arrow()
        index = int(self._groups[group, 0])
        with contextlib.ExitStack() as opened:
            about, number = self._footer(group)
            source, buffer_bytes = self._source_of(index, number, about, opened)
            with readable(self.name(group)):
                file = pa.parquet.ParquetFile(source, metadata=about, buffer_size=buffer_bytes, pre_buffer=False)
                yield opened.enter_context(file), number

    def _source_of(self, index: int, number: int, about: Any, opened: contextlib.ExitStack) -> tuple[Any, int]:
        """What pyarrow reads a group through, and how much at a time (0: a column at once); checks that the file is
        still the one whose footer is known."""
        location = self._locations[index]
        source = opened.enter_context(contextlib.closing(open_source(location)))
        if source.version != self._versions[index]:
            raise DataError(f"{location} has changed since the dataset was made; make the dataset again")
        if not is_remote(location):
            return opened.enter_context(arrow().OSFile(str(Path(location.removeprefix("file://"))))), _BUFFER_BYTES
        with readable(f"the footer of {location}"):
            chunks = _chunks_of(about.row_group(number), _top_names(about), set(self.schema.names))
        buffer_bytes = buffer_bytes_for(chunks)
        file = RemoteColumns(source, [] if buffer_bytes else chunks)
        return arrow().PythonFile(file, mode="r"), buffer_bytes

    def _footer(self, group: int) -> tuple[Any, int]:
        """What describes a group, and its number there."""
        index, number = (int(value) for value in self._groups[group])
        first, end = (int(place) for place in self._ends[index : index + 2])
        footer = self._footers.view()[first:end]
        cuts = self._cuts[group].tolist()
        if any(cuts):
            # Parsed whole, a footer of hundreds of groups takes a megabyte or two in every worker.
            return _parse(self._locations[index], _ended(of_one_group(footer[:-8], *cuts))), 0
        about = self._parsed.get(index)
        if about is None:
            about = _parse(self._locations[index], footer)
            if len(self._parsed) >= _MOST_PARSED or len(footer) > _PARSED_BYTES:
                self._parsed.clear()
            self._parsed[index] = about
        return about, number


def _read_footer(location: str) -> tuple[bytes, str]:
    """The end of a file, where Parquet says what is in it, and which version of the file that was."""
    source = open_source(location)
    with contextlib.closing(source):
        size = source.size_bytes
        if size < 12:
            raise DataError(f"{location} has {size} bytes: {'an empty' if not size else 'no Parquet'} file")
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
        return footer, source.version


def _parse(location: str, footer: bytes | memoryview) -> Any:
    pa = arrow()
    with readable(f"the footer of {location}"):
        return pa.parquet.read_metadata(pa.BufferReader(_MAGIC + bytes(footer)))


def _lean(location: str, footer: bytes, about: Any) -> bytes:
    """A footer without statistics, which every read would parse again; as it is, where rows might be read otherwise."""
    if len(footer) < _LEAN_FROM_BYTES:
        return footer
    lean = _ended(lean_metadata(footer[:-8]))
    try:
        return lean if len(lean) < len(footer) and reads_alike(about, _parse(location, lean)) else footer
    except DataError:
        return footer


def _cuts(footer: bytes, about: Any) -> list[int]:
    """Where a footer's groups are in it; nothing where a part would be no smaller to parse, or is not understood."""
    if len(footer) < _LEAN_FROM_BYTES or about.num_row_groups < 2:
        return []
    places = cuts_of(footer[:-8])
    return places if len(places) == about.num_row_groups + 2 else []


def _ended(metadata: bytes) -> bytes:
    return metadata + struct.pack("<I", len(metadata)) + _MAGIC


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
    """Rows cannot be taken out of view types: the plain ones instead. None if there are no such columns."""
    pa = arrow()
    plain = {
        kind: target
        for name, target in (("string_view", pa.large_string()), ("binary_view", pa.large_binary()))
        for kind in ([getattr(pa, name)()] if hasattr(pa, name) else [])
    }
    fields = [field.with_type(plain.get(field.type, field.type)) for field in schema]
    return pa.schema(fields) if fields != list(schema) else None


def _compare(first: str, schema: pa.Schema, location: str, own: pa.Schema) -> None:
    """Refuse a file whose columns are not those of the first."""
    differences = [f"no column {name}" for name in schema.names if name not in own.names]
    differences += [f"a column {name} more" for name in own.names if name not in schema.names]
    differences += [
        f"{name} is {own.field(name).type}, not {schema.field(name).type}"
        for name in own.names
        if name in schema.names and own.field(name).type != schema.field(name).type
    ]
    if differences:
        raise DataError(f"{location} does not fit {first}: {'; '.join(differences)}")


def _decoded_bytes(group: Any, tops: list[str], schema: pa.Schema) -> int:
    """What the wanted columns of a group take when they are read, about: no less than rows of their width would."""
    wanted = set(schema.names)
    stored = sum(max(0, group.column(leaf).total_uncompressed_size) for leaf, name in enumerate(tops) if name in wanted)
    widths = (getattr(field.type, "bit_width", 0) for field in schema if _has_width(field.type))
    return max(stored, group.num_rows * sum(widths) // 8)


def _has_width(kind: Any) -> bool:
    types = arrow().types
    return types.is_primitive(kind) and not types.is_boolean(kind)


def _top_names(about: Any) -> list[str]:
    """Per stored column, the column of the table it is a part of; names may have dots in them."""
    names = about.schema.to_arrow_schema().names
    found: list[str] = []
    for leaf in range(about.num_columns):
        path = about.schema.column(leaf).path
        found.append(
            max((name for name in names if path == name or path.startswith(f"{name}.")), key=len, default=path)
        )
    return found


def _chunks_of(group: Any, tops: list[str], wanted: set[str]) -> list[tuple[int, int]]:
    """Where in its file the wanted columns of a group are: first byte, length."""
    found = []
    for leaf, name in enumerate(tops):
        if name in wanted:
            column = group.column(leaf)
            starts = (column.dictionary_page_offset, column.data_page_offset)
            found.append((min(start for start in starts if start), column.total_compressed_size))
    return found
