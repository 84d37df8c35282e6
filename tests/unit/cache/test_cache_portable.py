"""Values on disk: they come back as they were, and nothing in a file is more than a value."""

from __future__ import annotations

import json
import math
import pickle
import random
import struct
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from penstock.cache.store.disk import checksum
from penstock.cache.store.portable import Portable, read_portable
from penstock.errors import CacheError
from support.caches import same

Point = namedtuple("Point", "x y")

VALUES: list[Any] = [
    None, True, 3, -(1 << 80), 0.1, math.inf, "text \ud83d\ude00 \udcff", b"", b"bytes\0" * 100, 2 - 3j, [], (), {},
    [1, [2, (3, "x")], {"a": None}], {1: "one", (2, 3): b"two", None: [True]},
    np.arange(12, dtype="<i4").reshape(3, 4)[:, ::2], np.zeros((0, 3)), np.array(5.0), np.float32(2.5), np.bool_(True),
    np.array(["a", "bcd"]), np.array(["2026-11-15"], "M8[D]"), np.arange(3, dtype=">i8"),
    torch.arange(10), torch.rand(3, 4).t(), torch.zeros(0, 5), torch.tensor(7), torch.ones(3, dtype=torch.bfloat16),
    torch.tensor([True, False]), torch.ones(2, dtype=torch.complex64), torch.arange(4).to(torch.uint16),
    torch.ones(3).to(torch.float8_e4m3fn),
    {"latents": torch.rand(16, 8, 8), "mask": None, "ids": [torch.arange(77), "a prompt"], "size": (512, 512)},
]  # fmt: skip


def through(value: Any) -> Any:
    packed = Portable(value)
    target = np.full(packed.total_bytes, 0xAB, np.uint8)
    packed.write(target)
    return read_portable(target)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back_as_they_were(value: Any) -> None:
    same(through(value), value)


def test_nan_is_read_as_nan() -> None:
    assert math.isnan(through(math.nan))


def test_values_that_were_read_can_be_changed_in_place() -> None:
    back = through({"x": torch.zeros(3), "y": np.zeros(3)})
    back["x"] += 1
    back["y"] += 1
    assert back["x"].tolist() == back["y"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "builtins.object"), (Point(1, 2), "Point"), (OrderedDict(), "OrderedDict"), ({1, 2}, "set"),
        (torch.ones(2).to_sparse(), "sparse"), (torch.nn.Parameter(torch.ones(1)), "Parameter"),
        (torch.ones(1, requires_grad=True), "requires_grad"), (torch.ones(1, device="meta"), "meta"),
        (np.array([object()]), "ndarray"), ([1, {"deep": lambda: 0}], "function"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_values_that_cannot_be_read_without_code_are_refused_by_name(value: Any, named: str) -> None:
    with pytest.raises(CacheError, match=named) as refused:
        Portable(value)
    assert "lists, tuples and dicts" in str(refused.value)


def as_bytes(spelt: Any, buffers: bytes = b"") -> np.ndarray:
    text = json.dumps(spelt).encode()
    head = struct.pack("<Q", len(text)) + text
    return np.frombuffer(head.ljust(-(-len(head) // 64) * 64, b"\0") + buffers, np.uint8).copy()


@pytest.mark.parametrize(
    "hostile",
    [
        np.empty(0, np.uint8), np.zeros(4, np.uint8), np.full(100, 255, np.uint8),
        np.frombuffer(pickle.dumps(print), np.uint8), as_bytes(["exec", "import os"]), as_bytes([]),
        as_bytes(["tensor", "float32", [1 << 40], 0, 4]), as_bytes(["tensor", "float32", [-1, -1], 0, 4], b"1234"),
        as_bytes(["tensor", "object", [1], 0, 8], b"12345678"), as_bytes(["array", "O", [1], 0, 8], b"12345678"),
        as_bytes(["array", "f8", [1 << 40], 0, 0]), as_bytes(["bytes", 0, 1 << 60]),
        as_bytes(["bytes", -8, 4], b"1234"), as_bytes(["bytes", "0", 4], b"1234"),
        as_bytes(["dict", [[["list", []], 1]]]), as_bytes(["dict", 3]),
        as_bytes(["scalar", "f8", 0, 4], b"1234"),
        np.frombuffer(struct.pack("<Q", 20_000) + b"[" * 20_000, np.uint8),
        np.frombuffer(struct.pack("<Q", 9000) + b"9" * 9000, np.uint8),
    ],
)  # fmt: skip
def test_hostile_bytes_are_refused(hostile: np.ndarray) -> None:
    with pytest.raises(ValueError):
        read_portable(hostile)


@pytest.mark.parametrize("size", [0, 1, 7, 4095, 4096, 4097, 20_000])
def test_a_checksum_detects_every_flipped_bit_and_every_moved_block(size: int) -> None:
    chance = random.Random(size)
    data = np.frombuffer(chance.randbytes(size), np.uint8).copy()
    whole = checksum(data)
    assert checksum(data.copy()) == whole
    assert checksum(np.append(data, np.uint8(0))) != whole
    for _ in range(min(size, 50)):
        at, bit = chance.randrange(size), chance.randrange(8)
        data[at] ^= 1 << bit
        assert checksum(data) != whole
        data[at] ^= 1 << bit
    for at in range(40, min(size, 4096), 97):
        # The same bit in two words, as a faulty line would have it.
        data[at] ^= 4
        data[at - 40] ^= 4
        assert checksum(data) != whole
        data[at] ^= 4
        data[at - 40] ^= 4
    if size >= 8192:
        assert checksum(np.concatenate((data[4096:8192], data[:4096], data[8192:]))) != whole
        assert checksum(np.concatenate((np.zeros(4096, np.uint8), data[4096:]))) != whole
