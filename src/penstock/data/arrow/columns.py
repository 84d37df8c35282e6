"""Turns samples into Arrow columns, and these columns into the values of rows.

In:  samples, one after another; later the columns of a record batch.
Out: a ``Layout`` that all samples of a shard fit, record batches in this layout, and readers of single values.
Runs in: trainer and worker, command line.

Numbers, texts, bytes, and arrays of one shape are ordinary columns; a column of other values holds each value in
penstock's own encoding. The metadata of the schema holds the layout.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.data import sample_forms as forms
from penstock.data.sample_forms import WHOLE, Outline

if TYPE_CHECKING:
    import pyarrow as pa

FORM_KEY = b"penstock.form"
OUTLINE_COLUMN = "penstock.outline"
"""Number of the outline of each row, if there are several outlines."""
_MOST_COLUMNS = 512
_MOST_OUTLINES = 64
_LARGEST_ROW_BYTES = 1 << 31

How = tuple[Any, ...]
"""How the values of a column are stored: (kind,), or (kind, dtype, shape) for arrays of one shape."""
NONE, PORTABLE = ("none",), ("portable",)
_SIMPLE = {bool: ("bool",), float: ("float",), bytes: ("bytes",), type(None): NONE}


class Misfit(Exception):
    """A sample does not fit the layout."""


@dataclass
class Layout:
    """The columns of all samples of a shard."""

    outlines: list[Outline] = field(default_factory=list)
    columns: dict[str, How] = field(default_factory=dict)
    whole: bool = False
    """Whether one column holds whole samples, because samples differ too much to have columns for their values."""

    def take_apart(self, sample: Any) -> tuple[Outline, list[Any]]:
        return (WHOLE, [sample]) if self.whole else forms.take_apart(sample)

    def learn(self, sample: Any) -> None:
        """Extend the layout so that the sample fits."""
        outline, values = self.take_apart(sample)
        if outline not in self.outlines:
            self.outlines.append(outline)
        for name, value in zip(outline.names, values, strict=True):
            known, new = self.columns.get(name), how(value)
            self.columns[name] = new if known is None else _wider(known, new)
        too_many = len(self.outlines) > _MOST_OUTLINES or len(self.columns) > _MOST_COLUMNS
        if not self.whole and (too_many or OUTLINE_COLUMN in self.columns):
            self.whole, self.outlines, self.columns = True, [WHOLE], {"value": PORTABLE}

    def copy(self) -> Layout:
        return Layout(list(self.outlines), dict(self.columns), self.whole)

    @classmethod
    def of_anything(cls) -> Layout:
        """A layout that fits every sample."""
        return cls([WHOLE], {"value": PORTABLE}, True)

    def to_schema(self) -> pa.Schema:
        import pyarrow as pa

        fields = [pa.field(name, column_type(kept)) for name, kept in self.columns.items()]
        if len(self.outlines) > 1:
            fields.append(pa.field(OUTLINE_COLUMN, pa.int32()))
        form = {
            "version": forms.FORM_VERSION,
            "outlines": [[outline.kind, list(outline.names)] for outline in self.outlines],
            "columns": {name: list(kept) for name, kept in self.columns.items()},
        }
        return pa.schema(fields, metadata={FORM_KEY: json.dumps(form, separators=(",", ":")).encode()})

    @classmethod
    def of_schema(cls, schema: pa.Schema) -> Layout | None:
        """The layout in a schema that penstock wrote; None for files of other programs. Raises ValueError if it is not
        valid."""
        text = (schema.metadata or {}).get(FORM_KEY)
        if text is None:
            return None
        try:
            form = json.loads(text)
            if form["version"] != forms.FORM_VERSION:
                raise ValueError(f"it has version {form['version']}; this penstock reads version {forms.FORM_VERSION}")
            outlines = [forms.read_outline(kind, names) for kind, names in form["outlines"]]
            columns = {str(name): _read_how(kept) for name, kept in form["columns"].items()}
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as problem:
            raise ValueError(f"its metadata cannot be read: {problem!r}") from problem
        expected = [(name, column_type(kept)) for name, kept in columns.items()]
        found = [(each.name, each.type) for each in schema if each.name != OUTLINE_COLUMN]
        if found != expected or not {name for outline in outlines for name in outline.names} <= set(columns):
            raise ValueError("its columns differ from those that its metadata name")
        if not outlines and columns:
            raise ValueError("its metadata contain no outline of the samples")
        if len(outlines) > 1 and OUTLINE_COLUMN not in schema.names:
            raise ValueError(f"it has no column {OUTLINE_COLUMN}")
        return cls(outlines, columns)


def how(value: Any) -> How:
    """The most specific way to store a value."""
    kind = type(value)
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if kind is int:
        return ("int",) if -(1 << 63) <= value < 1 << 63 else PORTABLE
    if kind is str:
        return ("str",) if forms.is_text(value) else PORTABLE
    found = forms.array_of(value)
    if found is None or not 0 < found[2].nbytes < _LARGEST_ROW_BYTES or found[2].dtype.char in "gG":
        # Arrow has no long doubles.
        return PORTABLE
    return (found[0], found[1], found[2].shape)


def _wider(one: How, other: How) -> How:
    if one == other or other == NONE:
        return one
    return other if one == NONE else PORTABLE


def _read_how(kept: Any) -> How:
    kind = kept[0]
    if kind in ("tensor", "array", "scalar"):
        _, dtype, shape = kept
        shape = tuple(shape)
        if not all(type(size) is int and size > 0 for size in shape) or (kind == "scalar" and shape):
            raise ValueError(f"a shape {shape}")
        if math.prod(shape) * forms.bits_dtype(dtype).itemsize >= _LARGEST_ROW_BYTES:
            raise ValueError(f"rows of {shape}")
        return (kind, dtype, shape)
    if kind not in ("none", "bool", "int", "float", "str", "bytes", "portable") or len(kept) != 1:
        raise ValueError(f"a column is stored as {kept}, which penstock does not know")
    return (kind,)


@functools.lru_cache(1024)
def column_type(kept: How) -> pa.DataType:
    import pyarrow as pa

    plain = {
        "none": pa.null(), "bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "str": pa.large_string(),
        "bytes": pa.large_binary(), "portable": pa.large_binary(),
    }  # fmt: skip
    if kept[0] in plain:
        return plain[kept[0]]
    bits = forms.bits_dtype(kept[1])
    # Arrow has no complex numbers, and stores booleans as bits. In numpy's format both can be read in place.
    number = {"b": "u1", "c": f"f{bits.itemsize // 2}"}.get(bits.kind, bits.str)
    count = math.prod(kept[2]) * bits.itemsize // np.dtype(number).itemsize
    return pa.list_(pa.from_numpy_dtype(np.dtype(number)), count)


# -- writing --------------------------------------------------------------------------------------


class BatchBuilder:
    """Collects samples. It copies each sample at once, because a dataset may reuse the memory of an array."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._places = {outline: place for place, outline in enumerate(layout.outlines)}
        self._schema = layout.to_schema()
        self._clear()

    def _clear(self) -> None:
        self.rows = self.data_bytes = 0
        self._outlines: list[int] = []
        self._columns = {name: _ColumnBuilder(kept) for name, kept in self._layout.columns.items()}

    def add(self, sample: Any) -> None:
        """Add a sample. Raises Misfit if the sample does not fit the layout, and forms.CannotCarry."""
        outline, values = self._layout.take_apart(sample)
        place = self._places.get(outline)
        if place is None:
            raise Misfit
        given = dict(zip(outline.names, values, strict=True))
        for name, column in self._columns.items():
            self.data_bytes += column.add(given.get(name))
        self._outlines.append(place)
        self.rows += 1

    def finish(self) -> pa.RecordBatch:
        import pyarrow as pa

        arrays = [column.finish(self.rows) for column in self._columns.values()]
        if len(self._layout.outlines) > 1:
            arrays.append(pa.array(self._outlines, pa.int32()))
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._clear()
        return batch


