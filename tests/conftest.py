"""For all tests: random input is the same in every run, and ``support`` can be imported in every process they start."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# Slow examples are slow because of what is tested; no example fails for its time or its size.
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example]
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None, suppress_health_check=_SLOW)
settings.load_profile("repeatable")

# pytest's own ``pythonpath`` reaches this process and the workers it forks or spawns, not the scripts it runs.
_TESTS = str(Path(__file__).parent)
_INHERITED = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder and folder != _TESTS]
os.environ["PYTHONPATH"] = os.pathsep.join([*_INHERITED, _TESTS])
