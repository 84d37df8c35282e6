"""Whether autograd holds the only reference to a gradient it adds another to.

In:  a tensor as a dispatch mode sees it.
Out: yes or no.
Runs in: the tracing thread.

Where two gradients of one tensor meet, autograd adds the second into the first, in place, if nobody else holds the
first. While any dispatch mode is on it does not, and every such sum would be counted as a new allocation. How many
references a tensor has inside a mode when autograd alone holds it differs between versions of torch: it is measured.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def references(tensor: torch.Tensor) -> tuple[int, int]:
    """To the tensor, and to its storage."""
    count = getattr(tensor, "_use_count", None)
    storage = tensor.untyped_storage()
    return (count() if count is not None else 0, torch._C._storage_Use_Count(storage._cdata))  # type: ignore[attr-defined]


class _Probe(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and torch._C._current_graph_task_id() != -1:
            self.seen.append(references(args[0]))
        return func(*args, **(kwargs or {}))


@cache
def alone() -> tuple[int, int] | None:
    """References seen when autograd alone holds a gradient; None where torch does not tell."""
    probe = _Probe()
    tensor = torch.empty(8, device="meta", requires_grad=True)
    with probe:
        shared = tensor * 2
        (torch.sin(shared) + torch.cos(shared)).backward(torch.empty(8, device="meta"))
    return probe.seen[0] if len(probe.seen) == 1 and probe.seen[0][0] else None
