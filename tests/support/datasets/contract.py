"""Datasets and functions for the contract tests, in a module of their own so that spawned workers find them.

Runs in: test processes and the workers of the loaders under test.
"""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

# --- samples ------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    name: str
    values: torch.Tensor


class Opaque:
    """A class of the user's own, with a tensor inside."""

    __compare_fields__ = True

    def __init__(self, place: int) -> None:
        self.tensor = torch.full((2, 3), float(place))
        self.note = {"place": place}


class OwnDict(dict):
    pass


class OwnList(list):
    pass


class Samples(Dataset):
    """Sample i is ``make(i)``, made in the worker."""

    def __init__(self, make: Any, length: int = 10) -> None:
        self.make = make
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def plain(i: int) -> tuple[torch.Tensor, int]:
    return torch.arange(i * 6, i * 6 + 6, dtype=torch.float32).reshape(2, 3), i


def seeded(i: int) -> dict[str, Any]:
    """A sample that draws from all three global generators."""
    return {
        "index": i,
        "random": random.random(),
        "numpy": np.random.rand(3),
        "torch": torch.rand(2),
        "integers": [random.getrandbits(40), int(np.random.randint(1 << 30))],
    }


# --- map-style datasets -------------------------------------------------------------------------------------


class Fails(Dataset):
    """Raises ``error(*arguments)`` for the indices in ``at``, naming the index where nothing else is said."""

    def __init__(
        self,
        at: Sequence[int],
        error: Any = ValueError,
        arguments: tuple[Any, ...] | None = None,
        *,
        length: int = 12,
    ) -> None:
        self.at = frozenset(at)
        self.error = error
        self.arguments = arguments
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.at:
            raise self.error(*((f"sample {index} is broken",) if self.arguments is None else self.arguments))
        return torch.full((2,), index)


class NeedsTwo(Exception):
    """Cannot be rebuilt from a message alone."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class ByTheBatch(Dataset):
    """Knows how to fetch a whole batch; each sample tells how it was fetched."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, 0

    def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
        assert isinstance(indices, list)
        return [(index, len(indices)) for index in indices]


class HidesGetitems(ByTheBatch):
    __getitems__ = None  # type: ignore[assignment]


class TypeOfIndex(Dataset):
    """Tells what kind of index the dataset was asked with."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: Any) -> str:
        return f"{type(index).__name__}:{index}"


class Whereabouts(Dataset):
    """Each sample is where it was made: pid, worker id, worker count, daemon or not."""

    def __init__(self, length: int = 12) -> None:
        self.length = length
        self.generation = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([os.getpid(), *place(), self.generation, index])


def place() -> tuple[int, int, int]:
    info = get_worker_info()
    daemon = multiprocessing.current_process().daemon
    return (-1, -1, int(daemon)) if info is None else (info.id, info.num_workers, int(daemon))


class Sleeps(Dataset):
    """Sample i takes ``delays[i]`` seconds."""

    def __init__(self, delays: Sequence[float]) -> None:
        self.delays = list(delays)

    def __len__(self) -> int:
        return len(self.delays)

    def __getitem__(self, index: int) -> int:
        time.sleep(self.delays[index])
        return index


class Rendezvous(Dataset):
    """Every sample waits until ``parties`` of them are being made at once, in as many processes."""

    def __init__(self, parties: int) -> None:
        self.parties = parties
        self.barrier = multiprocessing.get_context("fork").Barrier(parties)

    def __len__(self) -> int:
        return self.parties

    def __getitem__(self, index: int) -> int:
        self.barrier.wait(10)
        return index


class Stuck(Dataset):
    """Sample 0 takes until ``release`` is set."""

    def __init__(self) -> None:
        self.release = multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 0:
            assert self.release.wait(10), "nobody released sample 0"
        return index


class Ragged(Dataset):
    """What a sample is changes along the way, so that nothing learnt from the first one stays true."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        block = index // 4
        if block == 0:
            return torch.full((3,), index)
        if block == 1:
            return torch.full((5,), index)  # another shape
        if block == 2:
            return torch.full((5,), float(index))  # another dtype
        if block == 3:
            return {"a": torch.full((5,), float(index))}  # another container
        if block == 4:
            return {"a": torch.full((5,), float(index)), "b": index}  # another key
        return index if index % 2 else float(index)  # int and float in one batch


class Uneven(Dataset):
    """Batches of four of which the third cannot be collated."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(3 if index != 10 else 4) * index


# --- iterable datasets --------------------------------------------------------------------------------------


class Sized(IterableDataset):
    """Worker w yields ``sizes[w]`` numbers of its own; without workers, all of them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)

    def __len__(self) -> int:
        return sum(self.sizes)

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        for worker, size in enumerate(self.sizes):
            if info is None or info.id == worker:
                yield from range(1000 * worker, 1000 * worker + size)


