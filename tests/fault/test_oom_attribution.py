"""A sample that eats all memory of its container is named, with the limit; one that does so once costs a retry."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.units import format_bytes
from support.faults.control_groups import control_group, enter, limit_memory
from support.faults.processes import until

MIB = 1 << 20

pytestmark = [
    pytest.mark.soak,
    pytest.mark.root,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="control groups"),
    pytest.mark.xdist_group("budget for real"),
]

TRAINING = """
import json, os, sys, time, warnings
import torch
import penstock
from support.datasets.faulty import Hungry
warnings.simplefilter("ignore")
torch.set_num_threads(1)
"""
LOOP = """
loader = penstock.DataLoader({dataset}, batch_size=8, num_workers={workers}, shuffle={shuffle}, timeout=60{more})
came = 0
error = None
try:
    for batch in loader:
        came += 1
except penstock.WorkerError as caught:
    error = str(caught)
print(json.dumps({{"came": came, "error": error, "restarts": loader.stats().worker_restarts}}), flush=True)
"""


def train(group: Path, **scene: Any) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", TRAINING + LOOP.format(**{"shuffle": False, "workers": 2, "more": "", **scene})],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=enter(group),
        cwd="/",
        check=False,
    )
    # A fork server and its like leave a moment after the trainer, and a group that is not empty stays.
    until(lambda: not (group / "cgroup.procs").read_text())
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-1500:]}"
    return json.loads(done.stdout.splitlines()[-1])


LIMIT_BYTES = 900 * MIB


@pytest.mark.parametrize(
    "scene",
    [
        {"workers": 2},
        pytest.param({"workers": 1}, marks=pytest.mark.soak),
        pytest.param({"workers": 3, "shuffle": True}, marks=pytest.mark.soak),
        {"workers": 2, "more": ", collate_fn=list"},
        pytest.param({"workers": 2, "more": ', multiprocessing_context="forkserver"'}, marks=pytest.mark.soak),
    ],
    ids=["two workers", "one worker", "shuffled", "own collate", "forkserver"],
)
def test_a_sample_that_exhausts_the_memory_is_named_with_the_limit(scene: dict[str, Any]) -> None:
    with control_group("memory", "hungry") as (group,):
        limit_memory(group, LIMIT_BYTES)
        found = train(group, dataset="Hungry(400, 137)", **scene)
    print(found["error"])
    assert found["error"] is not None, found
    assert "index 137" in found["error"]
    assert "SIGKILL" in found["error"]
    assert "out-of-memory" in found["error"]
    assert format_bytes(LIMIT_BYTES) in found["error"]
    assert "lower num_workers, batch_size or memory=" in found["error"]


def test_a_sample_that_exhausts_the_memory_once_costs_a_retry(tmp_path: Path) -> None:
    with control_group("memory", "once") as (group,):
        limit_memory(group, LIMIT_BYTES)
        found = train(group, dataset=f"Hungry(400, 137, {str(tmp_path / 'eaten')!r})")
    assert found["error"] is None
    assert found["came"] == 50
    assert found["restarts"] >= 1
