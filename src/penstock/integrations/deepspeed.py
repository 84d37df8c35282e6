"""Batches for a DeepSpeed pipeline: prepared by the model, cut for gradient accumulation, repeated without end.

In:  a dataset whose items are whole batches, an engine with a grid of ranks, a model with ``prepare_inputs``.
Out: micro-batches ``(features, label)``, as the engine's stage needs them.
Runs in: trainer. Importing it does not need deepspeed; it runs with any object that has the methods of deepspeed's
engine.

Only the first stage of a pipeline loads data. The labels may depend on noise that the first stage drew, so it sends the
labels to the last stage. The stages in between load nothing and start no worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from penstock.errors import ConfigError
from penstock.integrations.stage_labels import StageLabels, rebuilt
from penstock.loader.dataloader import DataLoader
from penstock.settings import load
from penstock.settings.files import Source
from penstock.workers.rng import mix, seed_stretch

DEFAULT_PREFETCH = 1
_VERSION = 1


class PipelineDataLoader:
    """Iterates without end over a dataset of whole batches; ``epoch`` counts the passes, from 1.

    ``prefetch_batches_per_worker``: how many batches a worker may be ahead. The default is the value of
    ``dataloader_prefetch_per_worker``, or of another name that ``penstock.settings`` reads, in ``config``, a settings
    file or mapping, so that training and evaluation use the same number. Without such a value the default is 1.
    ``seed``: the seed of a sample's randomness, together with the data-parallel rank, the epoch and the index.
    ``loader_options`` go to ``penstock.DataLoader``: ``memory``, ``device``, ``pin_memory``.
    """

    def __init__(
        self,
        dataset: Any,
        model_engine: Any,
        gradient_accumulation_steps: int,
        model: Any,
        num_dataloader_workers: int = 2,
        prefetch_batches_per_worker: int | None = None,
        *,
        config: Source | None = None,
        seed: int = 0,
        **loader_options: Any,
    ) -> None:
        if len(dataset) == 0:
            raise ConfigError("the dataset is empty: there is no batch to train on")
        if gradient_accumulation_steps < 1:
            raise ConfigError(f"gradient_accumulation_steps={gradient_accumulation_steps} must be at least 1")
        prefetch = prefetch_batches_per_worker
        if prefetch is None:
            prefetch = _prefetch_of(config, num_dataloader_workers)
        self.dataset, self.model_engine, self.model = dataset, model_engine, model
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.eval_quantile: float | None = None
        self.epoch = 1
        self.ranks = Ranks.of(model_engine)
        # A dataset with ``post_init`` has been given its rank, and contains only this rank's batches.
        shards = 1 if hasattr(dataset, "post_init") else self.ranks.data_parallel_world_size
        self._order = _Order(len(dataset), shard=self.ranks.data_parallel_rank % shards, shards=shards)
        self.dataloader = DataLoader(
            _Seeded(dataset, mix(seed, self.ranks.data_parallel_rank)),
            batch_size=None,
            sampler=self._order,
            num_workers=num_dataloader_workers,
            prefetch_factor=prefetch if num_dataloader_workers else None,
            persistent_workers=num_dataloader_workers > 0,
            **loader_options,
        )
        self._labels = StageLabels(self.ranks.global_ranks) if self.ranks.is_pipe_parallel else None
        self._batches: Any = None
        self._done = 0
        """Batches of this epoch whose micro-batches were all returned."""
        self._waiting: deque[tuple[Any, Any]] = deque()
        """Micro-batches of the current batch that were not returned yet."""

    # -- iterating ----------------------------------------------------------------------------

    def __iter__(self) -> PipelineDataLoader:
        return self

    def __len__(self) -> int:
        """Micro-batches per epoch on this rank."""
        return len(self._order) * self.gradient_accumulation_steps

    def __next__(self) -> tuple[Any, Any]:
        if not self._waiting:
            self._waiting.extend(self._next_batch())
        micro_batch = self._waiting.popleft()
        if not self._waiting:
            self._done += 1
            if self._done == len(self._order):
                self._begin(self.epoch + 1)
        return micro_batch

    def _next_batch(self) -> list[tuple[Any, Any]]:
        if self._labels is not None and not self.ranks.is_first_stage:
            if not self.ranks.is_last_stage:
                raise ConfigError("a stage between the first and the last has no data; do not iterate the loader there")
            return [(None, label) for label in self._labels.receive(self.epoch, self._done)]
        if self._batches is None:
            self._order.begin_at(self.epoch, self._done)
            self._batches = iter(self.dataloader)
        batch = next(self._batches)
        features, label = self.model.prepare_inputs(batch, timestep_quantile=self.eval_quantile)
        pieces = split(features, label, self.gradient_accumulation_steps)
        if self._labels is not None:
            self._labels.send(self.epoch, self._done, [label for _, label in pieces])
        return pieces

    def _begin(self, epoch: int, done: int = 0) -> None:
        self.epoch, self._done = epoch, done
        self._batches = None
        self._waiting.clear()

    # -- what training loops call ----------------------------------------------------------------

    def reset(self) -> None:
        """Start again at the first epoch."""
        self._begin(1)

    def set_eval_quantile(self, quantile: float | None) -> None:
        """Set the ``timestep_quantile`` that ``prepare_inputs`` gets from the next batch on."""
        self.eval_quantile = quantile

    def sync_epoch(self) -> None:
        """Set the same epoch in every process, including those that load no data."""
        if dist.is_available() and dist.is_initialized():
            epochs: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(epochs, self.epoch)
            self.epoch = max(epochs)

    def state_dict(self) -> dict[str, Any]:
        begun = self.gradient_accumulation_steps - len(self._waiting) if self._waiting else 0
        return {"version": _VERSION, "epoch": self.epoch, "batches": self._done, "micro_batches": begun}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from where the state was taken, with any number of workers."""
        if state_dict.get("version") != _VERSION:
            raise ConfigError(f"this is not the state of a PipelineDataLoader: version {state_dict.get('version')!r}")
        if not 0 <= state_dict["batches"] < len(self._order):
            raise ConfigError(
                f"the state is at batch {state_dict['batches']} of an epoch that has {len(self._order)} here: it was "
                "saved with another dataset or number of ranks"
            )
        self._begin(state_dict["epoch"], state_dict["batches"])
        if state_dict["micro_batches"]:
            self._waiting.extend(self._next_batch()[state_dict["micro_batches"] :])

    def close(self) -> None:
        """End the workers."""
        self._batches = None
        self.dataloader.close()


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The place of this process in an engine's grid."""

    data_parallel_rank: int
    data_parallel_world_size: int
    model_parallel_rank: int
    pipe_parallel_rank: int
    pipe_parallel_world_size: int
    is_pipe_parallel: bool
    global_ranks: tuple[int, int]
    """The global ranks of this pipeline's first and last stage."""

    @property
    def is_first_stage(self) -> bool:
        return self.pipe_parallel_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipe_parallel_rank == self.pipe_parallel_world_size - 1

    @staticmethod
    def of(engine: Any) -> Ranks:
        """The ranks of an engine. Without a grid, every process of the job counts as a data-parallel rank."""
        grid: Any = getattr(engine, "grid", None)
        is_job = not hasattr(engine, "grid") and dist.is_available() and dist.is_initialized()

        def asked(name: str, otherwise: int) -> int:
            answer = getattr(grid, f"get_{name}", None)
            return otherwise if answer is None else int(answer())

        stages = asked("pipe_parallel_world_size", 1)
        is_pipe_parallel = getattr(engine, "is_pipe_parallel", stages > 1)
        is_pipe_parallel = bool(is_pipe_parallel() if callable(is_pipe_parallel) else is_pipe_parallel) and stages > 1
        ends = (0, 0) if not is_pipe_parallel else (grid.stage_to_global(0), grid.stage_to_global(stages - 1))
        return Ranks(
            data_parallel_rank=asked("data_parallel_rank", dist.get_rank() if is_job else 0),
            data_parallel_world_size=max(1, asked("data_parallel_world_size", dist.get_world_size() if is_job else 1)),
            model_parallel_rank=asked("model_parallel_rank", 0),
            pipe_parallel_rank=asked("pipe_parallel_rank", 0),
            pipe_parallel_world_size=stages,
            is_pipe_parallel=is_pipe_parallel,
            global_ranks=ends,
        )


