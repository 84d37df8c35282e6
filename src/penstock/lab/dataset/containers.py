"""Large Python containers inside a dataset, and the memory that each container costs a worker.

In:  any object.
Out: ``Container``s, the most costly first, each with its path.
Runs in: trainer, command line. No property, method or iterator of the object's classes runs.

A forked worker shares the trainer's pages until either process writes to them. Reading an object writes its reference
count, so a worker that has read all items of a list has copied the pages of all items. For a large container, some
thousand of its items are measured.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.lab.dataset.object_parts import (
    class_parts,
    copied_bytes,
    held_in,
    is_shared,
    items_of,
    kind_of,
    module_of,
    own_bytes,
    parts,
    shared_bytes,
)
from penstock.units import MIB

_NAMED_ITEMS = 32
"""The largest length of containers that are examined item by item, so that each large object in them has its own
path."""
_NAMED_MOST, _NAMED_DEPTH = 20_000, 50
"""The most objects that get a path of their own, and the deepest nesting of containers that is examined."""
_SAMPLE, _INNER_SAMPLE = 10_000, 64
_DEEPEST = 30
_TELLING_PAIRS = 3.0
"""If fewer repeats than this number are expected, finding no repeat proves nothing."""
_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Container:
    """One container, with everything that can be reached only through this container."""

    path: str
    """The path from the dataset to the container, as a Python expression."""
    kind: str
    """Its type."""
    holds: str
    """The type of most items; empty if workers copy no items."""
    items: int
    """The number of items."""
    bytes: int
    """The bytes of the container and all objects in it, which a spawned worker gets a copy of."""
    per_worker_bytes: int
    """The bytes that a forked worker has copied after it has read all items; 0 if reading copies nothing."""


@dataclass(frozen=True, kw_only=True)
class Containers:
    """The containers that were found."""

    found: tuple[Container, ...]
    """The containers, the most costly first."""
    complete: bool
    """Whether there was enough time to examine the whole object."""

    @property
    def per_worker_bytes(self) -> int:
        """The bytes of all these containers that a worker copies in an epoch."""
        return sum(container.per_worker_bytes for container in self.found)


def find_containers(
    root: object,
    *,
    name: str = "dataset",
    least_bytes: int = MIB,
    seconds: float = _SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> Containers:
    """All containers of at least ``least_bytes`` in ``root``. An object in several containers counts once."""
    walk = _Walk(least_bytes, clock() + seconds, clock)
    walk.walk(root, name)
    walk.found.sort(key=lambda container: (-container.per_worker_bytes, -container.bytes, container.path))
    return Containers(found=tuple(walk.found), complete=walk.complete)


class _Walk:
    def __init__(self, least_bytes: int, end_s: float, clock: Callable[[], float]) -> None:
        self.found: list[Container] = []
        self.complete = True
        self._least_bytes, self._end_s, self._clock = least_bytes, end_s, clock
        self._seen: dict[int, object] = {}
        """Id -> object. The reference keeps the object alive, because a new object could get the id of a freed
        object."""
        self._measured: list[object] = []
        """The containers found."""
        self._chance = random.Random(0)

    def walk(self, root: object, name: str, opaque: bool = False, depth: int = 0) -> None:
        """Record the containers in an object. ``opaque`` means that a longer path into the object would not help the
        user."""
        waiting = [(name, root, opaque)]
        while waiting and not self._late():
            path, value, opaque = waiting.pop()
            if id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            kind = kind_of(value)
            if is_shared(value):
                items = len(value) if kind is None else items_of(value)  # type: ignore[arg-type]
                self._note(path, kind or "SharedList", "", items, shared_bytes(value), 0)
            elif kind is not None:
                self._walk_container(value, path, kind, opaque, depth)
            else:
                opaque = opaque or f"{module_of(type(value))}.".startswith("pandas.")
                waiting += reversed(self._inner(value, path, opaque))

    def _walk_container(self, value: Any, path: str, kind: str, opaque: bool, depth: int) -> None:
        total, copied, holds = self._contents(value)
        size_bytes, items = round(own_bytes(value) + total), items_of(value)
        if size_bytes < self._least_bytes:
            return
        before = len(self.found)
        if items <= _NAMED_ITEMS and depth < _NAMED_DEPTH:
            for inner_path, inner, _ in self._inner(value, path, opaque):
                self.walk(inner, inner_path, opaque, depth + 1)
        # A container is reported as a whole if its parts are not reported separately.
        if sum(container.bytes for container in self.found[before:]) < size_bytes / 2:
            del self.found[before:]
            self._note(path, kind, holds, items, size_bytes, round(copied))
            self._measured.append(value)

    def _inner(self, value: object, path: str, opaque: bool) -> list[tuple[str, object, bool]]:
        _, held = parts(value, _NAMED_MOST, self._chance)
        held = held + class_parts(value)
        return [(path if opaque else path + label, inner, opaque) for label, inner in held]

    def _note(self, path: str, kind: str, holds: str, items: int, size_bytes: int, per_worker_bytes: int) -> None:
        if size_bytes >= self._least_bytes:
            self.found.append(
                Container(
                    path=path, kind=kind, holds=holds, items=items, bytes=size_bytes, per_worker_bytes=per_worker_bytes
                )
            )

    def _contents(self, container: object) -> tuple[float, float, str]:
        """Three figures of a container: the bytes of all objects in it, the bytes that a worker copies, the type of
        most items."""
        total = copied = 0.0
        types: dict[str, float] = {}
        level = self._inside(container, _SAMPLE, 1.0)
        for item, weight, _ in level.values():
            types[type(item).__name__] = types.get(type(item).__name__, 0) + weight
        level = self._not_measured(level)
        known: dict[int, object] = {id(container): container}
        for _ in range(_DEEPEST):
            if not level or self._late():
                break
            shares = self._shares(level)
            below: dict[int, list[Any]] = {}
            for number, entry in level.items():
                share = entry[1] / shares[number]
                total += share * own_bytes(entry[0])
                copied += share * copied_bytes(entry[0])
                if is_shared(entry[0]):
                    total += share * shared_bytes(entry[0])
                for inner, more in self._inside(entry[0], _INNER_SAMPLE, share).items():
                    if inner in known or inner in level or inner in self._seen:
                        continue
                    if inner in below:
                        below[inner][1] += more[1]
                        below[inner][2] += more[2]
                    else:
                        below[inner] = more
            known.update((number, entry[0]) for number, entry in level.items())
            level = self._thinned(below)
        self.complete = self.complete and not level
        return total, copied, max(types, key=lambda name: types[name], default="nothing")

    def _not_measured(self, level: dict[int, list[Any]]) -> dict[int, list[Any]]:
        """The objects of ``level``, except objects that were already counted in another container."""
        # Items that nothing else refers to are in no other container.
        shared = (
            {number for number, entry in level.items() if _references(entry) > entry[2]} if self._measured else set()
        )
        counted: set[int] = set()
        for container in self._measured:
            if not shared or self._late():
                break
            counted |= shared.intersection(map(id, held_in(container)))
        return {number: entry for number, entry in level.items() if number not in counted} if counted else level

    def _inside(self, value: object, most: int, weight: float) -> dict[int, list[Any]]:
        """The objects that ``value`` holds, by id: the object, how many objects it represents, how often it was
        found."""
        scale, held = parts(value, most, self._chance)
        met: dict[int, list[Any]] = {}
        for _, inner in held:
            entry = met.setdefault(id(inner), [inner, 0.0, 0])
            entry[1] += scale * weight
            entry[2] += 1
        return met

    def _thinned(self, level: dict[int, list[Any]]) -> dict[int, list[Any]]:
        if len(level) <= 2 * _SAMPLE:
            return level
        scale = len(level) / _SAMPLE
        return {n: [level[n][0], level[n][1] * scale, level[n][2]] for n in self._chance.sample(list(level), _SAMPLE)}

    def _shares(self, level: dict[int, list[Any]]) -> dict[int, float]:
        """For each id, the number of references to the object that come from the measured container.

        An object with r references from this container is found r times but must count once. If a random choice of
        items finds the same objects again less often than r references would explain, the other references come from
        elsewhere.
        """
        references = {number: _references(entry) for number, entry in level.items()}
        meetings: dict[tuple[type, int], list[float]] = {}
        for number, entry in level.items():
            count = references[number]
            expected = entry[2] * (count - 1) * entry[2] / max(entry[1], 1.0) / 2
            tally = meetings.setdefault((type(entry[0]), count.bit_length()), [0.0, 0.0])
            tally[0] += expected
            tally[1] += entry[2] * (entry[2] - 1) / 2
        shares = {}
        for number, entry in level.items():
            expected, seen = meetings[type(entry[0]), references[number].bit_length()]
            here = min(1.0, seen / expected) if expected >= _TELLING_PAIRS else 1.0
            shares[number] = 1 + (references[number] - 1) * here
        return shares

    def _late(self) -> bool:
        late = self._clock() >= self._end_s or len(self._seen) > _NAMED_MOST
        self.complete = self.complete and not late
        return late


def _references(entry: list[Any]) -> int:
    return max(1, sys.getrefcount(entry[0]) - _OWN_REFERENCES)


_OWN_REFERENCES = 0
_OWN_REFERENCES = _references([object()])
"""The references to an object that this code itself holds while it counts."""
