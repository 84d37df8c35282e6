"""The examples run and print the results that they describe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_latents_pipeline_shows_what_a_batch_ahead_costs() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "latents_pipeline.py"), "--batches", "20", "--json"],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    two, one = (result["growth_bytes"] / answer["batch_bytes"] for result in answer["results"])
    # With two workers the count varies by two batches.
    assert 1 <= two - one <= 3, (two, one)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_files_read_straight_into_batches_arrive_as_they_were_written(workers: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "read_into_batches.py"), "--samples", "40", "--workers", workers],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "40 samples of 4 MiB, all as they were written\n"
