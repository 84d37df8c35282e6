"""Memory of another process and all its descendants, by kind.

In:  /proc/<pid>/smaps_rollup of the tree.
Out: the peak of the PSS, and its part in mapped files.
Runs in: the harness, in a thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from peak import Peak, read_tree

_MOST_DUTY = 0.2


@dataclass(frozen=True, kw_only=True)
class TreePss:
    """PSS of a tree at one moment."""

    total_bytes: int
    file_bytes: int
    """Its part in mapped files (libraries). It changes when other processes that map the same files start or end."""
    processes: int


def tree_pss(root: int) -> TreePss:
    """Sum over ``root`` and its descendants."""
    each = list(read_tree(root, "smaps_rollup"))
    return TreePss(
        total_bytes=1024 * sum(process.get("Pss", 0) for process in each),
        file_bytes=1024 * sum(process.get("Pss_File", 0) for process in each),
        processes=len(each),
    )


class Watch(Peak[TreePss]):
    """Keeps the peak from ``__enter__`` to ``__exit__``."""

    def __init__(self, root: int) -> None:
        super().__init__(lambda: tree_pss(root), lambda now: now.total_bytes, most_duty=_MOST_DUTY)

    @property
    def file_growth_bytes(self) -> int:
        """The part of the growth in mapped files. More than a few MiB come from other processes."""
        return self.peak.file_bytes - self.start.file_bytes
