"""Maps the files of one store: header, rows of threads, table of entries, bytes of values.

In:  two files, in memory or on disk, and a lock file.
Out: the same words and bytes in every process that has the store open; counts over all these processes.
Runs in: trainer, worker, command line. Does not import torch.

*meta* holds the header, one row per thread that uses the store, and the table; *data* holds the values. Both files are
sparse: pages exist only where something was written, and are released when this is removed. A process that changes the
header or the table holds the writer's lock and marks the header as being changed. If the next holder of the lock finds
that mark, the previous holder crashed during its change (``repair``).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from penstock.arena import mapping
from penstock.cache.store.locks import RangeLock
from penstock.errors import CacheError

PAGE_BYTES = mmap.PAGESIZE
MAGIC = 0x334B4354534E4550
"""Identifies the layout below. Change it with the layout."""

META_BYTES = 1 << 34
HEADER_BYTES = 4096
_HEADER_WORDS = HEADER_BYTES // 8
ROWS = 1024
ROW_WORDS = 8
ENTRY_WORDS = 8
ENTRY_BYTES = 8 * ENTRY_WORDS
FIRST_SLOTS_LOG2 = 10
_ROWS_AT = HEADER_BYTES
TABLES_AT = _ROWS_AT + 8 * ROWS * ROW_WORDS

# Words of the header.
H_MAGIC, H_LIMIT, H_TABLE, H_CHANGING, H_ITEMS, H_VALUE_BYTES, H_CURSOR, H_GAP_END = range(8)
H_EVICTIONS, H_HITS, H_MISSES, H_PASSED, H_USED_SLOTS, H_VIRTUAL, H_CORRUPT, H_POLICY = range(8, 16)
H_TAGS, H_READY, H_AUTO, H_CLAIMS = range(16, 20)

H_POSITIONS = 64
"""The first of one word per loader: which of its forecasts is in force, and its batch; see ``shared_forecasts``."""
MOST_FORECASTS = 256

H_GROUPS = 320
"""The first of the groups of values that a process has requested since the store was opened."""
MOST_GROUPS = 128

# Words of a thread's row.
R_READING, R_HITS, R_MISSES, R_PASSED, R_WRITING, R_CORRUPT = range(6)

# Bytes of the lock file.
L_WRITER, L_ROWS, L_FORECASTS, L_KEYS = 0, 1 << 20, 1 << 21, 1 << 32

_WRITER_WITHIN_S = 5.0


class Payload(Protocol):
    """A value as bytes, ready to be written."""

    total_bytes: int

    def write(self, target: np.ndarray) -> None: ...


class Extent(NamedTuple):
    """The place in the data where a value is written."""

    offset: int
    has_pages: bool
    """Whether an earlier value was here, whose pages still exist."""


class Region:
    """One process's view of the files of a store; see ``Memory`` and ``Disk``."""

    record_bytes = 0
    """Bytes before the value in its extent."""

    def __init__(self, meta_fd: int, data_fd: int, lock_fd: int) -> None:
        """Takes over the descriptors of files that ``write_header`` was called on."""
        self.meta_fd, self.data_fd, self.lock_fd = meta_fd, data_fd, lock_fd
        self._meta_buffer = mapping.map_shared(meta_fd, META_BYTES)
        self.meta = memoryview(self._meta_buffer).cast("B")
        self.words = self.meta.cast("Q")
        """``meta`` as 64-bit words: a reader sees a word as it is either before or after a write, never
        half-written."""
        words = np.frombuffer(self.meta, np.uint64, TABLES_AT // 8)
        self.header = words[:_HEADER_WORDS]
        if int(self.header[H_MAGIC]) != MAGIC:
            raise CacheError(
                "This cache was made by another version of penstock. End its processes, or use another name."
            )
        self.rows = words[_HEADER_WORDS:].reshape(ROWS, ROW_WORDS)
        self._data = mapping.map_shared(data_fd, int(self.header[H_VIRTUAL]))
        self.values = np.frombuffer(self._data, np.uint8)
        self.repair: Callable[[], None] = lambda: None
        """Makes table and header consistent after a process crashed while it changed them."""
        self._writer = RangeLock(lock_fd, L_WRITER)
        self._table: tuple[int, np.ndarray] = (0, words[:0])

    def join(self) -> None:
        """Call this in a forked process before it uses a region that its parent opened."""

    # -- values -------------------------------------------------------------------------------

    def read(self, digest: bytes, offset: int, used_bytes: int) -> np.ndarray | None:
        """A private copy of a value; None if the bytes there are not the value of that key."""
        raise NotImplementedError

    def write(self, digest: bytes, place: Extent, packed: Payload) -> None:
        """Write a value into its extent. Raises OSError."""
        raise NotImplementedError

    def reserve_table(self, where: int) -> None:
        """Allocate the room for a table. Raises OSError."""

    def drop_values(self, start: int, end: int) -> None:
        """Release pages to the system, even if other processes have them mapped."""
        if end > start:
            assert start >= 0 and end <= len(self.values), "outside the data"
            mapping.remove(self._data, start, end)

    # -- the table --------------------------------------------------------------------------

    def table(self) -> np.ndarray:
        """The entries, one row of words each. Once the table has grown, this is another array."""
        where = int(self.header[H_TABLE])
        if self._table[0] != where:
            self._table = where, self.table_at(where)
        return self._table[1]

    def table_at(self, where: int) -> np.ndarray:
        slots = 1 << (where & 63)
        return np.frombuffer(self.meta, np.uint64, ENTRY_WORDS * slots, where & ~63).reshape(slots, ENTRY_WORDS)

    @property
    def index_bytes(self) -> int:
        """The size of header, rows and table."""
        return TABLES_AT + (ENTRY_BYTES << (int(self.header[H_TABLE]) & 63))

    def counts(self) -> dict[str, int]:
        """Figures of the store by name, over all threads that use it or have used it."""
        header = self.header

        def total(ended: int, word: int) -> int:
            return int(header[ended]) + int(self.rows[:, word].sum())

        return {
            "items": int(header[H_ITEMS]),
            "bytes": int(header[H_VALUE_BYTES]) + self.index_bytes,
            "limit_bytes": int(header[H_LIMIT]),
            "hits": total(H_HITS, R_HITS),
            "misses": total(H_MISSES, R_MISSES),
            "evictions": int(header[H_EVICTIONS]),
            "passed": total(H_PASSED, R_PASSED),
            "corrupt": total(H_CORRUPT, R_CORRUPT),
        }

    # -- changing -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def changing(self) -> Iterator[np.ndarray]:
        """Hold the writer's lock; yields the header. Raises TooLong if a living process does not release the lock."""
        with self._writer.held(_WRITER_WITHIN_S):
            header = self.header
            if header[H_CHANGING]:
                self.repair()
            header[H_CHANGING] = 1
            yield header
            # The mark is not reset after an exception, so that the next holder repairs the unfinished change.
            header[H_CHANGING] = 0

    def drop_table(self, where: int) -> None:
        """Release the pages of a table that the header no longer points to."""
        start = -(-(where & ~63) // PAGE_BYTES) * PAGE_BYTES
        end = ((where & ~63) + (ENTRY_BYTES << (where & 63))) // PAGE_BYTES * PAGE_BYTES
        if end > start:
            mapping.remove(self._meta_buffer, start, end)

    def close(self) -> None:
        """Close this process's view. Values read from it are copies and stay valid."""
        # A reference cycle would keep the memory mapped until the garbage collector runs.
        self.repair = lambda: None
        for fd in (self.meta_fd, self.data_fd, self.lock_fd):
            if fd >= 0:
                os.close(fd)


_PIECES_A_CALL = 512


def write_pieces(fd: int, pieces: list[Any], offset: int) -> None:
    """Write the pieces one after the other, from ``offset`` on. Raises OSError."""
    rest = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    while rest:
        written = os.pwritev(fd, rest[:_PIECES_A_CALL], offset)
        offset += written
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = rest[0][written:]


def write_header(meta_fd: int, *, limit_bytes: int, virtual_bytes: int, policy: int) -> None:
    header = np.zeros(_HEADER_WORDS, np.uint64)
    header[H_MAGIC], header[H_LIMIT], header[H_VIRTUAL] = MAGIC, limit_bytes, virtual_bytes
    header[H_TABLE], header[H_POLICY] = TABLES_AT | FIRST_SLOTS_LOG2, policy
    os.pwrite(meta_fd, header.tobytes(), 0)
