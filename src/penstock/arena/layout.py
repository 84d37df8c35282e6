"""Where the rows of a batch lie in a segment, and how rows are written and read.

In:  a template, a number of rows, bytes.
Out: rows written into a segment as samples are produced, and the batch that ``default_collate`` would have made, as
     views of these rows.
Runs in: worker (writes), trainer and collating worker (read).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penstock.arena.codec import ALIGN_BYTES, is_plain
from penstock.arena.template import Template, TemplateLeaf, matcher


class BatchLayout:
    """Where the rows of each leaf lie in a batch of ``rows`` samples."""

    def __init__(self, template: Template, rows: int) -> None:
        self.template = template
        self.rows = rows
        self.offsets: list[int] = []
        end = 0
        for leaf in template.leaves:
            start = -(-end // ALIGN_BYTES) * ALIGN_BYTES
            self.offsets.append(start)
            end = start + leaf.row_bytes * rows
        self.total_bytes = end
        self.match = matcher(template)

    def spans(self, rows: range) -> list[tuple[int, int]]:
        """The first byte and the end of consecutive rows, for each leaf that takes bytes."""
        return [
            (offset + rows.start * leaf.row_bytes, offset + rows.stop * leaf.row_bytes)
            for leaf, offset in zip(self.template.leaves, self.offsets, strict=True)
            if leaf.row_bytes
        ]

    def span(self, leaf: int, row: int) -> tuple[int, int]:
        """Where one row of one leaf lies: first byte and end."""
        row_bytes = self.template.leaves[leaf].row_bytes
        start = self.offsets[leaf] + row * row_bytes
        return start, start + row_bytes

    def columns(self, source: np.ndarray) -> list[torch.Tensor | None]:
        """For each leaf, a tensor of all rows over ``source`` (None for text). Each tensor keeps ``source`` alive."""
        return [
            None if leaf.dtype is None else _column(source, leaf, offset, self.rows)
            for leaf, offset in zip(self.template.leaves, self.offsets, strict=True)
        ]

    def batch(self, source: np.ndarray, texts: Sequence[list[Any]], rows: int) -> Any:
        """The batch that ``default_collate`` returns for the first ``rows`` samples; ``texts`` has one list per text
        leaf."""
        columns = iter(self.columns(source))
        listed = iter(texts)
        if rows == self.rows:
            values = [next(listed) if c is None else c for c in columns]
        else:
            values = [next(listed)[:rows] if c is None else c[:rows] for c in columns]
        return _collated(self.template.shape, iter(values))

    def rebuild(self, values: Sequence[Any]) -> Any:
        """The sample that a matcher split into ``values``."""
        return _rebuilt(self.template.shape, iter(values))

    def sample(
        self, columns: Sequence[torch.Tensor | None], texts: Sequence[Sequence[Any]], row: int, text_row: int
    ) -> Any:
        """The sample that was written at ``row``; its texts are at ``text_row`` of each list in ``texts``."""
        listed = iter(texts)
        values = [
            next(listed)[text_row] if column is None else _row_value(leaf, column[row])
            for leaf, column in zip(self.template.leaves, columns, strict=True)
        ]
        return _rebuilt(self.template.shape, iter(values))


@functools.lru_cache(maxsize=256)
def layout_of(template: Template, rows: int) -> BatchLayout:
    return BatchLayout(template, rows)


class RowWriter:
    """Writes samples into their rows of one segment, a chunk at a time."""

    def __init__(self, layout: BatchLayout, target: np.ndarray) -> None:
        self._layout = layout
        self._columns = layout.columns(target)
        self._arrays = [None if c is None else _as_numpy(c) for c in self._columns]

    def write(self, first_row: int, flat: Sequence[Sequence[Any]], texts: list[list[Any]]) -> None:
        """Write the values of matching samples at consecutive rows; texts are appended to ``texts``, which has one list
        per leaf.

        A value that lies in its place already (``penstock.empty``) is not copied. Raises TypeError or RuntimeError,
        before any text is appended, if a tensor is not plain bytes.
        """
        end = first_row + len(flat)
        found: list[Sequence[Any]] = []
        for leaf, column, array, values in zip(
            self._layout.template.leaves, self._columns, self._arrays, zip(*flat, strict=True), strict=True
        ):
            if column is None:
                found.append(values)
            elif leaf.row_bytes == 0 or (len(values) == 1 and lies_at(values[0], column[first_row].data_ptr())):
                continue
            elif leaf.kind == "tensor":
                if array is not None and len(values) == 1:
                    np.copyto(array[first_row:end], values[0].numpy())
                else:
                    torch.stack(values, out=column[first_row:end])
            elif leaf.kind == "array":
                assert array is not None
                if len(values) == 1:
                    np.copyto(array[first_row:end], values[0])
                else:
                    np.stack(values, out=array[first_row:end])
            else:
                assert array is not None
                array[first_row:end] = values
        for listed, values in zip(texts, found, strict=True):
            listed.extend(values)


def lies_at(value: Any, address: int) -> bool:
    """Whether a tensor or array is nothing but the consecutive bytes from ``address`` on."""
    if isinstance(value, torch.Tensor):
        return is_plain(value) and value.data_ptr() == address and value.is_contiguous()
    return isinstance(value, np.ndarray) and value.ctypes.data == address and value.flags.c_contiguous


def _column(source: np.ndarray, leaf: TemplateLeaf, offset: int, rows: int) -> torch.Tensor:
    assert leaf.dtype is not None
    shape = (rows, *leaf.shape)
    if leaf.row_bytes == 0 or rows == 0:
        return torch.empty(shape, dtype=leaf.dtype)
    count = rows * leaf.row_bytes // leaf.dtype.itemsize
    column = torch.frombuffer(source, dtype=leaf.dtype, count=count, offset=offset)
    return column.view(shape) if leaf.shape else column


def _as_numpy(column: torch.Tensor) -> np.ndarray | None:
    """The rows of ``column`` as a numpy array, or None for dtypes that numpy lacks (bfloat16, float8)."""
    try:
        return column.numpy()
    except TypeError:
        return None


def _row_value(leaf: TemplateLeaf, row: torch.Tensor) -> Any:
    if leaf.kind == "tensor":
        return row
    if leaf.kind == "number":
        return row.item()
    array = row.numpy()
    return array if leaf.kind == "array" else array[()]


def _collated(shape: Any, values: Any) -> Any:
    """Containers as ``default_collate`` returns them: a plain tuple becomes a list."""
    head = shape[0]
    if head == "leaf":
        return next(values)
    if head == "dict":
        return {key: _collated(child, values) for key, child in zip(shape[1], shape[2], strict=True)}
    # torch's collate returns texts inside a sequence as a tuple, and all other texts as a list.
    items = [_collated(child, values) for child in shape[1]]
    items = [
        tuple(i) if child[0] == "leaf" and type(i) is list else i for child, i in zip(shape[1], items, strict=True)
    ]
    return items if head in ("list", "tuple") else head(*items)


def _rebuilt(shape: Any, values: Any) -> Any:
    head = shape[0]
    if head == "leaf":
        return next(values)
    if head == "dict":
        return {key: _rebuilt(child, values) for key, child in zip(shape[1], shape[2], strict=True)}
    items = [_rebuilt(child, values) for child in shape[1]]
    return items if head == "list" else tuple(items) if head == "tuple" else head(*items)
