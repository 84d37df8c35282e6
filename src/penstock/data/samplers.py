"""Samplers that jump little: they read a few row groups, shards or sequences at a time, in a new order in each epoch.

In:  where blocks begin and how large they are; seed, epoch, rank.
Out: indices; over all ranks, each index occurs once per epoch.
Runs in: trainer.
"""

from __future__ import annotations

import itertools
import warnings
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from penstock.environment import global_rank, world_size
from penstock.errors import ConfigError
from penstock.units import format_bytes, parse_bytes

_SAID = {
    "seed": "seed was", "shuffle": "shuffle was", "num_replicas": "num_replicas was", "drop_last": "drop_last was",
    "length": "the dataset's length was", "blocks": "the checksum of where blocks begin was",
    "window": "window was", "block_bytes": "the checksum of the blocks' sizes was",
}  # fmt: skip
"""Name of a value that the order depends on -> the words before the value in an error message."""
_NEEDED = {
    "blocks": "BlockShuffleSampler needs a dataset that is stored in blocks (ParquetDataset, TarDataset, ArrowDataset) "
    "or a list of the lengths of blocks; for windows of frames, use SequenceSampler",
    "sequences": "SequenceSampler needs a dataset that has sequences (WindowDataset) or a list of their lengths; for "
    "row groups and shards, use BlockShuffleSampler",
}


