"""The position of an iteration, which can be saved and continued later.

In: the progress of the iterator.
Out: the dictionary of ``state_dict``. It is small, has a version, and is checked when it is loaded.
Runs in: trainer.

A state names the next batch and contains no batches that were read ahead: these are fetched again, with the same
randomness. Map-style datasets can continue with any number of workers; where batches belong to workers in turn
(iterable datasets, seeding="worker"), the number of workers must be the same.

A state taken after the last batch of an epoch was delivered continues with the next epoch. The state alone decides the
batches of the iteration that continues from it. Later epochs draw from the global generators. A script that seeds these
as the interrupted script did would repeat the earlier orders, so the generators then continue from their saved states.

Parts of a state whose structure varies lie in tuples. torch.distributed.checkpoint loads into the structure of a state
that was taken before the first batch, and treats a tuple as one value.
"""

from __future__ import annotations

import pickle
import warnings
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.workers.kept_generators import the_watch
from penstock.workers.protocol import Resume
from penstock.workers.rng import set_generators
from penstock.workers.setup import keeps_state

VERSION = 2
KEPT_BATCHES_AGO = 16
"""The largest ``batches_ago`` for which a state is kept. Frameworks read a batch or two ahead."""


class Waypoint(NamedTuple):
    """The position of an iteration after one of its batches."""

    batches: int
    """The number of batches delivered in this epoch."""
    turn: int
    """The number of the next batch; larger than ``batches`` if turns of exhausted workers were skipped."""
    sampler: Any
    """The sampler's own state, if the sampler has a state."""
    resume: dict[int, Resume]
    """Where each worker continues, if batches belong to workers in turn."""


@dataclass(kw_only=True, slots=True)
class Position:
    """The latest iteration of a loader. The loader keeps this position after the iterator is gone."""

    base_seed: int | None
    """The base seed of the epoch; None before it is drawn from the generators."""
    epoch: int
    """The number of the epoch, as counted since the start of the (persistent) workers."""
    generators: Generators
    """The states of all generators before the sampler made its iterator."""
    draws_seed: bool
    """Whether the base seed was drawn after the sampler made its iterator. Only later epochs of persistent workers draw
    none."""
    sampler_epoch: int | None = None
    """The number of this epoch, if the sampler takes or counts such a number."""
    drawn: int = 0
    """The number of batches of indices drawn from the sampler in this epoch."""
    waypoints: deque[Waypoint] = field(default_factory=lambda: deque(maxlen=KEPT_BATCHES_AGO + 1))
    finished: bool = False
    """Whether every batch was delivered."""

    def waypoint(self, batches_ago: int) -> Waypoint:
        if not 0 <= batches_ago < len(self.waypoints):
            raise ConfigError(
                f"batches_ago={batches_ago!r} is out of range: states are kept for the last {len(self.waypoints) - 1} "
                "batches of this epoch"
            )
        return self.waypoints[-1 - batches_ago]


class Generators:
    """The states of the global generators and of the loader's own generator at one moment."""

    __slots__ = ("_global", "_own", "_own_state", "_state", "seed")

    def __init__(self, own: torch.Generator | None, state: dict[str, Any] | None = None) -> None:
        self._own = own
        self.seed = torch.initial_seed()
        """The latest seed of torch's global generator."""
        self._state = state
        self._global = None if state else the_watch().snapshot()
        self._own_state = None if own is None or state else own.get_state()

    @property
    def state(self) -> dict[str, Any]:
        if self._state is None:
            assert self._global is not None
            self._state = {"global": the_watch().states_of(self._global), "own": self._own_state}
        return self._state

    @classmethod
    def begin(cls, own: torch.Generator | None, state: dict[str, Any] | None) -> tuple[Generators, Generators]:
        """Set the generators to the states in ``state``, if it is given. Returns the generators' states before and
        after this."""
        kept = cls(own)
        if state is None:
            return kept, kept
        cls(own, state["generators"][0]).restore()
        return kept, cls(own)

    def restore(self) -> None:
        set_generators(self.state["global"])
        if self._own is not None and self.state["own"] is not None:
            self._own.set_state(self.state["own"])

    def restore_global(self) -> None:
        """Restore the global generators only. The loader's own generator continues from where the sampler left it."""
        set_generators(self.state["global"])

    def go_on(self, state: dict[str, Any]) -> None:
        """Set the global generators after the sampler has drawn the batches of ``state``. They return to the states
        kept here. But if they were seeded as when ``state`` was saved, they continue from the saved states."""
        if self.seed != state["seed"]:
            self.restore_global()
        elif (now := state["now"][0]) is not None:
            set_generators(now["global"])

    def plain(self) -> dict[str, Any]:
        """The value without numpy arrays, which ``torch.load`` refuses with ``weights_only=True``."""
        python, numpy, torchs = self.state["global"]
        return {"global": (python, (numpy[0], list(map(int, numpy[1])), *numpy[2:]), torchs), "own": self.state["own"]}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The settings that must be the same when a state is loaded as when it was saved."""

    kind: str
    dataset_length: int | None
    batch_size: int | None
    drop_last: bool
    seeding: str
    workers: int | None
    """The number of workers; None unless batches belong to workers in turn."""


@dataclass(frozen=True, kw_only=True)
class Around:
    """The parts of a state that come from the loader itself."""

    dataset: Any
    generator: torch.Generator | None
    """The loader's own."""
    persistent: bool
    sampler_epoch: int | None
    """The number of the sampler's next epoch, if the sampler has such a number."""
    sampler: Any
    """The sampler's own state now, if the sampler has a state."""


