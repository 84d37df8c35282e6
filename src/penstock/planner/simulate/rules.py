"""The part of the loader's own rules that the simulator uses.

In:  nothing.
Out: ``Rules``: the part of the loader's ``LoaderRules`` that decides speed and memory.
Runs in: anywhere. The planner does not import the loader: the caller passes the rules in.
"""

from __future__ import annotations

from typing import Protocol


class Rules(Protocol):
    """The rules of the loader, which are documented at ``LoaderRules``."""

    @property
    def auto_memory_share(self) -> float: ...

    @property
    def recent_batches(self) -> int: ...

    @property
    def recent_needs(self) -> int: ...

    @property
    def ahead_per_worker(self) -> int: ...

    @property
    def bound_per_worker(self) -> int: ...

    def stretch_rows(self, batch_rows: int) -> int: ...

    def rows_per_task(self, row_s: float | None, batch_rows: int) -> int: ...

    def depth(self, row_s: float | None, batch_rows: int, workers: int, *, rows: int, cheap: int = 0) -> int: ...

    def most_ahead(self, batch_bytes: int, limit_bytes: int, workers: int, *, per_worker: int = 0) -> int: ...

    def cheap_ahead(self, batch_bytes: int, limit_bytes: int, workers: int, *, per_worker: int = 0) -> int: ...

    def slots(self, depth: int) -> int: ...

    def own_bytes(self, memory_bytes: int) -> int: ...

    def capacity_bytes(self, need_bytes: int) -> int: ...

    def may_reuse(self, free_bytes: int, need_bytes: int) -> bool: ...