class _ColumnBuilder:
    def __init__(self, kept: How) -> None:
        self._kept = kept
        self._data = bytearray()
        self._ends = [0]
        self._values: list[Any] = []
        self._valid: list[bool] = []
        self._row_bytes = 0
        if len(kept) == 3:
            self._row_bytes = math.prod(kept[2]) * forms.bits_dtype(kept[1]).itemsize

    def add(self, value: Any) -> int:
        """Add a value; returns the bytes that it takes."""
        kind = self._kept[0]
        self._valid.append(value is not None)
        if self._row_bytes:
            if value is None:
                self._data += bytes(self._row_bytes)
            else:
                if how(value) != self._kept:
                    raise Misfit
                found = forms.array_of(value)
                assert found is not None
                self._data += np.ascontiguousarray(found[2]).reshape(-1).view(np.uint8).data
            return self._row_bytes
        if value is not None and kind != "portable" and how(value) != self._kept:
            raise Misfit
        if kind in ("bool", "int", "float", "none"):
            self._values.append(value)
            return 8
        if value is not None:
            self._data += (
                value.encode() if kind == "str" else value if kind == "bytes" else forms.portable_bytes(value).data
            )
        self._ends.append(len(self._data))
        return 8 + self._ends[-1] - self._ends[-2]

    def finish(self, rows: int) -> pa.Array:
        import pyarrow as pa

        kind = column_type(self._kept)
        if self._kept[0] in ("bool", "int", "float", "none"):
            return pa.array(self._values, kind)
        valid = None if all(self._valid) else pa.array(self._valid).buffers()[1]
        data = pa.py_buffer(self._data)
        if self._row_bytes:
            count = rows * kind.list_size
            numbers = pa.Array.from_buffers(kind.value_type, count, [None, data])
            return pa.Array.from_buffers(kind, rows, [valid], children=[numbers])
        ends = pa.py_buffer(np.array(self._ends, np.int64))
        return pa.Array.from_buffers(kind, rows, [valid, ends, data])


