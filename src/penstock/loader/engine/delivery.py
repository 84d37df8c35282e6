"""Turns a ready batch into the user's data: tensors over the batch's segment, which is page-locked where a device will
read it.

In:  batches whose rows or result lie in the arena.
Out: nested data. The segment stays lent for as long as anything refers to this data.
Runs in: trainer, under the engine's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.arena.arena import Arena
from penstock.arena.codec import decode, decode_bytes
from penstock.arena.layout import layout_of
from penstock.device.page_locks import PageLocks
from penstock.loader.engine.batch import Batch

_NO_BYTES = np.empty(0, np.uint8)


class Delivery:
    def __init__(self, arena: Arena, page_locks: PageLocks | None) -> None:
        self._arena = arena
        self._page_locks = page_locks

    def data_of(self, batch: Batch, stays_on_host: Callable[[Any], bool] | None) -> Any:
        """The batch's data. ``stays_on_host`` returns whether the user gets the data in page-locked memory; None if
        that is always so."""
        texts = self._texts(batch) if batch.result is None else []
        if self._page_locks is None:
            return self._decoded(batch, texts)
        locked = [segment for segment in batch.segments if self._page_locks.lock(segment)]
        data = self._decoded(batch, texts)
        if stays_on_host is None or stays_on_host(data):
            for segment in locked:
                self._arena.fence(segment)
        else:
            leases = [self._arena.pass_through(segment) for segment in batch.segments]
            batch.leases = [lease for lease in leases if lease is not None]
        return data

    def _texts(self, batch: Batch) -> list[list[Any]]:
        """The texts of a batch of rows. The texts become Python objects of the user, so their segments are released."""
        texts = batch.texts()
        for segment in batch.extra.values():
            self._arena.release(segment)
        batch.extra.clear()
        return texts

    def _decoded(self, batch: Batch, texts: list[list[Any]]) -> Any:
        result = batch.result
        if result is None:
            assert batch.template is not None
            layout = layout_of(batch.template, batch.rows)
            if batch.rows_segment is None:
                return layout.batch(_NO_BYTES, texts, batch.row_count())
            token = self._arena.lend(batch.rows_segment, layout.total_bytes)
            return layout.batch(token, texts, batch.row_count())
        if result.kind == "inline":
            assert result.pickled is not None
            return decode_bytes(result.pickled)
        token = self._arena.lend(batch.extra[result.segment], result.used_bytes)
        return decode(result.pickled, result.offsets, token)
