"""A model of torch's CUDA caching allocator: the memory that the allocator takes from the device for given requests.

In:  requests and frees in order, settings, and optionally a limit.
Out: allocated and reserved bytes, now and at the peak; raises ``DeviceFull`` when torch would run out of memory.
Runs in: anywhere; pure.

The rules (torch 2.6 to 2.13; only ``large_segment_size_mb`` changed between them, see ``alloc_conf``):

- Requests are rounded up to 512 bytes. Up to 1 MiB they come from the small pool, above from the large one.
- The request gets the free block that fits best: the smallest, then the one with the lowest address. The block is split
  if 512 bytes or more remain (small pool), or more than 1 MiB (large pool). A rest that is not split off counts as
  allocated.
- If no block fits, the device gives a segment: 2 MiB for small requests, 20 MiB below 10 MiB, else the request rounded
  up to 2 MiB.
- A freed block merges with free neighbours in its segment. Segments stay reserved until the device is full; then
segments without an allocated block are released, and the request is tried again.

All requests are on one stream. The address of a segment decides which of two equal free blocks is used first, so
``DeviceAddresses`` models CUDA's driver.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from penstock.gpu.allocator.alloc_conf import AllocatorSettings
from penstock.units import MIB

BLOCK_BYTES = 512
"""The size of every block is a multiple of this number."""
SMALL_BYTES = MIB
"""The largest request of the small pool."""
_SMALL_SEGMENT_BYTES = 2 * MIB
_LEAST_OWN_SEGMENT_BYTES = 10 * MIB
"""A request of this size or larger gets a segment of its own size."""
_ROUND_SEGMENT_BYTES = 2 * MIB
_ROOM_BYTES = 1 << 50
"""The address space of an expandable segment, which is larger than the memory of any device."""
_STRETCH_BYTES = 32 * MIB
_TOP_ADDRESS = 1 << 47
_DEFAULT = AllocatorSettings()


class DeviceFull(Exception):
    """A request does not fit even though all unused segments have been released."""

    def __init__(self, *, request_bytes: int, allocated_bytes: int, reserved_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"{request_bytes} bytes do not fit: {allocated_bytes} allocated, {reserved_bytes} reserved, "
            f"limit {limit_bytes}"
        )
        self.request_bytes, self.allocated_bytes = request_bytes, allocated_bytes
        self.reserved_bytes, self.limit_bytes = reserved_bytes, limit_bytes


class Block:
    """A part of a segment, with links to its neighbours."""

    __slots__ = ("address", "is_free", "is_mapped", "next", "pool", "previous", "size", "unused_since")

    def __init__(self, pool: _Pool, address: int, size: int) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.is_free = self.is_mapped = True
        self.previous: Block | None = None
        self.next: Block | None = None
        self.unused_since = 0

    @property
    def is_whole_segment(self) -> bool:
        return self.previous is None and self.next is None


class _Pool:
    """The free blocks, sorted by size and address, and the parts of expandable segments that have no memory."""

    def __init__(self, *, is_small: bool, segment_bytes: int) -> None:
        self.is_small, self.segment_bytes = is_small, segment_bytes
        self.order: list[tuple[int, int]] = []
        self.free: dict[int, Block] = {}
        self.unmapped: list[int] = []
        self.rooms: dict[int, Block] = {}
        self.searches = 0

    def insert(self, block: Block) -> None:
        insort(self.order, (block.size, block.address))
        self.free[block.address] = block
        block.unused_since = self.searches

    def remove(self, block: Block) -> None:
        del self.order[bisect_left(self.order, (block.size, block.address))]
        del self.free[block.address]

    def insert_unmapped(self, block: Block) -> None:
        insort(self.unmapped, block.address)
        self.rooms[block.address] = block

    def remove_unmapped(self, block: Block) -> None:
        self.unmapped.remove(block.address)
        del self.rooms[block.address]

    def take_out(self, block: Block) -> None:
        (self.remove if block.is_mapped else self.remove_unmapped)(block)


class DeviceAddresses:
    """The address space of one device, as CUDA's driver assigns it on Linux.

    The rule reproduces 17 trainings that were recorded on an H200 with driver 580; only one event differs. Addresses go
    from high to low, in stretches that begin at multiples of 32 MiB. The space that a segment leaves in its stretch is
    used for later segments that fit.
    """

    def __init__(self) -> None:
        self._lowest = _TOP_ADDRESS
        self._gaps: list[tuple[int, int]] = []
        """The start and the end of each free space above the lowest stretch, oldest first."""
        self._too_large = 0
        """The size from which on no gap has room for a segment."""

    def place(self, size: int) -> int:
        """The address of a new segment."""
        return self._in_gap(size) or self._new_stretch(size)

    def release(self, address: int, size: int) -> None:
        """Make the addresses of a segment free again."""
        start, end = address, address + size
        for gap in [gap for gap in self._gaps if gap[1] == start or gap[0] == end]:
            self._gaps.remove(gap)
            start, end = min(start, gap[0]), max(end, gap[1])
        self._add(start, end)

    def _in_gap(self, size: int) -> int | None:
        if size >= self._too_large:
            return None
        for at, (start, end) in enumerate(self._gaps):
            if end - start >= size:
                if end - start == size:
                    del self._gaps[at]
                else:
                    self._gaps[at] = start + size, end
                return start
        self._too_large = size
        return None

    def _new_stretch(self, size: int) -> int:
        end = self._lowest
        self._lowest = start = (end - size) // _STRETCH_BYTES * _STRETCH_BYTES
        if start + size < end:
            self._add(start + size, end)
        return start

    def _add(self, start: int, end: int) -> None:
        self._gaps.append((start, end))
        self._too_large = max(self._too_large, end - start + 1)


class CachingAllocator:
    """The allocator of one device."""

    def __init__(self, settings: AllocatorSettings = _DEFAULT, *, limit_bytes: int | None = None) -> None:
        """``limit_bytes`` is the most that torch may reserve; None for no limit."""
        self._settings = settings
        self._limit = limit_bytes
        self._small = _Pool(is_small=True, segment_bytes=_SMALL_SEGMENT_BYTES)
        self._large = _Pool(is_small=False, segment_bytes=settings.large_segment_bytes)
        self._addresses = DeviceAddresses()
        self._next_room = 0
        self._rounds_up = any(divisions > 1 for divisions in settings.roundup_power2_divisions)
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.retries = 0
        """The number of requests for which cached segments had to be released first."""

    def allocate(self, request_bytes: int) -> Block:
        """A block for the request. Raises ``DeviceFull`` if the limit does not allow the request."""
        size = self._rounded(request_bytes)
        pool = self._small if size <= SMALL_BYTES else self._large
        block = self._find(pool, size) or self._take(pool, size)
        remaining = block.size - size
        if self._may_split(pool, size, remaining):
            self._split(block, size)
        block.is_free = False
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block) -> None:
        """Free a block. The memory of the block stays reserved."""
        self.allocated_bytes -= block.size
        block.is_free = True
        self._merge(block, block.previous)
        self._merge(block, block.next)
        block.pool.insert(block)

    def empty_cache(self) -> None:
        """Release every unused segment, as ``torch.cuda.empty_cache()`` does."""
        for pool in (self._large, self._small):
            for block in list(pool.free.values()):
                if self._settings.expandable_segments:
                    self._unmap(block)
                elif block.is_whole_segment:
                    self._release(block)

    def _rounded(self, request_bytes: int) -> int:
        if self._rounds_up and request_bytes >= BLOCK_BYTES:
            divisions = self._settings.divisions(request_bytes)
            if divisions > 1 and request_bytes > BLOCK_BYTES * divisions:
                step = (1 << (request_bytes.bit_length() - 1)) // divisions
                return -(-request_bytes // step) * step
        return max(BLOCK_BYTES, -(-request_bytes // BLOCK_BYTES) * BLOCK_BYTES)

    def _may_split(self, pool: _Pool, size: int, remaining: int) -> bool:
        if pool.is_small or self._settings.expandable_segments:
            return remaining >= BLOCK_BYTES
        most = self._settings.max_split_bytes
        return remaining > SMALL_BYTES and (most is None or size < most)

    def _find(self, pool: _Pool, size: int) -> Block | None:
        """The free block that fits best."""
        pool.searches += 1
        at = bisect_left(pool.order, (size, -1))
        if at == len(pool.order):
            return None
        if self._settings.expandable_segments:
            at = self._least_expandable(pool, at)
        found, address = pool.order[at]
        most = self._settings.max_split_bytes
        if most is not None:
            if size < most <= found:
                return None
            if size >= most and found >= size + self._settings.max_non_split_rounding_bytes:
                return None
        del pool.order[at]
        return pool.free.pop(address)

    def _least_expandable(self, pool: _Pool, at: int) -> int:
        """The block that fits best if each block that can grow counts with the size to which it can grow."""

        def reach(index: int) -> int:
            block = pool.free[pool.order[index][1]]
            return block.size + (block.next.size if block.next is not None and not block.next.is_mapped else 0)

        while at + 1 < len(pool.order) and reach(at + 1) < reach(at):
            at += 1
        return at

    def _take(self, pool: _Pool, size: int) -> Block:
        """A new block from the device. Unused segments are released first if the block needs their memory."""
        if self._limit is not None and self._settings.garbage_collection_threshold > 0:
            self._collect(self._limit)
        block = self._new_block(pool, size)
        if block is None and self._release_oversized(pool, size):
            block = self._new_block(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._new_block(pool, size)
        if block is None:
            raise DeviceFull(
                request_bytes=size,
                allocated_bytes=self.allocated_bytes,
                reserved_bytes=self.reserved_bytes,
                limit_bytes=self._limit or 0,
            )
        return block

    def _new_block(self, pool: _Pool, size: int) -> Block | None:
        segment = self._segment_bytes(pool, size)
        if self._limit is not None and self.reserved_bytes + segment > self._limit:
            return None
        if self._settings.expandable_segments:
            return self._expand(pool, size)
        block = Block(pool, self._addresses.place(segment), segment)
        self._reserve(segment)
        return block

    def _segment_bytes(self, pool: _Pool, size: int) -> int:
        if pool.is_small or size < _LEAST_OWN_SEGMENT_BYTES:
            return pool.segment_bytes
        return -(-size // _ROUND_SEGMENT_BYTES) * _ROUND_SEGMENT_BYTES

    def _reserve(self, count: int) -> None:
        self.reserved_bytes += count
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.pool, block.address + size, block.size - size)
        self._link(block, rest, block.next)
        block.size = size
        block.pool.insert(rest)

    def _merge(self, block: Block, other: Block | None) -> None:
        """Merge a free neighbour into ``block`` if both have memory or both have none."""
        if other is None or not other.is_free or other.is_mapped != block.is_mapped:
            return
        block.pool.take_out(other)
        if other is block.previous:
            block.address, block.previous = other.address, other.previous
            if block.previous is not None:
                block.previous.next = block
        else:
            block.next = other.next
            if block.next is not None:
                block.next.previous = block
        block.size += other.size

    @staticmethod
    def _link(first: Block, second: Block, third: Block | None) -> None:
        first.next, second.previous, second.next = second, first, third
        if third is not None:
            third.previous = second

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self._addresses.release(block.address, block.size)
        self.reserved_bytes -= block.size

    def _release_oversized(self, pool: _Pool, size: int) -> bool:
        """Release segments that may not be split, but only as many as the request needs."""
        most = self._settings.max_split_bytes
        if most is None or self._settings.expandable_segments:
            return False
        wanted = max(size, most)
        at = bisect_left(pool.order, (wanted, -1))
        if at < len(pool.order):
            self._release(pool.free[pool.order[at][1]])
            return True
        released = 0
        while released < wanted and pool.order and pool.order[-1][0] >= most:
            released += pool.order[-1][0]
            self._release(pool.free[pool.order[-1][1]])
        return released >= wanted

    def _collect(self, limit: int) -> None:
        """Release whole segments that were unused for longer than the average, until memory is below the threshold."""
        excess = self.reserved_bytes - int(self._settings.garbage_collection_threshold * limit)
        pool = self._large
        while excess > 0:
            whole = [block for _, at in pool.order if (block := pool.free[at]).is_whole_segment and block.is_mapped]
            if not whole:
                return
            mean = sum(pool.searches - block.unused_since for block in whole) / len(whole)
            for block in whole:
                if pool.searches - block.unused_since >= mean:
                    excess -= block.size
                    self._release(block)

    def _expand(self, pool: _Pool, size: int) -> Block | None:
        """Map memory behind a block, so that ``size`` bytes are contiguous."""
        block = self._roomy(pool, size)
        if not block.is_mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            room = block.next
            if room is None or room.is_mapped or not self._map(room, min(room.size, size - block.size)):
                return None
            block = room  # ``room`` has merged with the free block before it
        pool.remove(block)
        return block

    def _roomy(self, pool: _Pool, size: int) -> Block:
        """The first block of the lowest row of free and unmapped blocks with room for ``size`` bytes."""
        for address in pool.unmapped:
            room = pool.rooms[address]
            first = room.previous if room.previous is not None and room.previous.is_free else room
            reach, block = 0, first
            while block is not None and block.is_free and reach < size:
                reach, block = reach + block.size, block.next
            if reach >= size:
                return first
        self._next_room += _ROOM_BYTES
        room = Block(pool, self._next_room, _ROOM_BYTES)
        room.is_mapped = False
        pool.insert_unmapped(room)
        return room

    def _map(self, room: Block, count: int) -> bool:
        """Map memory at the start of ``room``, in whole units, and merge it with its free neighbours."""
        unit = room.pool.segment_bytes
        count = min(-(-count // unit) * unit, room.size)
        if self._limit is not None and self.reserved_bytes + count > self._limit:
            return False
        room.pool.remove_unmapped(room)
        room.is_mapped = True
        if count < room.size:
            rest = Block(room.pool, room.address + count, room.size - count)
            rest.is_mapped = False
            self._link(room, rest, room.next)
            room.pool.insert_unmapped(rest)
            room.size = count
        self._merge(room, room.previous)
        self._merge(room, room.next)
        room.pool.insert(room)
        self._reserve(count)
        return True

    def _unmap(self, block: Block) -> None:
        """Release the memory of the whole units inside a free block."""
        pool, unit = block.pool, block.pool.segment_bytes
        base = block.address - block.address % _ROOM_BYTES
        start = base + -(-(block.address - base) // unit) * unit
        end = base + (block.address + block.size - base) // unit * unit
        if end <= start:
            return
        pool.remove(block)
        before, after = start - block.address, block.address + block.size - end
        if before:
            head = Block(pool, block.address, before)
            head.previous, head.next = block.previous, block
            if head.previous is not None:
                head.previous.next = head
            block.previous = head
            pool.insert(head)
        if after:
            tail = Block(pool, end, after)
            self._link(block, tail, block.next)
            pool.insert(tail)
        block.address, block.size, block.is_mapped = start, end - start, False
        self.reserved_bytes -= block.size
        self._merge(block, block.previous)
        self._merge(block, block.next)
        pool.insert_unmapped(block)
