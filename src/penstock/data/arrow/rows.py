"""Turns rows of Arrow columns into Python values.

In:  a record batch and places in it.
Out: a dict per row; lists of numbers and tensors as new numpy arrays, other values as pyarrow converts them.
Runs in: trainer and worker.

pyarrow takes rows out of a batch by creating another batch, which takes about 10 µs per column even for one row. From
columns of the common types, values are therefore read directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

Reader = tuple[Callable[[np.ndarray], list[Any]], Callable[[int], Any]]
"""Two functions: places -> values, and one place -> its value. For one place, the second function takes a fifth of the
time of the first."""


class RowReader:
    """The rows of one record batch."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.nbytes = batch.nbytes
        readers = [_reader_of(column) for column in batch.columns]
        self._many = [many for many, _ in readers]
        self._one = [one for _, one in readers]

    def read(self, places: np.ndarray, columns: list[list[Any]]) -> None:
        """Append the values at ``places`` to ``columns``, one list per column of the batch."""
        for values, read in zip(columns, self._many, strict=True):
            values += read(places)

    def row(self, place: int) -> list[Any]:
        """The row at ``place``, as one value per column."""
        return [read(place) for read in self._one]


def row_of(batch: pa.RecordBatch, place: int) -> dict[str, Any]:
    """One row of a batch; faster than RowReader if no other row of it is wanted."""
    return {
        name: values_of(column.slice(place, 1))[0] if _makes_arrays(column.type) else column[place].as_py()
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }


def values_of(column: pa.Array) -> list[Any]:
    if _is_tensor(column.type):
        return _tensors_of(column)
    return _arrays_of(column) if _is_list_of_numbers(column.type) else column.to_pylist()


# -- directly ---------------------------------------------------------------------------------------------------


def _reader_of(column: pa.Array) -> Reader:
    if not column.null_count:
        if _is_dictionary(column.type) and not column.dictionary.null_count:
            return _dictionary_reader(column)
        if _is_number(column.type):
            return _number_reader(column.to_numpy())
        width, is_text = _text_width(column.type)
        if width is not None:
            return _text_reader(column, width, is_text=is_text)
    return lambda places: values_of(column.take(_indices(places))), lambda place: values_of(column.slice(place, 1))[0]


def _indices(places: np.ndarray) -> pa.Array:
    import pyarrow as pa

    return pa.array(places)


def _dictionary_reader(column: pa.Array) -> Reader:
    (many, one), indices = _reader_of(column.dictionary), column.indices.to_numpy()
    numbers = indices.data
    return lambda places: many(indices[places]), lambda place: one(numbers[place])


def _number_reader(values: np.ndarray) -> Reader:
    numbers = values.data
    return lambda places: values[places].tolist(), lambda place: numbers[place]


def _text_reader(column: pa.Array, width: Any, *, is_text: bool) -> Reader:
    _, offsets, data = column.buffers()
    # For a few rows, indexing a memoryview is faster than indexing a numpy array.
    starts = np.frombuffer(offsets, width)[column.offset : column.offset + len(column) + 1].data
    view = memoryview(b"" if data is None else data)
    if is_text:
        return (
            lambda places: [str(view[starts[place] : starts[place + 1]], "utf-8") for place in places.tolist()],
            lambda place: str(view[starts[place] : starts[place + 1]], "utf-8"),
        )
    return (
        lambda places: [bytes(view[starts[place] : starts[place + 1]]) for place in places.tolist()],
        lambda place: bytes(view[starts[place] : starts[place + 1]]),
    )


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow.types as types

    return types.is_integer(kind) or types.is_float32(kind) or types.is_float64(kind)


def _is_dictionary(kind: pa.DataType) -> bool:
    import pyarrow.types as types

    return types.is_dictionary(kind)


def _text_width(kind: pa.DataType) -> tuple[Any, bool]:
    """The type of the offsets of a column of texts or bytes, or None for other columns; and whether the column holds
    texts."""
    import pyarrow.types as types

    if types.is_string(kind) or types.is_binary(kind):
        return np.int32, types.is_string(kind)
    if types.is_large_string(kind) or types.is_large_binary(kind):
        return np.int64, types.is_large_string(kind)
    return None, False


# -- through pyarrow -------------------------------------------------------------------------------------------


def _makes_arrays(kind: pa.DataType) -> bool:
    return _is_list_of_numbers(kind) or _is_tensor(kind)


def _is_tensor(kind: pa.DataType) -> bool:
    """Whether the type is arrow.fixed_shape_tensor: arrays of one shape, which is part of the type."""
    import pyarrow as pa

    return isinstance(kind, pa.FixedShapeTensorType)


def _tensors_of(column: Any) -> list[Any]:
    kind = column.type
    flat = _arrays_of(column.storage) if _is_list_of_numbers(column.storage.type) else column.storage.to_pylist()

    def shaped(values: Any) -> Any:
        if values is None:
            return None
        # Values are stored in the order of ``shape``; the dimensions of the tensor are permuted.
        found = np.asarray(values).reshape(kind.shape)
        return found if kind.permutation is None else np.ascontiguousarray(found.transpose(kind.permutation))

    return [shaped(values) for values in flat]


def _is_list_of_numbers(kind: pa.DataType) -> bool:
    import pyarrow.types as types

    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return False
    value = kind.value_type
    return types.is_integer(value) or types.is_floating(value)


def _arrays_of(column: pa.Array) -> list[Any]:
    """One array per row; None for a missing list, and a Python list if a number in it is missing."""
    import pyarrow.types as types

    rows, numbers = len(column), column.values
    if types.is_fixed_size_list(column.type):
        bounds = np.arange(column.offset, column.offset + rows + 1) * column.type.list_size
    else:
        bounds = column.offsets.to_numpy()
    if numbers.null_count or column.null_count:
        present = column.is_valid().to_numpy(zero_copy_only=False)
        pieces = [numbers.slice(bounds[row], bounds[row + 1] - bounds[row]) for row in range(rows)]
        return [_array_or_list(piece) if is_there else None for piece, is_there in zip(pieces, present, strict=True)]
    whole = numbers.to_numpy()
    return [whole[bounds[row] : bounds[row + 1]].copy() for row in range(rows)]


def _array_or_list(numbers: pa.Array) -> Any:
    return numbers.to_pylist() if numbers.null_count else numbers.to_numpy().copy()