def to_dict(position: Position, shape: Shape, around: Around, *, batches_ago: int) -> dict[str, Any]:
    waypoint = position.waypoint(batches_ago)
    now = Generators(around.generator)
    return {
        "version": VERSION,
        "shape": vars(shape).copy(),
        "base_seed": position.base_seed,
        "epoch": position.epoch,
        "batches": waypoint.batches,
        "turn": waypoint.turn,
        "drawn": position.drawn,
        "sampler": (waypoint.sampler,),
        "sampler_epoch": position.sampler_epoch,
        "resume": tuple((worker, at.batches, _plain(at.memo)) for worker, at in waypoint.resume.items()),
        "generators": (position.generators.plain(),),
        "draws_seed": position.draws_seed,
        "dataset": (_state_of(around.dataset),),
        "finished": position.finished and batches_ago == 0,
        "next_sampler": (around.sampler,),
        "next_sampler_epoch": around.sampler_epoch,
        "persistent": around.persistent,
        "now": (now.plain(),),
        "seed": now.seed,
    }


def next_epoch(state: dict[str, Any]) -> dict[str, Any] | None:
    """The state at the start of the epoch after the epoch of ``state``; None if an earlier version did not save it."""
    if state["now"][0] is None:
        return None
    persistent, shape = state["persistent"], state["shape"]
    goes_on = persistent and shape["kind"] == "map"
    return {
        **state,
        "base_seed": state["base_seed"] if persistent else None,
        "epoch": state["epoch"] + 1 if persistent else 0,
        "batches": 0,
        "turn": 0,
        "drawn": 0,
        "sampler": state["next_sampler"],
        "sampler_epoch": state["next_sampler_epoch"],
        # The generators of persistent workers continue, but the workers' streams begin again.
        "resume": tuple((worker, 0, memo) for worker, _, memo in state["resume"]) if goes_on else (),
        "generators": state["now"],
        "draws_seed": not persistent,
        "finished": False,
        "now": (None,),
    }


def resume_of(state: dict[str, Any] | None) -> dict[int, Resume]:
    """The point from which each worker continues."""
    return {} if state is None else {worker: Resume(batches, memo) for worker, batches, memo in state["resume"]}


def _state_of(dataset: Any) -> Any:
    """The dataset's own state, if the dataset has a state that can be saved."""
    if not keeps_state(dataset):
        return None
    try:
        found = dataset.state_dict()
        pickle.dumps(found)
    except Exception as problem:
        warnings.warn(
            f"the loader's state does not contain that of {type(dataset).__name__}: {problem!r}. A loader that loads "
            "this state reads the samples delivered so far again and drops them",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return found


def _plain(value: Any) -> Any:
    """The value without numpy arrays, which ``torch.load`` refuses with ``weights_only=True``."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if type(value) in (tuple, list):
        return type(value)(_plain(item) for item in value)
    return {key: _plain(item) for key, item in value.items()} if type(value) is dict else value


def nothing_begun(shape: Shape, around: Around) -> dict[str, Any]:
    """The state of a loader that was never iterated: the start of a first epoch that begins now."""
    position = Position(
        base_seed=None,
        epoch=0,
        generators=Generators(around.generator),
        draws_seed=True,
        sampler_epoch=around.sampler_epoch,
    )
    position.waypoints.append(Waypoint(batches=0, turn=0, sampler=around.sampler, resume={}))
    return {**to_dict(position, shape, around, batches_ago=0), "now": (None,)}


def read(state: Any, shape: Shape, *, counts_epochs: bool) -> dict[str, Any]:
    """``state`` in the form of this version. Raises ConfigError if it is no state, or the state of a different loader.

    ``counts_epochs``: whether the loader's sampler counts epochs.
    """
    _check(state, shape)
    return _read_first_version(state, counts_epochs=counts_epochs) if state["version"] == 1 else state


def _read_first_version(state: dict[str, Any], *, counts_epochs: bool) -> dict[str, Any]:
    sampler, finished = state["sampler"], state["finished"] or state.get("drained", False)
    epoch = sampler["epoch"] if counts_epochs and sampler is not None else None
    return {
        **state,
        "version": VERSION,
        "drawn": state["turn"],
        "sampler": (None if counts_epochs else sampler,),
        "sampler_epoch": epoch,
        "resume": tuple((worker, *at) for worker, at in state["resume"].items()),
        "generators": (state["generators"],),
        "dataset": (state["dataset"],),
        "finished": finished,
        "next_sampler": (None,),
        "next_sampler_epoch": None if epoch is None else epoch + 1,
        "persistent": False,
        "now": (None,),
        "seed": None,
    }


def _check(state: Any, shape: Shape) -> None:
    if not isinstance(state, dict) or "version" not in state:
        raise ConfigError(f"this is not a state of a penstock DataLoader: {type(state).__name__} without a version")
    if state["version"] not in range(1, VERSION + 1):
        raise ConfigError(f"the state has version {state['version']!r}; this penstock reads versions 1 to {VERSION}")
    saved = state["shape"]
    for name, value in vars(shape).items():
        if saved.get(name) != value:
            raise ConfigError(
                f"the state was saved with {name.replace('_', ' ')} {saved.get(name)!r}, but this loader has {value!r} "
                "and would not continue with the same batches; use the saved value, or begin the epoch again"
            )


def length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
