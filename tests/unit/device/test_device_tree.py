"""Batches keep their containers when their leaves are replaced."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch

from penstock.device.copy_stream import is_plain, move, stays_on_host
from penstock.device.tree import leaves, map_leaves

Pair = namedtuple("Pair", ["a", "b"])


@pytest.mark.parametrize(
    "data",
    [
        1,
        [1, 2],
        (1, (2, 3)),
        {"a": 1, "b": [2]},
        OrderedDict(b=1, a=2),
        Pair(1, [2]),
        UserDict({"a": 1}),
        UserList([1, 2]),
        [],
        {},
    ],
)
def test_containers_are_rebuilt_as_they_were(data: Any) -> None:
    rebuilt = map_leaves(lambda leaf: leaf, data)
    assert type(rebuilt) is type(data) and rebuilt == data
    assert list(leaves(map_leaves(lambda leaf: leaf + 1, data))) == [leaf + 1 for leaf in leaves(data)]


def test_texts_and_bytes_are_leaves() -> None:
    assert list(leaves({"a": "text", "b": [b"bytes"]})) == ["text", b"bytes"]


def test_a_container_that_cannot_be_rebuilt_becomes_a_plain_one() -> None:
    class Row(list[int]):
        def __init__(self, first: int, second: int) -> None:
            super().__init__([first, second])

    assert map_leaves(str, Row(1, 2)) == ["1", "2"]
    assert map_leaves(str, MappingProxyType({"a": 1})) == {"a": "1"}


def test_values_that_may_keep_a_segment_in_use_are_recognised() -> None:
    plain = torch.ones(3)
    assert is_plain(plain) and not is_plain(plain.to_sparse()) and not is_plain(torch.nn.Parameter(plain))
    assert not stays_on_host({"x": plain, "text": ["a"], "n": 3, "none": None})
    assert stays_on_host([plain, object()])
    assert stays_on_host([plain.to_sparse()])


class Named(dict):  # type: ignore[type-arg]
    """A dictionary that can hold more than its items."""


def test_a_container_that_holds_more_than_its_items_stays_on_the_host() -> None:
    plain = torch.ones(3)
    assert not stays_on_host((plain, [plain, {"x": plain}]))
    assert stays_on_host(Named(x=plain))
    assert stays_on_host([Named(x=plain)])
    assert stays_on_host([plain.clone().requires_grad_()])


def test_containers_with_a_method_to_move_are_not_taken_apart() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert list(leaves([packed])) == [packed]
    moved = move({"p": packed, "x": torch.ones(2)}, torch.device("meta"))
    assert moved["p"].data.device.type == "meta" and moved["p"].batch_sizes.device.type == "cpu"
