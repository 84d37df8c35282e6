"""What is known of a dataset before it is loaded in earnest.

In:  measurements, or a file that states them.
Out: ``Profile``: samples as they were seen, and what each loader costs around them.
Runs in: anywhere; nothing here looks at the machine.
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
class Sample:
    """One sample as it was read."""

    size_bytes: int
    """Bytes of its tensors, arrays and texts."""
    wait_s: float
    """Time in which nobody computed: disks, networks."""
    cpu_s: float
    """Time of a processor."""


@dataclass(frozen=True, kw_only=True)
class LoaderCost:
    """What one loader takes around the dataset's own work."""

    worker_bytes: int
    """Private memory of a worker, besides the samples it holds."""
    sample_s: float
    """Processor time of a worker for a sample, beyond the dataset's own."""
    batch_s: float
    """Processor time of a worker for a batch, beyond its samples': collating, sending."""
    trainer_s: float
    """Processor time of the training loop for a batch, when it takes it."""
    start_s: float
    """Time to start one worker."""
    beside_s: float = 0.0
    """Processor time of the training process for a batch, beside the training loop."""
    creep_bytes: int = 0
    """What a worker's heap gains with every batch, until old ones are forgotten."""
    creep_batches: int = 128
    """After how many batches of its own that is."""
    crowding: float = 0.0
    """How much longer work takes while more of it is at hand than there are cores."""
    lag: float = 0.0
    """How much longer a sample takes for every worker beyond the cores, besides what sharing them explains: a share of
    its own time."""
    copies: float = 1.0
    """Bytes of a batch in flight, as a multiple of its samples'."""
    trainer_bytes: int = 0
    """What the loader takes in the training process, besides batches."""


TORCHS_USUAL = LoaderCost(worker_bytes=35 << 20, sample_s=2e-5, batch_s=1e-3, trainer_s=1e-3, start_s=0.02)
"""torch's DataLoader, where nothing could be measured."""
OURS_USUAL = LoaderCost(worker_bytes=11 << 20, sample_s=1e-5, batch_s=2e-4, trainer_s=3e-4, start_s=0.02)
"""Ours."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A dataset's samples, and what loading them costs here."""

    name: str
    """The dataset's name."""
    length: int | None
    """Samples in it; None if nobody knows."""
    samples: tuple[Sample, ...]
    """Those that were read, spread over the dataset."""
    is_splittable: bool = True
    """Whether rows of one batch may come from several workers."""
    has_collate: bool = False
    """Whether a function of the user's makes batches of samples: samples then lie beside the batch for a moment."""
    is_collated: bool = True
    """Whether samples become one new batch; False: they stay apart and are sent one by one."""
    torchs: LoaderCost = TORCHS_USUAL
    """torch's DataLoader around it."""
    ours: LoaderCost = OURS_USUAL
    """penstock's."""
    is_picklable: bool | None = None
    """Whether workers can be started afresh; None: not tried."""
    holds_gil: bool | None = None
    """Whether threads would wait for each other; None: not tried."""
    containers_bytes: int = 0
    """Large Python containers in it, which every worker comes to copy."""
    is_repeated: bool = False
    """Whether every worker reads all of it: a stream that does not tell its workers apart."""
    has_runs: bool = True
    """Whether loaders were run to see what they cost; False: their costs are the usual ones."""
    is_measured: bool = True
    """False: stated by somebody, or taken from a table."""

    @property
    def sample_bytes(self) -> float:
        return statistics.fmean(sample.size_bytes for sample in self.samples)

    @property
    def largest_bytes(self) -> int:
        return max(sample.size_bytes for sample in self.samples)

    @property
    def spread(self) -> float:
        """Standard deviation of the sizes over their mean."""
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
    """Whether it is a size or a length of time: a finite number, nothing less than nothing."""
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf


def read_profile(source: Path | Mapping[str, Any]) -> Profile:
    """A profile from a file that ``plan --save-profile`` wrote, or from a short statement of the figures:
    ``sample_bytes``, ``wait_s``, ``cpu_s``, and ``name``, ``length``, ``is_splittable`` if they matter."""
    where = str(source) if isinstance(source, Path) else "the profile"
    try:
        given = json.loads(source.read_text()) if isinstance(source, Path) else dict(source)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as problem:
        raise ConfigError(f"{where} cannot be read as a profile: {problem}") from problem
    if not isinstance(given, dict):
        raise ConfigError(f"{where} is no profile: it holds {type(given).__name__}, not named figures")
    known = {field.name for field in fields(Profile)} | {"sample_bytes", "wait_s", "cpu_s"}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigError(
            f"{where} has {', '.join(unknown)}, which a profile does not know; it knows {', '.join(sorted(known))}"
        )
    try:
        return _made(given)
    except (TypeError, ValueError, KeyError) as problem:
        raise ConfigError(f"{where} is no profile: {problem}") from problem


def _made(given: dict[str, Any]) -> Profile:
    if "samples" in given:
        samples = tuple(Sample(**each) for each in given.pop("samples"))
    else:
        samples = (
            Sample(
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
            given[name] = LoaderCost(**given[name])
    given.setdefault("name", "the dataset")
    given.setdefault("length", None)
    return Profile(samples=samples, **given)
