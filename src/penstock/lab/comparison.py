"""The comparison of two loaders over the same dataset: the figures of both, and a verdict in one sentence.

In:  the rounds of each loader.
Out: ``LoaderComparison`` and its verdict, which follows from the numbers alone.
Runs in: command line.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from penstock.units import format_bytes

ALIKE_FRACTION = 0.05
"""Two loaders that differ by less than this share count as equally fast, even if every round agrees which one is
faster: the speed of a machine varies by as much."""
UNCLEAR_FRACTION = 0.25
"""If the rounds of two loaders overlap, but their medians differ by more than this share, no verdict is possible."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One run of a loader over the dataset."""

    samples: int
    """The number of samples delivered in the measured time."""
    delivered_bytes: int
    """The bytes of the tensors, arrays and texts in the delivered samples."""
    elapsed_s: float
    """The measured time, including simulated training steps."""
    first_batch_s: float
    """The time from iter() to the first batch."""
    peak_growth_bytes: int | None
    """The most memory (PSS) of the process and its workers, minus their memory before iter(); None if unknown."""
    order: tuple[tuple[int, int], ...] | None = None
    """The delivered samples in order, each as its index and its last pixel; None if samples cannot be distinguished."""

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.elapsed_s

    @property
    def bytes_per_s(self) -> float:
        return self.delivered_bytes / self.elapsed_s


@dataclass(frozen=True, kw_only=True)
class LoaderResult:
    """All rounds of one loader."""

    name: str
    """The name of the loader."""
    rounds: tuple[Round, ...]
    """The rounds in the order in which they ran."""

    @property
    def rates(self) -> list[float]:
        """The samples per second of each round."""
        return [each.samples_per_s for each in self.rounds]

    @property
    def samples_per_s(self) -> float:
        return statistics.median(self.rates)

    @property
    def bytes_per_s(self) -> float:
        return statistics.median(each.bytes_per_s for each in self.rounds)

    @property
    def first_batch_s(self) -> float:
        return statistics.median(each.first_batch_s for each in self.rounds)

    @property
    def peak_growth_bytes(self) -> int | None:
        peaks = [each.peak_growth_bytes for each in self.rounds if each.peak_growth_bytes is not None]
        return max(peaks) if peaks else None

    def as_json(self) -> dict[str, Any]:
        rounds = [asdict(each) | {"samples_per_s": each.samples_per_s} for each in self.rounds]
        for each in rounds:
            del each["order"]
        return {
            "samples_per_s": self.samples_per_s,
            "bytes_per_s": self.bytes_per_s,
            "first_batch_s": self.first_batch_s,
            "peak_growth_bytes": self.peak_growth_bytes,
            "rounds": rounds,
        }


@dataclass(frozen=True, kw_only=True)
class LoaderComparison:
    """torch's loader and penstock's over the same samples."""

    torch: LoaderResult
    """torch.utils.data.DataLoader."""
    penstock: LoaderResult
    """penstock.DataLoader."""

    @property
    def same_samples(self) -> bool | None:
        """Whether both loaders delivered the same samples in the same order, up to the end of the shorter run; None if
        unknown."""
        orders = [
            each.order for result in (self.torch, self.penstock) for each in result.rounds if each.order is not None
        ]
        if not orders:
            return None
        shortest = min(len(order) for order in orders)
        return shortest > 0 and len({order[:shortest] for order in orders}) == 1

    def as_json(self) -> dict[str, Any]:
        return {
            "loaders": {result.name: result.as_json() for result in (self.torch, self.penstock)},
            "same_samples": self.same_samples,
            "verdict": self.verdict(),
        }

    def verdict(self) -> str:
        """The comparison in one sentence."""
        speed = _compare(self.penstock.rates, self.torch.rates)
        first = _compare(
            [each.first_batch_s for each in self.penstock.rounds],
            [each.first_batch_s for each in self.torch.rounds],
        )
        alike = "no clear difference in samples per second" if self.is_unclear else "about as many samples per second"
        parts = [
            f"{speed:.2g} times the samples per second" if speed else alike,
            _first_batch_words(first),
        ]
        ours, theirs = self.penstock.peak_growth_bytes, self.torch.peak_growth_bytes
        if ours is not None and theirs is not None:
            parts.append(f"memory growth of {format_bytes(ours)} against {format_bytes(theirs)}")
        same = {None: "", True: " the same samples with", False: " DIFFERENT samples with"}[self.same_samples]
        *most, last = parts
        more = ""
        if self.is_unclear:
            more = (
                f" The rounds of one loader differ by up to {100 * self.spread:.0f}%: make the rounds longer, or run "
                "more rounds."
            )
        return f"Compared with torch's DataLoader, penstock delivered{same} {', '.join(most)} and {last}.{more}"

    @property
    def is_unclear(self) -> bool:
        """Whether rounds of the two loaders overlap although their medians differ much: the rounds are too few or too
        short."""
        ours, theirs = self.penstock.rates, self.torch.rates
        slower, faster = sorted((statistics.median(ours), statistics.median(theirs)))
        return _compare(ours, theirs) is None and faster > slower * (1 + UNCLEAR_FRACTION)

    @property
    def spread(self) -> float:
        """How much faster the fastest round of a loader is than its slowest round, as a share of the slowest."""
        return max(max(each.rates) / max(min(each.rates), 1e-9) for each in (self.penstock, self.torch)) - 1


def _first_batch_words(ratio: float | None) -> str:
    if ratio is None:
        return "a first batch about as soon"
    return f"a first batch {1 / ratio:.2g} times as soon" if ratio < 1 else f"a first batch {ratio:.2g} times as late"


def _compare(ours: list[float], theirs: list[float]) -> float | None:
    """The ratio of the medians; None if the rounds overlap or the medians differ by less than ``ALIKE_FRACTION``."""
    ratio = statistics.median(ours) / statistics.median(theirs)
    apart = min(ours) > max(theirs) or max(ours) < min(theirs)
    return ratio if apart and abs(ratio - 1) > ALIKE_FRACTION else None
