"""Long texts and raw bytes lie in the batch's memory; short ones travel in messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import penstock
from penstock.arena.template import learn
from penstock.loader.engine.estimates import Shapes
from penstock.loader.rules import LoaderRules
from penstock.workers import channel

KIB, MIB = 1 << 10, 1 << 20
ROWS = 16


class Encoded(Dataset[Any]):
    """Encoded images, as they lie on disk."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return 12 * ROWS

    def __getitem__(self, index: int) -> Any:
        return {"jpeg": bytes([index]) * self._size, "label": index}


class Stream(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self._samples = Encoded(size)

    def __iter__(self) -> Any:
        return (self._samples[index] for index in range(len(self._samples)))


def listed(samples: list[Any]) -> list[Any]:
    """A custom collate function."""
    return samples


def read(size: int, *, dataset: type = Encoded, **more: Any) -> penstock.LoaderStats:
    """Read all batches of samples with ``size`` bytes each; the loader's stats afterwards."""
    with penstock.DataLoader(dataset(size), batch_size=ROWS, num_workers=1, memory=60 * MIB, **more) as loader:
        for number, batch in enumerate(loader):
            rows = batch["jpeg"] if isinstance(batch, dict) else [sample["jpeg"] for sample in batch]
            assert rows == [bytes([index]) * size for index in range(number * ROWS, (number + 1) * ROWS)]
        return loader.stats()


@pytest.mark.parametrize(
    "more",
    [{}, {"dataset": Stream}, {"seeding": "worker"}, {"backend": "thread"}, {"collate_fn": listed}],
    ids=["rows", "stream", "seeding by worker", "threads", "own collate"],
)
def test_long_texts_are_bytes_in_flight_and_messages_stay_small(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[int] = []
    unpack = channel.unpack
    monkeypatch.setattr(channel, "unpack", lambda form, body: received.append(len(body)) or unpack(form, body))
    stats = read(100 * KIB, **more)
    assert stats.peak_in_flight_bytes >= ROWS * 100 * KIB
    assert received or more.get("backend") == "thread"
    assert max(received, default=0) < 16 * KIB


def test_short_texts_take_no_segment() -> None:
    # A page for the labels of each batch.
    assert read(100).peak_in_flight_bytes <= 24 * 4 * KIB


def test_the_same_text_twice_takes_its_room_once() -> None:
    class Repeated(Dataset[str]):
        text = "x" * MIB

        def __len__(self) -> int:
            return 2 * ROWS

        def __getitem__(self, index: int) -> str:
            return self.text

    with penstock.DataLoader(Repeated(), batch_size=ROWS, num_workers=1, memory=60 * MIB) as loader:
        # However slow the machine is, the worker fetches the second batch in one task, which holds the text once.
        loader._rules = LoaderRules(task_s=60.0)
        assert [len(text) for batch in loader for text in batch] == [MIB] * (2 * ROWS)
        assert loader.stats().peak_in_flight_bytes < ROWS * MIB


def test_texts_are_part_of_what_a_batch_is_expected_to_take() -> None:
    shapes = Shapes(LoaderRules())
    template = learn({"raw": b"", "x": torch.zeros(1000)})
    assert template is not None
    for text_bytes in (100 * KIB, 160 * KIB, 120 * KIB):
        shapes.note_texts(text_bytes, ROWS)
        shapes.note_match(template, ROWS)
    expected = shapes.expected_bytes(2 * ROWS)
    assert expected is not None
    assert 2 * (160 * KIB + ROWS * 4000) <= expected <= 1.2 * 2 * (160 * KIB + ROWS * 4000)


def test_short_texts_are_not_expected_to_take_room() -> None:
    shapes = Shapes(LoaderRules())
    template = learn({"name": "", "x": torch.zeros(1000)})
    assert template is not None
    shapes.note_texts(200, ROWS)
    shapes.note_match(template, ROWS)
    assert shapes.text_row_bytes == 0 and shapes.expected_bytes(ROWS) == ROWS * 4000
