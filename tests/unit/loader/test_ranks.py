"""How many ranks of a training share the node: found without asking the other ranks."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from penstock.loader.ranks import ranks_here

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fork")


def be_rank(rank: int, meeting_place: str, variables: dict[str, str], found: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=2)
        found.put(ranks_here())
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("variables", [{}, {"MASTER_ADDR": "localhost"}], ids=["spawned", "one address"])
def test_ranks_that_no_launcher_counts_are_counted(variables: dict[str, str], tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    ranks = [context.Process(target=be_rank, args=(n, str(tmp_path / "meet"), variables, found)) for n in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert [found.get() for _ in ranks] == [2, 2]


def test_a_training_of_one_process_has_its_node_alone() -> None:
    assert ranks_here() == 1