class CountingSampler(Sampler[int]):
    """Base class of the samplers. Each epoch has its own order of blocks, which is divided evenly among the ranks.

    ``seed`` and epoch determine the order. Each iteration is the next epoch, or the epoch that ``set_epoch`` sets. The
    defaults of ``rank`` and ``num_replicas`` come from torch.distributed, or from torchrun. Over all ranks, each index
    occurs exactly once per epoch, so some ranks may have one index more than others. With ``drop_last`` all ranks have
    the same number of indices, and the few remaining indices are left out of this epoch.
    """

    def __init__(
        self,
        starts: np.ndarray,
        *,
        shuffle: bool,
        seed: int,
        rank: int | None,
        num_replicas: int | None,
        drop_last: bool,
    ) -> None:
        if seed < 0:
            raise ConfigError(f"seed={seed} is negative; give a seed of 0 or more")
        self._starts = starts
        self.shuffle = shuffle
        self.seed = seed
        self.rank, self.num_replicas = _place(rank, num_replicas)
        self.drop_last = drop_last
        self._next = 0, 0
        """Epoch of the next iteration, and the position where that iteration begins."""
        self._now: list[int] | None = None
        """Epoch of the latest iteration, and the number of indices that this iteration has yielded."""

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._next[0]

    def __len__(self) -> int:
        first, end = self._share()
        return end - first

    def __iter__(self) -> Iterator[int]:
        # Each iteration has its own list, so that an abandoned iteration cannot change the count of a later iteration.
        now = self._now = list(self._next)
        return self._given(now)

    def _given(self, now: list[int]) -> Iterator[int]:
        now[:] = epoch, first = self._next
        self._next = epoch + 1, 0
        for index in itertools.islice(self.order(epoch), first, None):
            now[1] += 1
            yield index

    def order(self, epoch: int) -> Iterator[int]:
        """This rank's indices in an epoch."""
        chance = np.random.default_rng((self.seed, epoch))
        count = len(self._starts) - 1
        blocks = chance.permutation(count) if self.shuffle else np.arange(count)
        lengths = np.diff(self._starts)[blocks]
        begins = np.concatenate(([0], np.cumsum(lengths)))
        first, end = self._share()
        # The blocks of this rank. Only the first and the last of these blocks may be shared with other ranks.
        mine = range(np.searchsorted(begins, first, "right") - 1, np.searchsorted(begins, end, "left"))
        pieces = [
            (int(blocks[place]), max(0, first - int(begins[place])), min(int(lengths[place]), end - int(begins[place])))
            for place in mine
            if first < end
        ]
        return self._within(pieces, np.random.default_rng((self.seed, epoch, self.rank)))

    def set_epoch(self, epoch: int) -> None:
        self._next = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """The state, as numbers by name. Ranks at the same position have equal states, so one rank may save for all
        ranks."""
        epoch, position = self._next if self._now is None else self._now
        return {"epoch": epoch, "position": position, "order": self.decided_by()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue where ``state_dict`` was called.

        Raises ConfigError if the order differs from the saved order, because the seed, window, number of ranks or
        dataset has changed.
        """
        # States of earlier versions lack these values.
        self.check_decided_by(state.get("order", {}))
        self._next, self._now = (state["epoch"], state["position"]), None

    def decided_by(self) -> dict[str, int | bool]:
        """Everything that the order depends on, except epoch and rank."""
        return {
            "seed": int(self.seed),
            "shuffle": bool(self.shuffle),
            "num_replicas": int(self.num_replicas),
            "drop_last": bool(self.drop_last),
            "length": int(self._starts[-1]),
            "blocks": _checksum(self._starts),
        }

    def check_decided_by(self, saved: dict[str, Any]) -> None:
        """Raise ConfigError if the values in ``saved``, from ``decided_by``, differ from those of this sampler."""
        differences = [
            f"{_SAID[name]} {saved[name]} and is now {value}"
            for name, value in self.decided_by().items()
            if name in saved and saved[name] != value
        ]
        if differences:
            raise ConfigError(
                "this state was saved for another order, so its position would now be another index: "
                f"{', '.join(differences)}; create the sampler as it was when the state was saved, or start an epoch "
                "with set_epoch()"
            )

    # -- inside -------------------------------------------------------------------------------

    def _within(self, pieces: list[tuple[int, int, int]], chance: np.random.Generator) -> Iterator[int]:
        """The indices of these pieces. A piece is a block, its first place, and the place after its last one."""
        raise NotImplementedError

    def _indices(self, piece: tuple[int, int, int]) -> np.ndarray:
        block, first, end = piece
        return np.arange(first, end) + self._starts[block]

    def _share(self) -> tuple[int, int]:
        total, ranks = int(self._starts[-1]), self.num_replicas
        if self.drop_last:
            share = total // ranks
            return self.rank * share, (self.rank + 1) * share
        return self.rank * total // ranks, (self.rank + 1) * total // ranks


class BlockShuffleSampler(CountingSampler):
    """Reads blocks (row groups, shards) in random order, and shuffles the indices of a few blocks together.

    ``blocks``: a dataset with blocks (``ParquetDataset``, ``TarDataset``, ``ArrowDataset``), or the lengths of blocks.
    ``window``: how many bytes of blocks are shuffled together. If ``window`` is at most the dataset's ``keep``, each
    block is read once per epoch. If ``blocks`` are lengths and there are no ``block_bytes``, ``window`` is a number of
    indices.
    """

    def __init__(
        self,
        blocks: Any,
        window: object = "24MiB",
        *,
        block_bytes: Sequence[int] | np.ndarray | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        num_replicas: int | None = None,
        drop_last: bool = False,
    ) -> None:
        starts = _starts_of(blocks, "blocks")
        if block_bytes is None:
            block_bytes = getattr(blocks, "block_bytes", None)
        self._sizes = np.diff(starts) if block_bytes is None else np.asarray(block_bytes, np.int64)
        if len(self._sizes) != len(starts) - 1:
            raise ConfigError(f"block_bytes has {len(self._sizes)} sizes for {len(starts) - 1} blocks")
        self._window = parse_bytes(window, name="window")
        self._compare_with_keep(getattr(blocks, "keep_bytes", None))
        super().__init__(
            starts, shuffle=shuffle, seed=seed, rank=rank, num_replicas=num_replicas, drop_last=drop_last
        )  # fmt: skip

    def decided_by(self) -> dict[str, int | bool]:
        return {**super().decided_by(), "window": self._window, "block_bytes": _checksum(self._sizes)}

    def _compare_with_keep(self, keep_bytes: int | None) -> None:
        if keep_bytes is None or self._window <= keep_bytes or int(self._sizes.sum()) <= keep_bytes:
            return
        warnings.warn(
            f"window={format_bytes(self._window)} of row groups are shuffled together, but a worker keeps only "
            f"keep={format_bytes(keep_bytes)} of row groups, so most row groups are read again for each batch. Give a "
            "window of at most keep, or raise keep=; every worker takes that much memory",
            RuntimeWarning,
            stacklevel=3,
        )

    def _within(self, pieces: list[tuple[int, int, int]], chance: np.random.Generator) -> Iterator[int]:
        window: list[np.ndarray] = []
        size = 0
        for piece in pieces:
            own = int(self._sizes[piece[0]])
            if window and size + own > self._window:
                yield from self._mixed(window, chance)
                window, size = [], 0
            window.append(self._indices(piece))
            size += own
        if window:
            yield from self._mixed(window, chance)

    def _mixed(self, window: list[np.ndarray], chance: np.random.Generator) -> Iterator[int]:
        indices = np.concatenate(window)
        if self.shuffle:
            chance.shuffle(indices)
        return iter(indices.tolist())


class SequenceSampler(CountingSampler):
    """Reads one sequence after another, in random order; the samples of each sequence stay in order.

    ``sequences``: a dataset with sequences (``WindowDataset``), or their lengths. Neighbouring windows share frames, so
    even a cache that holds only one sequence gets most of the possible hits.
    """

    def __init__(
        self,
        sequences: Any,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        num_replicas: int | None = None,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            _starts_of(sequences, "sequences"),
            shuffle=shuffle, seed=seed, rank=rank, num_replicas=num_replicas, drop_last=drop_last,
        )  # fmt: skip

    def _within(self, pieces: list[tuple[int, int, int]], chance: np.random.Generator) -> Iterator[int]:
        return itertools.chain.from_iterable(self._indices(piece).tolist() for piece in pieces)


def _starts_of(given: Any, what: str) -> np.ndarray:
    """Where each block begins and the last block ends, from a dataset or from lengths."""
    known = getattr(given, what, None)
    if known is not None:
        return np.asarray(known, np.int64)
    try:
        # Other types are refused: iterating over a dataset would load every sample.
        if not isinstance(given, (list, tuple, range, np.ndarray, torch.Tensor)):
            raise TypeError
        lengths = np.asarray(given if len(given) else np.empty(0, np.int64))
        if lengths.dtype.kind not in "iu":
            raise TypeError
    except (TypeError, ValueError):
        raise ConfigError(f"a {type(given).__name__} has no {what}: {_NEEDED[what]}") from None
    if lengths.ndim != 1 or (lengths < 0).any():
        raise ConfigError(f"{what} must be a list of lengths, and no length may be negative")
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def _checksum(numbers: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(numbers, "<i8").data)


def _place(rank: int | None, num_replicas: int | None) -> tuple[int, int]:
    import torch.distributed as distributed

    if distributed.is_available() and distributed.is_initialized():
        found = distributed.get_rank(), distributed.get_world_size()
    else:
        found = global_rank(), world_size()
    rank, ranks = found[0] if rank is None else rank, found[1] if num_replicas is None else num_replicas
    if not 0 <= rank < ranks:
        raise ConfigError(f"rank={rank} is not valid: with num_replicas={ranks}, ranks go from 0 to {ranks - 1}")
    return rank, ranks
