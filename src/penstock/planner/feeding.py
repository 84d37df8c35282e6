"""Is loading the bottleneck? The time spent waiting for data is compared with the time spent computing.

In:  the times of a loader, and the times of the training step that the loader feeds, if there is a step.
Out: ``Feeding``, and its verdict in words.
Runs in: anywhere; pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.formatting import rate

FED, STARVED = 0.05, 0.20
"""Shares of the time spent waiting. Below the first share loading is not the bottleneck; above the second share it
is."""


@dataclass(frozen=True, kw_only=True)
class Feeding:
    """A training loop and the loader that feeds it."""

    batch_size: int
    batches: int
    wait_s: float
    """The time in next() for all batches together."""
    compute_s: float
    """The time in the training step for all batches together; 0 without a step."""
    most_samples_per_s: float
    """Samples per second that the loader delivers to a loop without a training step."""
    gpu_use: float | None = None
    """The share of the time in which the GPU computed; None if unknown."""

    @property
    def samples_per_s(self) -> float:
        return self.batches * self.batch_size / max(1e-9, self.wait_s + self.compute_s)

    @property
    def wait_fraction(self) -> float | None:
        """The share of the time spent waiting for data; None without a training step."""
        return self.wait_s / (self.wait_s + self.compute_s) if self.compute_s else None

    @property
    def fed_step_s(self) -> float:
        """The shortest training step that never waits for data."""
        alone_s = self.batch_size / max(1e-9, self.most_samples_per_s)
        waited = self.wait_fraction
        if waited is None or waited < FED:
            return alone_s
        # The loader is slower while the step runs, because both share the cores.
        return max(alone_s, (self.wait_s + self.compute_s) / self.batches)

    def verdict(self) -> str:
        words = self._verdict()
        return words if self.gpu_use is None else f"{words} The GPU computed {self.gpu_use:.0%} of the time."

    def _verdict(self) -> str:
        waited = self.wait_fraction
        every = _time(self.fed_step_s)
        # A loader that was timed alone, at another moment, may have been slower than with the step.
        most_samples_per_s = max(self.most_samples_per_s, self.samples_per_s)
        if waited is None:
            return (
                f"The loader delivers {rate(self.most_samples_per_s)} samples/s, a batch of {self.batch_size} every "
                f"{every}: a training step of {every} or longer does not wait for data, but a shorter step does."
            )
        wait_ms, step_ms = _time(self.wait_s / self.batches), _time(self.compute_s / self.batches)
        numbers = (
            f"each batch takes {wait_ms} of waiting for data ({waited:.0%}) and {step_ms} of computing "
            f"({1 - waited:.0%}), at {rate(self.samples_per_s)} samples/s"
        )
        if waited < FED:
            spare = most_samples_per_s / max(1e-9, self.samples_per_s)
            return (
                f"Loading is not the bottleneck: {numbers}. The loader could deliver "
                f"{rate(most_samples_per_s)} samples/s, {spare:.2g} times as many."
            )
        if waited < STARVED:
            return f"Loading costs a little time: {numbers}. A step of {every} or longer would never wait."
        return (
            f"Loading is the bottleneck: {numbers}. The step alone could process "
            f"{rate(self.batches * self.batch_size / self.compute_s)} samples/s, but the loader alone "
            f"delivers at most {rate(most_samples_per_s)}."
        )


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
