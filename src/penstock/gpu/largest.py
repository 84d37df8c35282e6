"""The largest batch size whose estimate stays under a line.

In:  a profile, a line in reserved bytes, the largest batch size worth asking about.
Out: a batch size; 0 if not even one sample fits.
Runs in: trainer, command line.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.gpu.estimates import Profile

_BELOW = 3
"""So many sizes below must fit too: reserved bytes do not always grow with the batch, and a last batch is smaller."""
_ABOVE = 4
"""So many sizes above are looked at, where the search by halves says that the end is reached."""


class Largest:
    """Searches a profile; every batch size is played once."""

    def __init__(self, profile: Profile, line_bytes: int, most: int) -> None:
        self._profile, self._line_bytes, self._most = profile, line_bytes, most
        self._known: dict[int, bool] = {}

    def find(self) -> int:
        """By doubling, then by halves, then by looking around: sizes that fit need not be an unbroken row."""
        low, high = 0, 1
        while high <= self._most and self._is_under(high):
            low, high = high, high * 2
        high = min(high, self._most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._is_under(middle) else (low, middle)
        around = range(min(low + _ABOVE, self._most), 0, -1)
        return next((size for size in around if self._holds(size)), 0)

    def _holds(self, size: int) -> bool:
        return all(self._is_under(below) for below in range(size, max(0, size - _BELOW - 1), -1))

    def _is_under(self, size: int) -> bool:
        if size not in self._known:
            self._known[size] = self._profile.at(size).reserved_bytes <= self._line_bytes
        return self._known[size]


def find_largest(profile_for: Callable[[int, int], Profile], line_bytes: int, most: int) -> tuple[int, Profile]:
    """The size, and the profile it was found with.

    ``profile_for(low, high)`` traces two batch sizes. Kernels may ask for other scratch memory at other sizes, so once
    the region is known it is traced itself.
    """
    low, high = min(2, most), min(4, most)
    profile = profile_for(low, high)
    found = Largest(profile, line_bytes, most).find()
    if found <= 2 * high or not profile.is_regular:
        return found, profile
    nearer = profile_for(max(1, found // 2), found)
    return Largest(nearer, line_bytes, most).find(), nearer
