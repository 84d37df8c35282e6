"""Batches as trees of containers and leaves.

In:  a nested batch and a function of its leaves.
Out: the batch rebuilt from the function's results; container types are kept as in torch's pinning.
Runs in: trainer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """``data`` with every leaf replaced. Strings, bytes and objects with a ``to`` method are leaves."""
    if _is_leaf(data):
        return function(data)
    if isinstance(data, Mapping):
        return _like_mapping(data, {key: map_leaves(function, value) for key, value in data.items()})
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_leaves(function, value) for value in data))
    if isinstance(data, Sequence):
        return _like_sequence(data, [map_leaves(function, value) for value in data])
    return function(data)


def leaves(data: Any) -> Iterator[Any]:
    if _is_leaf(data):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from leaves(value)
    elif isinstance(data, Sequence):
        for value in data:
            yield from leaves(value)
    else:
        yield data


def is_ordinary(data: Any) -> bool:
    """Whether a batch's containers hold only their items and no further attributes."""
    if _is_leaf(data):
        return True
    if type(data) is dict:
        return all(is_ordinary(value) for value in data.values())
    if type(data) in (list, tuple) or (isinstance(data, tuple) and hasattr(data, "_fields")):
        return not getattr(data, "__dict__", None) and all(is_ordinary(value) for value in data)
    return not isinstance(data, (Mapping, Sequence))


def _is_leaf(data: Any) -> bool:
    if type(data) in (dict, list, tuple):
        return False
    return isinstance(data, (str, bytes)) or callable(getattr(data, "to", None))


def _like_mapping(data: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if type(data) is dict:
        return values
    try:
        if isinstance(data, MutableMapping):
            # A copy keeps the attributes of a subclass.
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
