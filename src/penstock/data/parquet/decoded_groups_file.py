"""Keeps large row groups, decoded once for all processes of this machine, in one file that these processes map.

In:  a row group as bytes, which ``GroupsOnDemand`` in ``groups`` decodes.
Out: its rows, read in place from the file. The page cache holds the parts of the file that are read often; the kernel
     may evict them at any time.
Runs in: trainer and worker, any number of threads and processes.
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Iterable
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.data.parquet.encoded_rows import EncodedRows
from penstock.data.parquet.rows_file import (
    CLOCK,
    LENGTH,
    REFUSED,
    VERSION,
    WARNED,
    WRITTEN,
    Handle,
    RowsFile,
    found_or_made,
)
from penstock.data.shared.file_mapping import file_pages_bytes, forget_pages, map_shared, punch_hole
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.data.parquet.row_groups import ParquetFiles

_MOST_MAPPED = 64
_ROWS_UNSEEN = 16
"""After this many rows, a process checks again how much of the file is in its memory. Around each page that is read,
Linux maps between 64 KiB and 2 MiB."""
_SOON, _SOON_SHARE = 4, 0.25
"""A group is read again soon if at most this many groups, or this share of the groups in the file, are opened
before."""
_MOST_REFUSED = 32
_DECODED, _DECODED_BYTES = 1.125, 8 << 10
"""A decoded group takes this many times the bytes that its footer suggests, plus this many bytes."""


class DecodedGroups:
    """The decoded row groups of one dataset."""

    def __init__(self, name: str, files: ParquetFiles, mapped_bytes: int) -> None:
        self._name = name
        """32 hexadecimal digits. Datasets of the same rows have the same name."""
        self._files = files
        self._mapped_bytes = mapped_bytes
        """How many bytes of the file may be in memory of this process."""
        self._shared_place: str | None = None
        self._has_tried = False
        self._has_warned = False
        self._forget()

    def _forget(self) -> None:
        self._file: RowsFile | None = None
        # No lock, because a fork could inherit it locked: two threads may map the same group.
        self._mapped: OrderedDict[int, _Mapped] = OrderedDict()
        self._may_exceed = False
        """Whether more bytes are mapped than may be in memory of this process."""
        self._rows_unseen = self._mapped_before = 0

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_file", "_mapped")
        state = {name: value for name, value in self.__dict__.items() if name not in left_out}
        # A worker that is being started opens the file of its trainer; any other copy of this object looks for a file.
        is_worker = get_spawning_popen() is not None and self._file is not None
        return state | {"_has_tried": False, "_shared_place": self._file.place if is_worker and self._file else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def join(self) -> bool:
        """Find or create the file. False if there can be no such file; then the Parquet file is read each time."""
        if self._file is None and not self._has_tried:
            self._has_tried = True
            if sys.platform == "linux":
                with contextlib.suppress(OSError, ValueError):
                    name = bytes.fromhex(self._name)
                    file = found_or_made(name, self._files.group_bytes, self, self._shared_place)
                    # This fails where /proc is not mounted.
                    file.handle()
                    self._file = file
        return self._file is not None

    def open(self, group: int, count: int) -> EncodedRows | None:
        """The rows of a group, of which ``count`` are about to be read; None if the group is not in the file. The rows
        stay in the file until this thread opens another group."""
        file = self._file
        if file is None:
            return None
        handle = file.handle()
        if handle.held != group and not file.hold(handle, group):
            return None
        mapped = self._mapped.get(group)
        if mapped is None or mapped.version != file.versions[group]:
            mapped = self._map(file, handle, group)
            if mapped is None:
                return None
        if self._may_exceed:
            self._bound_pages(count)
        return mapped.rows

    def why_not(self, group: int) -> str | None:
        """Why a group that is not in the file must not be written to it: "" if a group that is more likely to be read
        soon would have to be evicted; a text for a warning if the group is too large, or if too many groups in a row
        were refused. None if the group is to be written."""
        file = self._file
        assert file is not None
        if file.lengths[group]:
            return None
        limit_bytes, taken_bytes = file.limit_bytes(), file.taken_bytes()
        # The bytes that the group took when it was written last, or a little more than its footer suggests.
        need_bytes = int(max(self._files.group_bytes[group] * _DECODED, file.table[WRITTEN, group])) + _DECODED_BYTES
        if taken_bytes + need_bytes <= limit_bytes:
            return None
        if need_bytes > limit_bytes:
            return f"there is only room for {format_bytes(limit_bytes)}"
        # In a random order, a group is evicted again before it is read again, and writing it takes longer than reading
        # it.
        since = file.numbers[CLOCK] - file.before[group]
        if file.before[group] and since <= max(_SOON, np.count_nonzero(file.table[LENGTH]) * _SOON_SHARE):
            file.numbers[REFUSED] = 0
            return None
        file.numbers[REFUSED] += 1
        if file.numbers[REFUSED] <= _MOST_REFUSED:
            return ""
        return f"{format_bytes(taken_bytes)} of decoded row groups take all the room that there is"

    def is_first_warning(self) -> bool:
        """Whether this is the first call of all processes that share the file."""
        if self._has_warned or (self._file is not None and self._file.numbers[WARNED]):
            return False
        self._has_warned = True
        if self._file is not None:
            self._file.numbers[WARNED] = 1
        return True

    def store(self, group: int, parts: Iterable[memoryview]) -> None:
        """Write a group, unless another thread has written it meanwhile. Raises OSError if there is no room."""
        file = self._file
        assert file is not None
        handle = file.handle()
        if not file.take_turn(handle, group):
            return
        first, end = file.range_of(group)
        try:
            # A process that was killed may have written a part of the group.
            punch_hole(handle.fd, first, end - first)
            at = first
            for part in parts:
                if at + len(part) > end:
                    raise OSError(f"when decoded, the row group takes more than {format_bytes(end - first)}")
                file.make_room(handle, len(part))
                at = file.write(handle, part, at)
                file.table[WRITTEN, group] = at - first
            file.table[VERSION, group] += 1
            file.table[LENGTH, group] = at - first
        except BaseException:
            punch_hole(handle.fd, first, end - first)
            raise
        finally:
            file.release(handle)

    # -- inside -------------------------------------------------------------------------------

    def _map(self, file: RowsFile, handle: Handle, group: int) -> _Mapped | None:
        view = map_shared(handle.fd, int(file.table[LENGTH, group]), file.range_of(group)[0])
        if view is None:
            return None
        mapped = self._mapped[group] = _Mapped(view, file.versions[group])
        for old in list(self._mapped)[:-_MOST_MAPPED]:
            self._mapped.pop(old, None)
        self._may_exceed = sum(len(each.view) for each in list(self._mapped.values())) > self._mapped_bytes
        return mapped

    def _bound_pages(self, count: int) -> None:
        """Forget pages if too many of them are mapped: pages that a process has read count as its memory until then."""
        self._rows_unseen += count
        if self._rows_unseen < _ROWS_UNSEEN:
            return
        self._rows_unseen = 0
        if file_pages_bytes() - self._mapped_before > self._mapped_bytes:
            for each in list(self._mapped.values()):
                forget_pages(each.view)
            self._mapped_before = file_pages_bytes()


class _Mapped:
    """A group that this process maps."""

    def __init__(self, view: memoryview, version: int) -> None:
        self.view = view
        self.version = version
        self.rows = EncodedRows(view)
