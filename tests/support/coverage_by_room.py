"""Prints how much of each room of ``src/penstock`` the tests run.

In:  the JSON report of coverage.py on stdin.
Out: a line per room on stdout: statements, those that ran, and their share.
Runs in: a process of its own, started by ``make coverage``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import PurePath


def main() -> None:
    statements: Counter[str] = Counter()
    covered: Counter[str] = Counter()
    for name, measured in json.load(sys.stdin)["files"].items():
        parts = PurePath(name).parts
        below = parts[parts.index("penstock") + 1 :]
        room = below[0] if len(below) > 1 else "(top)"
        statements[room] += measured["summary"]["num_statements"]
        covered[room] += measured["summary"]["covered_lines"]
    print(f"{'room':<14}{'statements':>11}{'covered':>9}{'share':>8}")
    for room in sorted(statements):
        print(f"{room:<14}{statements[room]:>11,}{covered[room]:>9,}{covered[room] / max(1, statements[room]):>8.1%}")
    print(f"{'all':<14}{statements.total():>11,}{covered.total():>9,}{covered.total() / statements.total():>8.1%}")


if __name__ == "__main__":
    main()
