"""Budgets too small for anything, changed again and again together with workers and depth: batches keep coming."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from support.faults.leaks import no_leaks  # noqa: F401  (a fixture for every test here)

BATCH = 4

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:a batch needs:RuntimeWarning"),
]


class Samples(torch.utils.data.Dataset[Any]):
    """Tensors full of their index: of one size, of one size per batch, or of a size each; or their raw bytes."""

    def __init__(self, kind: str, count: int, bad: int) -> None:
        self.kind, self.count, self.bad = kind, count, bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise KeyError(index)
        values = {"same": 8000, "ragged": 2000 + 1000 * (index % 7)}.get(self.kind, 16384 // (1 + index // BATCH % 5))
        sample = torch.full((values,), index)
        if self.kind == "raw":
            return sample.numpy().tobytes()
        return {"x": sample, "name": str(index)} if self.kind == "named" else sample


def listed(samples: list[Any]) -> list[Any]:
    return samples


def stacked(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples)


def as_array(samples: list[torch.Tensor]) -> np.ndarray:
    return np.stack([sample.numpy() for sample in samples])


COLLATES: dict[str, list[Any]] = {
    "same": [None, stacked, as_array, listed],
    "by batch": [None, stacked, as_array],
    "ragged": [listed],
    "raw": [listed],
    "named": [None],
}


def indices_in(batch: Any, kind: str) -> list[int]:
    if kind == "raw":
        return [int(np.frombuffer(sample, np.int64)[-1]) for sample in batch]
    return [int(row[-1]) for row in (batch["x"] if kind == "named" else batch)]


@pytest.mark.parametrize("seed", range(8))
def test_batches_keep_coming_and_are_correct(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(3):
        kind = chance.choice(list(COLLATES))
        count, bad = chance.choice([40, 78, 161]), chance.choice([-1, -1, 18])
        backend = chance.choice([None, None, "thread"])
        seeding = "batch" if backend else chance.choice(["batch", "batch", "worker"])
        in_order = chance.choice([True, True, True, False])
        loader = penstock.DataLoader(
            Samples(kind, count, bad),
            batch_size=BATCH,
            num_workers=chance.choice([1, 2, 3]),
            memory=chance.choice(["300KiB", "600KiB", "1500KiB", "3MiB", "12MiB", "30MiB", "auto"]),
            persistent_workers=chance.random() < 0.5,
            collate_fn=chance.choice(COLLATES[kind]),
            backend=backend,
            in_order=in_order,
            seeding=seeding,
        )
        with loader:
            for _ in range(2):
                place, stops_at = 0, chance.choice([None, None, 3])
                held: list[tuple[list[int], Any]] = []
                iterator = iter(loader)
                while place != stops_at:
                    try:
                        batch = next(iterator)
                    except KeyError:
                        place += 1
                        continue
                    except StopIteration:
                        assert place == -(-count // BATCH)
                        break
                    found = indices_in(batch, kind)
                    assert not in_order or found == list(range(place * BATCH, min(count, place * BATCH + BATCH)))
                    held = [*held, (found, batch)][-chance.choice([1, 1, 3, 12]) :]
                    place += 1
                    if chance.random() < 0.15 and seeding == "batch":
                        loader.resize(workers=chance.choice([0, 1, 2, 3]))
                    if chance.random() < 0.1:
                        loader.resize(depth=chance.choice([1, 2, 5]))
                    if chance.random() < 0.15:
                        loader.set_memory(chance.choice(["300KiB", "600KiB", "3MiB", "12MiB", "30MiB"]))
                    if chance.random() < 0.1:
                        time.sleep(0.005)
                for found, batch in held:
                    assert indices_in(batch, kind) == found
                del iterator


class QuickThenBlocked(torch.utils.data.Dataset[int]):
    """The first batch costs nothing; every sample after it waits for a file."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        while index >= 2 and not self.gate.exists():
            time.sleep(0.01)
        return index


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_a_finished_sample_is_reported_before_the_next_one_begins(backend: str, tmp_path: Path) -> None:
    for attempt in range(4):
        gate = tmp_path / str(attempt)
        loader = penstock.DataLoader(QuickThenBlocked(gate), batch_size=2, num_workers=2, backend=backend, timeout=60)
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1]
        gate.touch()
        loader.close()
