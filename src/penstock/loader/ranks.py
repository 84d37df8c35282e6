"""How many ranks of the training share this node and divide its memory.

In:  environment variables of launchers, torch.distributed, other processes of the node.
Out: a number, found without a request to the other ranks, which may never answer.
Runs in: trainer.
"""

from __future__ import annotations

import multiprocessing
import os

import psutil
import torch.distributed

from penstock.environment import is_one_node, local_ranks


def ranks_here() -> int:
    """The number of ranks on this node, this process included; 1 if the training has a single process."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return local_ranks()
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    return min(world, local_ranks(_unlaunched(world), world=world, rank=rank))


def _unlaunched(world: int) -> int:
    """The number of ranks on this node if no launcher set variables, as with ``torch.multiprocessing.spawn``."""
    if is_one_node():
        return world
    # Ranks that one process has started are its children, and all ranks exist once torch.distributed runs.
    return min(world, _siblings()) if multiprocessing.parent_process() is not None else 1


def _siblings() -> int:
    """The number of processes that have this process's parent and run the same program, this process included."""
    try:
        here = psutil.Process()
        beside = psutil.Process(os.getppid()).children()
        return max(1, sum(process.name() == here.name() for process in beside))
    except psutil.Error:
        return 1