class _Order:
    """A sampler that yields the numbers of this rank's batches, each with its epoch; it can begin at any batch."""

    def __init__(self, length: int, *, shard: int, shards: int) -> None:
        # Every rank gets the same number of batches; otherwise some ranks would wait for others at the end of an epoch.
        self._indices = range(shard, length // shards * shards, shards) if length >= shards else range(length)
        self._epoch, self._first = 1, 0

    def begin_at(self, epoch: int, batch: int) -> None:
        self._epoch, self._first = epoch, batch

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((self._epoch, index) for index in self._indices[self._first :])


class _Seeded(Dataset):
    """Every batch has its own seed, whichever worker fetches it, so stages and resumed runs get the same batches."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, place: tuple[int, int]) -> Any:
        epoch, index = place
        seed_stretch(mix(self._seed, epoch, index), 0)
        return self._dataset[index]


def _prefetch_of(config: Source | None, workers: int) -> int:
    if config is None or not workers:
        return DEFAULT_PREFETCH
    return load(config, overrides={"num_workers": workers}).loader_arguments().get("prefetch_factor", DEFAULT_PREFETCH)


def split(features: Any, label: Any, pieces: int) -> list[tuple[Any, Any]]:
    """A batch cut into micro-batches of equal size. Tensors that are as long as the batch are cut; each micro-batch
    gets everything else."""
    if pieces == 1:
        return [(features, label)]
    length = next((len(tensor) for tensor in _tensors((features, label)) if tensor.dim()), 0)
    if length == 0 or length % pieces:
        raise ConfigError(
            f"a batch of {length} cannot be cut into {pieces} micro-batches of equal size; make the batch a multiple "
            "of gradient_accumulation_steps"
        )
    return [
        (_cut(features, length, number, pieces), _cut(label, length, number, pieces)) for number in range(pieces)
    ]  # fmt: skip


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _cut(value: Any, length: int, number: int, pieces: int) -> Any:
    size = length // pieces
    if isinstance(value, torch.Tensor):
        return value[number * size : (number + 1) * size] if value.dim() and len(value) == length else value
    if isinstance(value, Mapping):
        return rebuilt(value, {key: _cut(item, length, number, pieces) for key, item in value.items()})
    if isinstance(value, list) and len(value) == length and not any(isinstance(item, torch.Tensor) for item in value):
        # The value is a list with one text or size per sample.
        return value[number * size : (number + 1) * size]
    if isinstance(value, (list, tuple)):
        return rebuilt(value, [_cut(item, length, number, pieces) for item in value])
    return value
