"""GPU memory beside the host's, for `penstock explain --model`.

In:  a MODEL, the loader's batch size.
Out: ``GpuSide``: estimates at half, once and twice that batch size, for the page, JSON and the picture.
Runs in: command line; imports torch.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.cli.gpu.model import Model, load_model, memory_here

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.gpu import Estimate


@dataclass(frozen=True, kw_only=True)
class GpuSide:
    """What training the model takes on a GPU."""

    model: Model
    estimates: list[Estimate]
    memory_bytes: int | None
    """What the card has; None: not known."""

    def show(self, console: Console) -> None:
        from penstock.cli.gpu.view import show_estimates, show_picture

        show_estimates(console, self.model, self.estimates, self.memory_bytes)
        show_picture(console, self.model.name, self.estimates, self.memory_bytes)

    def svg(self) -> str:
        from penstock.cli.gpu.view import chart_of

        return chart_of(self.model.name, self.estimates, self.memory_bytes).svg()

    def as_json(self) -> dict[str, Any]:
        from penstock.cli.gpu.view import how_trained

        return {
            "model": self.model.name,
            "training": how_trained(self.model),
            "memory_bytes": self.memory_bytes,
            "estimates": [asdict(each) for each in self.estimates],
        }


def estimate_beside(name: str, batch_size: int, memory_bytes: int | None, **training: Any) -> GpuSide:
    """``training``: the options of ``training_options``."""
    # What the user's code prints must not end up in the answer.
    with contextlib.redirect_stdout(sys.stderr):
        model = load_model(name, **training)
        from penstock import gpu

        memory_bytes = memory_bytes or memory_here()
        sizes = sorted({max(1, batch_size // 2), batch_size, 2 * batch_size})
        estimates = gpu.estimate(**model.training, batch_sizes=sizes, device_memory=memory_bytes)
    return GpuSide(model=model, estimates=estimates, memory_bytes=memory_bytes)
