"""The line that people grep for, and where it is heard."""

from __future__ import annotations

import logging
import re
import subprocess
import sys

import pytest

from penstock.monitor.log_line import log_line, say

LAYOUT = re.compile(
    r"\[[^]]+\] Memory - Process: \d+\.\dMB \(\d+\.\d%\), System: \d+\.\d/\d+\.\dGB \(\d+\.\d%\), "
    r"GPU: \d+\.\dMB allocated, \d+\.\dMB reserved(, .+)?"
)
MIB, GIB = 1 << 20, 1 << 30


def test_the_layout_is_the_one_the_teams_have_in_their_logs() -> None:
    figures = {
        "tree_bytes": 15678.9 * MIB, "used_bytes": 125.4 * GIB, "limit_bytes": 256.0 * GIB,
        "gpu_allocated_bytes": 8192.0 * MIB, "gpu_reserved_bytes": 9216.0 * MIB,
    }  # fmt: skip
    assert log_line("Step 100", figures) == (
        "[Step 100] Memory - Process: 15678.9MB (6.0%), System: 125.4/256.0GB (49.0%), "
        "GPU: 8192.0MB allocated, 9216.0MB reserved"
    )


def test_further_figures_follow_the_fixed_layout() -> None:
    line = log_line(
        "After dataset creation",
        {"limit_bytes": GIB, "samples_per_s": 812.34, "wait_fraction": 0.0321, "cache_hit_rate": 0.82454},
    )
    assert LAYOUT.fullmatch(line)
    assert line.endswith("reserved, Samples: 812.3/s, Wait: 3.2%, Cache hit rate: 82.45%")
    more = {"worker_restarts": 2.0, "cache_hit_rate": 0.5, "wait_fraction": 0.1, "steps_per_s": 3.14159}
    assert log_line("x", more).endswith("Steps: 3.14/s, Wait: 10.0%, Cache hit rate: 50.00%, Worker restarts: 2")
    assert log_line("x", {"worker_restarts": 0.0, "steps_per_s": 1.0, "samples_per_s": 2.0}).endswith("Samples: 2.0/s")


def test_a_line_without_figures_has_the_fixed_layout() -> None:
    assert LAYOUT.fullmatch(log_line("Start", {}))


def test_configured_logging_gets_the_line_at_its_level(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="penstock.monitor"):
        say(logging.INFO, "heard")
    with caplog.at_level(logging.WARNING, logger="penstock.monitor"):
        say(logging.INFO, "not asked for")
    assert [record.getMessage() for record in caplog.records] == ["heard"]


def test_without_logging_the_line_goes_to_stderr_and_with_it_appears_once() -> None:
    code = (
        "import logging, penstock; from penstock.monitor.log_line import say; say(20, 'first');"
        "logging.basicConfig(level=20, format='LOG %(message)s'); say(20, 'second');"
        "logging.getLogger().setLevel(30); say(20, 'third')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "first\nLOG second\n"
