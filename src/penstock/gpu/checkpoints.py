"""Gradient checkpointing switched on in a model that was built without it.

In:  a model.
Out: the same model; its blocks keep their inputs only and compute the rest again in the backward pass.
Runs in: trainer, command line.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from penstock.errors import ConfigError


def switch_on(model: torch.nn.Module) -> None:
    """By the model's own switch (transformers, diffusers), else around each of its repeated blocks."""
    for name in ("gradient_checkpointing_enable", "enable_gradient_checkpointing"):
        own = getattr(model, name, None)
        if callable(own):
            own()
            return
    blocks = repeated_blocks(model)
    if not blocks:
        raise ConfigError(
            f"checkpointing=True: {type(model).__name__} has no switch of its own and no list of like blocks to "
            f"checkpoint; call torch.utils.checkpoint inside the model that make_model returns"
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Members of every list of two or more modules of one class, outermost first; what is inside them is left."""
    found: list[torch.nn.Module] = []
    inside: set[torch.nn.Module] = set()
    for module in model.modules():
        if module in inside or not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
            continue
        members = list(module)
        if len(members) > 1 and len({type(member) for member in members}) == 1 and any(members[0].children()):
            found += members
            for member in members:
                inside.update(member.modules())
    return found