# -- reading --------------------------------------------------------------------------------------

Take = Callable[[Any, int, int], np.ndarray]
"""(buffer, start, length) -> these bytes, which the caller may write to."""


def value_reader(kept: How, column: pa.Array, rows: int, take: Take) -> Callable[[int], Any]:
    """A function from row to value, which is None for a null. Raises ValueError for columns that are not consistent."""
    kind = kept[0]
    if kind == "none":
        return lambda row: None
    buffers = column.buffers()
    if column.offset or len(column) != rows:
        raise ValueError("a column has an offset or the wrong length")
    bitmap = None if buffers[0] is None else _words(buffers[0], np.uint8, -(-rows // 8))
    read = _value_reader(kept, buffers, rows, take)
    if bitmap is None:
        return read
    return lambda row: read(row) if bitmap[row >> 3] >> (row & 7) & 1 else None


def _value_reader(kept: How, buffers: list[Any], rows: int, take: Take) -> Callable[[int], Any]:
    kind = kept[0]
    if kind == "bool":
        bits = _words(buffers[1], np.uint8, -(-rows // 8))
        return lambda row: bool(bits[row >> 3] >> (row & 7) & 1)
    if kind in ("int", "float"):
        numbers = _words(buffers[1], np.int64 if kind == "int" else np.float64, rows)
        return lambda row: numbers[row].item()
    if len(kept) == 3:
        return _array_reader(kept, buffers[-1], rows, take)
    ends = _words(buffers[1], np.int64, rows + 1 if rows else 0)
    data = buffers[2]
    size = 0 if data is None else data.size

    def place(row: int) -> tuple[int, int]:
        start, end = int(ends[row]), int(ends[row + 1])
        if not 0 <= start <= end <= size:
            raise ValueError(f"a value claims the bytes from {start} to {end} of {size}")
        return start, end - start

    view = memoryview(b"") if data is None else memoryview(data)
    if kind == "portable":
        return lambda row: forms.read_portable_bytes(take(data, *place(row)))

    def read(row: int) -> Any:
        start, length = place(row)
        raw = bytes(view[start : start + length])
        return raw if kind == "bytes" else raw.decode()

    return read


def _array_reader(kept: How, data: Any, rows: int, take: Take) -> Callable[[int], Any]:
    kind, dtype, shape = kept
    bits = forms.bits_dtype(dtype)
    row_bytes = math.prod(shape) * bits.itemsize
    _words(data, np.uint8, rows * row_bytes)
    return lambda row: forms.array_again(kind, dtype, take(data, row * row_bytes, row_bytes).view(bits).reshape(shape))


def _words(buffer: Any, dtype: Any, count: int) -> np.ndarray:
    size = 0 if buffer is None else buffer.size
    if size < count * np.dtype(dtype).itemsize:
        raise ValueError(f"a column claims {count} values of {np.dtype(dtype)} in {size} bytes")
    return np.empty(0, dtype) if buffer is None or not count else np.frombuffer(buffer, dtype, count)
