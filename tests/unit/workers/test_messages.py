"""Messages as bytes: each arrives as it was sent, whatever it has inside."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch._utils import ExceptionWrapper

from penstock.arena.codec import decode_inline
from penstock.workers.channel import pack, unpack
from penstock.workers.protocol import Done, Fetch, Outcome, Resume, Span, Started


def fetch_of(indices: Any, **more: Any) -> Fetch:
    usual: dict[str, Any] = {
        "task": 7,
        "first_row": 0,
        "batch_rows": 4,
        "seed": (1 << 64) - 1,
        "forecast_position": 3,
        "segment": 5,
        "by_template": True,
        "alone": True,
        "text_room": None,
        "careful": False,
    }
    return Fetch(indices=indices, **{**usual, **more})


def done_of(outcome: Outcome, **more: Any) -> Done:
    usual: dict[str, Any] = {"error": None, "fetch_s": 0.25, "collate_s": 0.0, "private_bytes": 1 << 40, "memo": None}
    return Done(task=7, outcome=outcome, sent_s=12.5, **{**usual, **more})


def types_of(value: Any) -> Any:
    return (type(value), [types_of(each) for each in value] if isinstance(value, list | tuple) else None)


class Index(int):
    """An index of the user's own class."""


ROWS = Outcome("rows", 4, segment=5, rows_segment=5, used_bytes=1024)
MESSAGES = {
    "indices": fetch_of([0, 1, 1 << 80, -1]),
    "a count": fetch_of(4),
    "names": fetch_of(["a", "ü", "\ud800"]),
    "no indices": fetch_of([]),
    "numpy's numbers": fetch_of([np.int64(3), 4]),
    "numpy's texts": fetch_of([np.str_("a"), "b"]),
    "truths": fetch_of([True, 1, 1.5, None]),
    "an own class": fetch_of([Index(3)]),
    "pairs": fetch_of([(1, "a"), (2, "b")]),
    "a tuple": fetch_of((1, 2)),
    "bytes": fetch_of(bytearray(b"12")),
    "room for texts": fetch_of([1], text_room=Span(3, 0, 10)),
    "no seed": fetch_of([1], seed=None),
    "rows": done_of(ROWS),
    "texts": done_of(ROWS._replace(texts=[["a", "\ud800", ""], [b"\0", b""]], text_bytes=3)),
    "texts in a segment": done_of(ROWS._replace(text_span=Span(3, 0, 10))),
    "an object": done_of(Outcome("object", 4, pickled=b"123", offsets=[(0, 10), (64, 3)], segment=2, used_bytes=67)),
    "a memo": done_of(ROWS, memo={"position": torch.tensor(3).item()}),
    "a worker's start": Started(5, -1),
    "a point to continue": Resume(3, np.int64(4)),
}


@pytest.mark.parametrize("message", list(MESSAGES.values()), ids=list(MESSAGES))
def test_a_message_arrives_with_the_values_and_types_it_was_sent_with(message: Any) -> None:
    received = unpack(*pack(message))
    assert received == message
    assert types_of(received) == types_of(message)


def test_an_error_arrives_as_it_was_raised() -> None:
    try:
        raise KeyError("no such sample")
    except KeyError:
        error = ExceptionWrapper(where="in worker 3")
    received = unpack(*pack(done_of(Outcome("error"), error=error)))
    with pytest.raises(KeyError, match="no such sample"):
        received.error.reraise()


@pytest.mark.parametrize("message", [MESSAGES["indices"], MESSAGES["rows"]], ids=["task", "report"])
def test_what_travels_for_every_task_is_no_pickle(message: Any) -> None:
    with pytest.raises(Exception, match=r"pickle|load key|opcode|truncated"):
        decode_inline(pack(message)[1])


def test_what_cannot_be_pickled_is_refused_before_it_is_sent() -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        pack(fetch_of([lambda: None]))
