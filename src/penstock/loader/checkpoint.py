"""Where an iteration stands, to be saved and continued later.

In:  what the iterator has delivered.
Out: the dictionary of ``state_dict``: small, with a version, checked when it is loaded.
Runs in: trainer.

A state names a batch, not what was read ahead: batches in flight are fetched again, with the same randomness. Map-style
datasets can continue with any number of workers; where batches belong to workers in turn (iterable datasets,
seeding="worker") the number must be the same.
"""

from __future__ import annotations

import pickle
import warnings
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.workers.protocol import Resume
from penstock.workers.rng import get_generators, set_generators
from penstock.workers.setup import keeps_state

VERSION = 1
KEPT_BATCHES_AGO = 16
"""How many batches back a state can be asked for: frameworks read a batch or two ahead."""


@dataclass(frozen=True, kw_only=True)
class Waypoint:
    """The iteration after some batch."""

    batches: int
    """Batches delivered in this epoch."""
    turn: int
    """Number of the next batch; larger than ``batches`` if turns of exhausted workers were skipped."""
    sampler: Any
    """The sampler's own state, if it has one."""
    resume: dict[int, Resume]
    """Where each worker continues, if batches belong to workers in turn."""
    drained: bool = False
    """Whether the sampler was at its end: its own state may already be that of the next epoch."""


@dataclass(kw_only=True)
class Position:
    """The latest iteration of a loader. The loader keeps it after the iterator is gone."""

    base_seed: int | None
    """None before it is drawn: the generators determine it."""
    epoch: int
    """Which epoch of its (persistent) workers this is."""
    generators: Generators
    """All generators as they were before the sampler made its iterator."""
    draws_seed: bool
    """Whether the base seed was drawn after that, as in every epoch but the later ones of persistent workers."""
    waypoints: deque[Waypoint] = field(default_factory=lambda: deque(maxlen=KEPT_BATCHES_AGO + 1))
    finished: bool = False

    def waypoint(self, batches_ago: int) -> Waypoint:
        if not 0 <= batches_ago < len(self.waypoints):
            raise ConfigError(
                f"batches_ago={batches_ago!r} is out of range: states are kept for the last {len(self.waypoints) - 1} "
                "batches of this epoch"
            )
        return self.waypoints[-1 - batches_ago]


class Generators:
    """The global generators and the loader's own, at one moment."""

    def __init__(self, own: torch.Generator | None, state: dict[str, Any] | None = None) -> None:
        self._own = own
        self.state = state or {"global": get_generators(), "own": None if own is None else own.get_state()}

    @classmethod
    def begin(cls, own: torch.Generator | None, state: dict[str, Any] | None) -> tuple[Generators, Generators]:
        """Bring them to where ``state`` was saved, if one is given. Returns them as they were and as they are now."""
        kept = cls(own)
        if state is None:
            return kept, kept
        cls(own, state["generators"]).restore()
        return kept, cls(own)

    def restore(self) -> None:
        set_generators(self.state["global"])
        if self._own is not None and self.state["own"] is not None:
            self._own.set_state(self.state["own"])

    def restore_global(self) -> None:
        """Only the global ones: the loader's own continues from where its sampler left it."""
        set_generators(self.state["global"])


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What must be the same when a state is loaded as when it was saved."""

    kind: str
    dataset_length: int | None
    batch_size: int | None
    drop_last: bool
    seeding: str
    workers: int | None
    """None unless batches belong to workers in turn."""


def to_dict(position: Position, shape: Shape, *, batches_ago: int, dataset: Any) -> dict[str, Any]:
    waypoint = position.waypoint(batches_ago)
    return {
        "version": VERSION,
        "shape": vars(shape).copy(),
        "base_seed": position.base_seed,
        "epoch": position.epoch,
        "batches": waypoint.batches,
        "turn": waypoint.turn,
        "sampler": waypoint.sampler,
        "drained": waypoint.drained,
        "resume": {worker: _plain(tuple(resume)) for worker, resume in waypoint.resume.items()},
        "generators": _plain(position.generators.state),
        "draws_seed": position.draws_seed,
        "finished": position.finished and batches_ago == 0,
        "dataset": _state_of(dataset),
    }


def _state_of(dataset: Any) -> Any:
    """The dataset's own state, if it keeps one that can be saved."""
    if not keeps_state(dataset):
        return None
    try:
        found = dataset.state_dict()
        pickle.dumps(found)
    except Exception as problem:
        warnings.warn(
            f"the state of {type(dataset).__name__} is left out: {problem!r}; when the state is loaded, the samples "
            "delivered so far are read again and dropped",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return found


def _plain(value: Any) -> Any:
    """Without numpy arrays, which ``torch.load`` refuses with ``weights_only=True``."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if type(value) in (tuple, list):
        return type(value)(_plain(item) for item in value)
    return {key: _plain(item) for key, item in value.items()} if type(value) is dict else value


def nothing_begun(shape: Shape, generators: Generators, *, dataset: Any) -> dict[str, Any]:
    """The state of a loader that was never iterated: the start of the first epoch, if it began now."""
    first = Waypoint(batches=0, turn=0, sampler=None, resume={})
    position = Position(base_seed=None, epoch=0, generators=generators, draws_seed=True)
    position.waypoints.append(first)
    return to_dict(position, shape, batches_ago=0, dataset=dataset)


def check(state: Any, shape: Shape) -> None:
    """Raise if ``state`` is no state, or one of a different loader."""
    if not isinstance(state, dict) or "version" not in state:
        raise ConfigError(f"this is not a state of a penstock DataLoader: {type(state).__name__} without a version")
    if state["version"] != VERSION:
        raise ConfigError(f"the state has version {state['version']!r}; this penstock reads version {VERSION}")
    saved = state["shape"]
    for name, value in vars(shape).items():
        if saved.get(name) != value:
            raise ConfigError(
                f"the state was saved with {name.replace('_', ' ')} {saved.get(name)!r} and this loader has {value!r}: "
                "it would not continue with the same batches; use the same value, or begin the epoch again"
            )
