"""Rows of Arrow columns as Python values.

In:  a record batch and places in it.
Out: a dict per row; lists of numbers as numpy arrays of the reader's own, everything else as pyarrow gives it.
Runs in: trainer and worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa


def rows_of(batch: pa.RecordBatch, places: np.ndarray) -> list[dict[str, Any]]:
    """The rows at ``places``, in that order."""
    taken = batch.take(places)
    names = batch.schema.names
    columns = [values_of(column) for column in taken.columns]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def row_of(batch: pa.RecordBatch, place: int) -> dict[str, Any]:
    return {
        name: column[place].as_py() if not _is_list_of_numbers(column.type) else values_of(column.slice(place, 1))[0]
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }


def values_of(column: pa.Array) -> list[Any]:
    return _arrays_of(column) if _is_list_of_numbers(column.type) else column.to_pylist()


def _is_list_of_numbers(kind: pa.DataType) -> bool:
    import pyarrow.types as types

    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return False
    value = kind.value_type
    return types.is_integer(value) or types.is_floating(value)


def _arrays_of(column: pa.Array) -> list[Any]:
    """One array per row; None for a missing list, and a Python list where a number in it is missing."""
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
