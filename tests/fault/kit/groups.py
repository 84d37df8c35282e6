"""Full memory: real control groups that kill.

In:  a limit in bytes.
Out: a group to start a training in.
Runs in: test process, as root.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from test_meter_for_real import control_group, enter, limit_memory

__all__ = ["control_group", "enter", "limit_memory"]