class Unsharded(IterableDataset):
    """Every worker yields everything: the mistake that the length warning is for."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class StuckStream(IterableDataset):
    """Worker 0 has nothing to give until ``release`` is set."""

    def __init__(self) -> None:
        self.release = multiprocessing.get_context("fork").Event()

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        if info.id == 0:
            assert self.release.wait(10), "nobody released worker 0"
        yield from range(100 * info.id, 100 * info.id + 6)


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        number = 0
        while True:
            yield torch.tensor(number)
            number += 1


class Megabytes(IterableDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((1 << 18,), float(number)) for number in range(self.length))


class BeginsAgain(IterableDataset):
    """Its iterator begins again if it is asked once more after its end."""

    def __init__(self, length: int) -> None:
        self.length, self.at = length, 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == self.length:
            self.at = 0
            raise StopIteration
        self.at += 1
        return self.at


class OddState(Unsharded):
    """It has methods named as torchdata's, which take arguments, raise, or give what cannot be pickled."""

    def __init__(self, length: int, kind: str) -> None:
        super().__init__(length)
        if kind == "takes arguments":
            self.state_dict = self._of
        elif kind == "raises":
            self.state_dict = self._raise
        elif kind == "cannot be pickled":
            self.state_dict = self._give_a_function
        if kind != "cannot be loaded":
            self.load_state_dict = self._refuse
        else:
            self.state_dict = dict

    def _of(self, samples: int, from_the_beginning: bool) -> dict[str, Any]:
        return {"samples": samples, "from the beginning": from_the_beginning}

    def _raise(self) -> dict[str, Any]:
        raise NotImplementedError("no state")

    def _give_a_function(self) -> dict[str, Any]:
        return {"function": lambda: None}

    def _refuse(self, state: Any) -> None:
        raise AssertionError(f"a state that nobody gave: {state}")


class BreaksMidway(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        raise ValueError("the stream broke after 5")


class BreaksAtOnce(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        raise ValueError("no stream at all")


class CountsEpochs(IterableDataset):
    """Remembers, in its worker, how often it was iterated."""

    def __init__(self) -> None:
        self.epochs = 0

    def __iter__(self) -> Iterator[str]:
        self.epochs += 1
        for number in range(4):
            yield f"epoch {self.epochs} number {number}"


class SeededStream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        for number in range(5):
            yield seeded(number + (0 if info is None else 100 * info.id))


# --- functions ----------------------------------------------------------------------------------------------


def as_list(samples: list[Any]) -> list[Any]:
    """A collate function that keeps the samples as they are."""
    return list(samples)


def broken_collate(samples: list[Any]) -> None:
    raise LookupError(f"cannot collate {len(samples)} samples")


def collate_tells_where(samples: list[Any]) -> tuple[int, int, list[Any]]:
    info = get_worker_info()
    return os.getpid(), -1 if info is None else info.id, samples


def random_collate(samples: list[Any]) -> tuple[list[Any], torch.Tensor, float]:
    return samples, torch.rand(2), random.random()


def summed(samples: list[torch.Tensor]) -> Point:
    return Point(x=torch.stack(samples).sum(0), y=[len(samples), "samples"])


def broken_init(worker: int) -> None:
    raise RuntimeError(f"worker {worker} cannot start")


def broken_init_of_worker_1(worker: int) -> None:
    if worker == 1:
        raise RuntimeError("worker 1 cannot start")


class Diary:
    """A worker_init_fn that writes down, in a file per call, what a worker finds when it starts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        found = {
            "argument": worker,
            "id": info.id,
            "num_workers": info.num_workers,
            "seed": info.seed,
            "dataset": type(info.dataset).__name__,
            "threads": torch.get_num_threads(),
            "torch seed": torch.initial_seed(),
            "random": random.getstate()[1][:4],
            "numpy": np.random.get_state()[1][:4].tolist(),  # type: ignore[index]
            "torch": torch.get_rng_state()[:64].tolist(),
        }
        info.dataset.started = True  # type: ignore[attr-defined]
        entry = Path(self.directory, f"{os.getpid()}-{time.monotonic_ns()}.half")
        entry.write_text(repr((os.getpid(), found)))
        entry.rename(entry.with_suffix(".entry"))

    def entries(self) -> list[tuple[int, dict[str, Any]]]:
        """(pid, what it found), by worker id."""
        import ast

        found = [ast.literal_eval(path.read_text()) for path in self.directory.glob("*.entry")]
        return sorted(found, key=lambda entry: (entry[1]["id"], entry[0]))


class AfterAllStarted(Dataset):
    """Sample 0 waits until the diary has ``expected`` entries, so that no worker can be passed over."""

    def __init__(self, diary: Diary) -> None:
        self.diary = diary
        self.expected = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        deadline_s = time.monotonic() + 20
        while index == 0 and len(self.diary.entries()) < self.expected:
            assert time.monotonic() < deadline_s, "not all workers started"
            time.sleep(0.005)
        return index


class SeesInit(IterableDataset):
    """Yields whether worker_init_fn had run when the iteration began."""

    started = False

    def __iter__(self) -> Iterator[bool]:
        yield self.started


class EagerShuffle(Sampler):
    """Draws its order when it is asked for an iterator, not lazily."""

    def __init__(self, length: int, generator: torch.Generator | None) -> None:
        self.length = length
        self.generator = generator

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length, generator=self.generator).tolist())


class LazyDraws(Sampler):
    """Draws each index from the global generator when it is asked for it."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield int(torch.randint(self.length, ()))


class BrokenSampler(Sampler):
    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        raise LookupError("no index after 5")


Empty = collections.namedtuple("Empty", [])
