"""Forms of samples in tar shards: members that anybody can read, and forms that nobody can abuse."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
import torch

from penstock.data.sample_forms import CannotCarry, restore, to_members
from penstock.errors import DataError
from support.datasets.packed import is_same


def members_of(sample: Any) -> tuple[str, dict[str, Any]]:
    form, members = to_members(sample)
    assert len(dict(members)) == len(members)
    return form, {"__key__": "000000001", **dict(members)}


def test_each_value_has_the_usual_extension_of_its_type() -> None:
    sample = {"image": torch.ones(2, 3), "mask": np.zeros(4, bool), "text": "ü", "raw": b"\0"}
    form, members = members_of(sample)
    assert list(members) == ["__key__", "image.npy", "mask.npy", "text.txt", "raw.bin"]
    assert np.array_equal(np.load(io.BytesIO(members["image.npy"])), np.ones((2, 3), np.float32))
    assert np.load(io.BytesIO(members["mask.npy"])).dtype == bool
    assert members["text.txt"] == "ü".encode() and members["raw.bin"] == b"\0"
    assert is_same(restore(form, members), sample)
    assert members_of((torch.zeros(1), 7))[1]["1.cls"] == b"7"


def test_small_values_share_one_json_member() -> None:
    sample = {"label": 3, "caption": "a cat", "score": 0.1, "tags": ["a", None], "image": b"jpg"}
    form, members = members_of(sample)
    assert list(members) == ["__key__", "image.bin", "json"]
    assert json.loads(members["json"]) == {"label": 3, "caption": "a cat", "score": 0.1, "tags": ["a", None]}
    assert is_same(restore(form, members), sample)


def test_names_that_cannot_be_file_names_are_replaced() -> None:
    names = ["../../etc/passwd", "/abs", "a b", "", ".", "Caps", "caps", "penstock-form", "x" * 300, "ü", "a.b", "a\0b"]
    sample = {name: name.encode() for name in names}
    form, members = members_of(sample)
    for member in members:
        assert member == "__key__" or (not set(member) & set("/\0 ") and member == member.lower() and len(member) < 100)
    assert is_same(restore(form, members), sample)


def test_restored_arrays_can_be_written_to() -> None:
    for sample in (torch.ones(3, dtype=torch.bfloat16), np.ones(3), [np.ones(3), (torch.ones(2), {1: 2})]):
        form, members = members_of(sample)
        restored = restore(form, members)
        first = restored[0] if isinstance(restored, list) else restored
        first[:] = 2
        assert is_same(restore(form, members), sample)


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, np.array([None]), np.ma.masked_array([1]), torch.ones(1).to("meta")]
)
def test_the_error_for_values_that_cannot_be_packed_names_their_type(value: Any) -> None:
    with pytest.raises(CannotCarry, match="cannot be packed"):
        to_members({"x": value})


def test_a_value_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CannotCarry):
        to_members({"x": endless})


def test_hostile_forms_and_members_are_data_errors() -> None:
    form, members = members_of({"t": torch.ones(4), "p": 1 << 100, "j": [1], "k": 2})
    lies = [("tensor", "pickle"), ("dict", "object"), ("t.npy", "u.npy"), (":1,", ":2,"), ("{", "["), ('"t"', '"k"')]
    for bad in ("", "null", "[]", "{}", "[" * 100_000, *(form.replace(*lie) for lie in lies)):
        with pytest.raises(DataError, match="sample 000000001"):
            restore(bad, members)
    array = members["t.npy"]
    array_lies = [(b"<f4", b"|O8"), (b"(4,)", b"(9,)"), (b"<f4", b"<V4"), (b"(4,)", b"(-4)")]
    for damaged in [
        b"",
        array[:9],
        array[:-1],
        array + b"x",
        b"\x80\x04" + array,
        *(array.replace(*lie) for lie in array_lies),
    ]:
        with pytest.raises(DataError, match="sample 000000001"):
            restore(form, {**members, "t.npy": damaged})
    for name in ("p.pst", "json"):
        for damaged in (b"", b"\xff" * 100, members[name][:10]):
            with pytest.raises(DataError, match="sample 000000001"):
                restore(form, {**members, name: damaged})
