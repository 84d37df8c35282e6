"""Batches as trees: the same containers, other leaves.

In:  a nested batch and a function of its leaves.
Out: the batch rebuilt with what the function gave, container types kept as torch's pinning keeps them.
Runs in: trainer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """``data`` with every leaf replaced; texts and bytes are leaves."""
    if isinstance(data, (str, bytes)):
        return function(data)
    if isinstance(data, Mapping):
        return _like_mapping(data, {key: map_leaves(function, value) for key, value in data.items()})
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_leaves(function, value) for value in data))
    if isinstance(data, Sequence):
        return _like_sequence(data, [map_leaves(function, value) for value in data])
    return function(data)


def leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, Mapping):
        for value in data.values():
            yield from leaves(value)
    elif isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        for value in data:
            yield from leaves(value)
    else:
        yield data


def _like_mapping(data: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if type(data) is dict:
        return values
    try:
        if isinstance(data, MutableMapping):
            # A copy keeps what a subclass knows besides its items.
            clone = copy.copy(data)
            clone.update(values)
            return clone
        return type(data)(values)  # type: ignore[call-arg]
    except TypeError:
        return values


def _like_sequence(data: Sequence[Any], values: list[Any]) -> Any:
    if type(data) is list:
        return values
    if type(data) is tuple:
        return tuple(values)
    try:
        if isinstance(data, MutableSequence):
            clone = copy.copy(data)
            for place, value in enumerate(values):
                clone[place] = value
            return clone
        return type(data)(values)  # type: ignore[call-arg]
    except TypeError:
        return values
