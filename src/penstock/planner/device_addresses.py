"""Where the driver puts the segments that torch asks for: it decides which of two equal free blocks comes first.

In:  segments' sizes, and segments given back.
Out: addresses.
Runs in: anywhere; pure.

As CUDA's driver does on Linux (580, H200; exact in 17 recorded trainings): from high addresses down, in stretches that
begin at multiples of 32 MiB; what a stretch has left over behind its segment is filled with the next ones that fit.
"""

from __future__ import annotations

from penstock.units import MIB

_STRETCH_BYTES = 32 * MIB
_TOP = 1 << 47


class DeviceAddresses:
    """One device's address space."""

    def __init__(self) -> None:
        self._lowest = _TOP
        self._gaps: list[tuple[int, int]] = []
        """Start and end of what is free above the lowest stretch, oldest first."""

    def place(self, size: int) -> int:
        """The address of a new segment."""
        for at, (start, end) in enumerate(self._gaps):
            if end - start >= size:
                self._gaps[at] = start + size, end
                return start
        end = self._lowest
        self._lowest = start = (end - size) // _STRETCH_BYTES * _STRETCH_BYTES
        self._gaps.append((start + size, end))
        return start

    def give_back(self, address: int, size: int) -> None:
        """A segment is gone."""
        self._gaps.append((address, address + size))
