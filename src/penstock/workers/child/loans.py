"""The row of the sample that is being made, lent to the code that makes it.

In:  the place of the next row; shapes and dtypes that the dataset asks for (``penstock.empty``).
Out: tensors over the row's own bytes; memory of its own for each that outlives its sample.
Runs in: worker, in a process of its own.

The user may keep a tensor, return it elsewhere, or fork. So before a row is written, and again before the next sample
is made, every loan must have ended or lie exactly where the sample has it. If one does not, the segment moves to
another address, and the old address becomes private memory that no other process sees.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from penstock import row_memory
from penstock.arena.layout import BatchLayout, lies_at
from penstock.arena.segment import HAS_MEMFD, create_segment

_LEAST_BYTES = 64 << 10
"""Smaller parts of a sample are not lent: to copy them takes no longer than to lend them."""
_MOST_MOVES = 4
"""After so many moves nothing is lent any more: the dataset keeps its tensors, and a move costs more than a copy."""


class LendingViews(Protocol):
    """The methods of a worker's views that loans need."""

    def array(self, number: int) -> np.ndarray: ...
    def move(self, number: int, keep: Sequence[tuple[int, int]]) -> None: ...


class OpenRow(NamedTuple):
    """The row of the sample that is being made."""

    segment: int
    layout: BatchLayout
    row: int


class Loan(NamedTuple):
    """Bytes of a row that a tensor was made over."""

    leaf: int
    start: int
    end: int
    address: int
    memory: weakref.ref[np.ndarray]
    """Gone when no tensor or array views these bytes any more."""


class Loans:
    """The loans of one worker process. Datasets may ask from any thread."""

    def __init__(self, views: LendingViews) -> None:
        self._views = views
        self.lock = threading.RLock()
        """Held while rows are written: a fork in another thread would move the segment meanwhile."""
        self._open: OpenRow | None = None
        self._segment = 0
        """Where the loans are."""
        self._loans: list[Loan] = []
        self._moves_left = 0
        """How often segments may still move; at 0 nothing is lent."""

    def install(self) -> None:
        """Lend rows through ``penstock.empty``, in this process, which has its mappings to itself, if its system can
        move a segment."""
        if not _can_move():
            return
        self._moves_left = _MOST_MOVES
        row_memory.lend_from(self.lend)
        # A child shares the mapping: it would see later batches in what it inherits, and write into them.
        os.register_at_fork(before=self.settle, after_in_child=self._forget)

    def open(self, segment: int, layout: BatchLayout, row: int) -> None:
        """The sample for this row is made next. No loan is out."""
        with self.lock:
            if self._moves_left:
                self._open, self._segment = OpenRow(segment, layout, row), segment

    def lend(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """A part of the open row that is not lent, or None."""
        with self.lock:
            if self._open is None:
                return None
            taken = {loan.leaf for loan in self._alive()}
            for leaf, what in enumerate(self._open.layout.template.leaves):
                if what.shape == shape and what.dtype is dtype and what.row_bytes >= _LEAST_BYTES and leaf not in taken:
                    return self._lend(leaf, self._open, shape, dtype)
        return None

    def close(self, values: Sequence[Any] | None) -> None:
        """The sample is made and is written next, or does not match the layout (None). Loans are only left where a
        value lies in its place."""
        with self.lock:
            self._open = None
            alive = self._alive()
            if values is None or not all(lies_at(values[loan.leaf], loan.address) for loan in alive):
                self._move(alive)

    def settle(self) -> None:
        """The sample was written and dropped, or failed: what is still held becomes private memory."""
        with self.lock:
            self._open = None
            self._move(self._alive())
            self._loans.clear()

    def _forget(self) -> None:
        """In a forked child: another thread may have held the lock."""
        self.lock = threading.RLock()
        row_memory.lend_from(None)

    def _alive(self) -> list[Loan]:
        return [loan for loan in self._loans if loan.memory() is not None]

    def _lend(self, leaf: int, row: OpenRow, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        start, end = row.layout.span(leaf, row.row)
        memory = self._views.array(row.segment)[start:end]
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        # Not a view of another tensor, for which some methods do not work.
        strides = torch.empty(shape, device="meta").stride()
        tensor = torch.empty(0, dtype=dtype).set_(storage, 0, torch.Size(shape), strides)
        self._loans.append(Loan(leaf, start, end, tensor.data_ptr(), weakref.ref(memory)))
        return tensor

    def _move(self, alive: list[Loan]) -> None:
        """Leave the bytes of these loans to those that hold them."""
        if not alive:
            return
        self._moves_left -= 1
        try:
            self._views.move(self._segment, [(loan.start, loan.end) for loan in alive])
        except OSError as error:
            # The dataset could write into later batches. The trainer has these rows fetched again, without loans.
            print(f"penstock: worker ends: it could not move {len(alive)} lent tensors: {error}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)
        self._loans.clear()


def _can_move() -> bool:
    if not HAS_MEMFD:
        return False
    try:
        create_segment(0, 1).move([(0, 1)])
    except (OSError, AttributeError):  # another kernel's mremap, or none
        return False
    return True
