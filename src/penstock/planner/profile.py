"""Measurements of a dataset, taken before the training.

In:  measurements, or a file that states figures in their place.
Out: ``Profile``: the samples that were read, and the costs of each loader itself.
Runs in: anywhere; nothing in this file reads facts of the machine.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Real
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.units import parse_bytes


@dataclass(frozen=True, kw_only=True)
class SeenSample:
    """The size of one sample that was read, and the time that reading it took."""

    size_bytes: int
    """The bytes of the tensors, arrays and texts in the sample."""
    wait_s: float
    """The time spent waiting for disks or networks, without computing."""
    cpu_s: float
    """Processor time."""


@dataclass(frozen=True, kw_only=True)
class LoaderCost:
    """The costs of one loader beyond the dataset's own work."""

    worker_bytes: int
    """The private memory of a worker, without the samples that it holds."""
    sample_s: float
    """The processor time that a worker takes for a sample beyond the dataset's own time."""
    batch_s: float
    """The processor time that a worker takes to collate and send a batch, beyond the time for its samples."""
    trainer_s: float
    """The processor time that the training loop takes to receive a batch."""
    start_s: float
    """The time that starting one worker takes."""
    beside_s: float = 0.0
    """The processor time that other threads of the training process take for a batch."""
    creep_batches: int = 128
    """The number of batches for which the heap of a worker of torch's grows; it counts only that worker's batches."""
    copies: float = 1.0
    """The bytes of a batch in flight, as a multiple of the bytes of its samples."""
    trainer_bytes: int = 0
    """The memory that the loader takes in the training process, without batches."""


TORCHS_USUAL = LoaderCost(worker_bytes=35 << 20, sample_s=2e-5, batch_s=1e-3, trainer_s=1e-3, start_s=0.02)
"""The costs of torch's DataLoader that are assumed if nothing can be measured."""
OURS_USUAL = LoaderCost(worker_bytes=11 << 20, sample_s=1e-5, batch_s=2e-4, trainer_s=3e-4, start_s=0.02)
"""The costs of penstock's DataLoader that are assumed if nothing can be measured."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Samples of a dataset, and the cost of loading them on this machine."""

    name: str
    """The name of the dataset."""
    length: int | None
    """The number of samples in the dataset; None if the dataset has no length."""
    samples: tuple[SeenSample, ...]
    """The samples that were read, spread over the dataset."""
    is_splittable: bool = True
    """Whether rows of one batch may come from several workers."""
    has_collate: bool = False
    """Whether the user's own function collates. If so, samples and their batch exist at the same time for a moment."""
    is_collated: bool = True
    """Whether samples are copied into one new batch; if not, each sample is sent separately."""
    torchs: LoaderCost = TORCHS_USUAL
    """The costs of torch's DataLoader."""
    ours: LoaderCost = OURS_USUAL
    """The costs of penstock's DataLoader."""
    is_picklable: bool | None = None
    """Whether the dataset can be sent to a spawned worker; None if this was not tried."""
    holds_gil: bool | None = None
    """Whether threads that read the dataset would wait for each other; None if this was not tried."""
    containers_bytes: int = 0
    """The bytes of large Python containers in the dataset; every worker makes a copy of them as it reads them."""
    is_repeated: bool = False
    """Whether every worker of this stream reads all samples."""
    has_runs: bool = True
    """Whether loaders were run to measure their costs; if not, typical costs are used."""
    is_measured: bool = True
    """Whether the figures were measured; if not, the user stated them or they come from a table."""

    @property
    def sample_bytes(self) -> float:
        return statistics.fmean(sample.size_bytes for sample in self.samples)

    @property
    def largest_bytes(self) -> int:
        return max(sample.size_bytes for sample in self.samples)

    @property
    def spread(self) -> float:
        """The standard deviation of the sizes divided by their mean."""
        sizes = [sample.size_bytes for sample in self.samples]
        return statistics.pstdev(sizes) / statistics.fmean(sizes) if any(sizes) else 0.0

    @property
    def wait_s(self) -> float:
        return statistics.fmean(sample.wait_s for sample in self.samples)

    @property
    def cpu_s(self) -> float:
        return statistics.fmean(sample.cpu_s for sample in self.samples)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def is_amount(value: object) -> bool:
    """Whether ``value`` can be a size or a length of time: a finite number of at least 0."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf
    except OverflowError:  # a whole number of hundreds of digits
        return False


_RETIRED_COSTS = frozenset({"creep_bytes", "crowding", "lag"})
"""Figures of ``LoaderCost`` that files of earlier versions have and this version ignores."""


def read_profile(source: Path | Mapping[str, Any]) -> Profile:
    """Read a profile from a file that ``plan --save-profile`` wrote, or from a short statement of figures. The
    statement has ``sample_bytes``, ``wait_s`` and ``cpu_s``, and may have ``name``, ``length`` and
    ``is_splittable``."""
    where = str(source) if isinstance(source, Path) else "the profile"
    try:
        given = json.loads(source.read_text()) if isinstance(source, Path) else dict(source)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as problem:
        raise ConfigError(f"{where} cannot be read as a profile: {problem}") from problem
    if not isinstance(given, dict):
        raise ConfigError(f"{where} is not a profile: it holds {type(given).__name__}, but a profile has named figures")
    known = {field.name for field in fields(Profile)} | {"sample_bytes", "wait_s", "cpu_s"}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigError(
            f"{where} has {', '.join(unknown)}, which a profile cannot have; its keys are {', '.join(sorted(known))}"
        )
    try:
        return _made(given)
    except (TypeError, ValueError, KeyError, OverflowError) as problem:
        raise ConfigError(f"{where} is not a profile: {problem}") from problem


def _made(given: dict[str, Any]) -> Profile:
    if "samples" in given:
        samples = tuple(SeenSample(**each) for each in given.pop("samples"))
    else:
        samples = (
            SeenSample(
                size_bytes=parse_bytes(given.pop("sample_bytes"), name="sample_bytes"),
                wait_s=float(given.pop("wait_s", 0.0)),
                cpu_s=float(given.pop("cpu_s", 0.0)),
            ),
        )
        given.setdefault("is_measured", False)
    if not samples:
        raise ValueError("it has no samples")
    for name in ("torchs", "ours"):
        if name in given:
            cost = dict(given[name])
            given[name] = LoaderCost(**{key: figure for key, figure in cost.items() if key not in _RETIRED_COSTS})
    return _checked(Profile(samples=samples, **{"name": "the dataset", "length": None, **given}))


def _short(value: object) -> str:
    # Python does not convert whole numbers of thousands of digits to text.
    return "a number of hundreds of digits" if isinstance(value, int) and abs(value) > 1 << 200 else repr(value)[:60]


def _checked(profile: Profile) -> Profile:
    """The profile itself. Raises TypeError if a figure has the wrong type."""
    if not isinstance(profile.name, str):
        raise TypeError(f"name={profile.name!r} is not a text")
    if profile.length is not None and (type(profile.length) is not int or not is_amount(profile.length)):
        raise TypeError(f"length={profile.length!r} is not a number of samples")
    amounts = [("containers_bytes", profile.containers_bytes)]
    amounts += [pair for each in profile.samples for pair in asdict(each).items()]
    amounts += [pair for cost in (profile.torchs, profile.ours) for pair in asdict(cost).items()]
    for name, amount in amounts:
        if not is_amount(amount):
            raise TypeError(f"{name}={_short(amount)} is not a size or a length of time")
    return profile
