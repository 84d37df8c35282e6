"""Rules about a running training: what to lower when memory runs out, and what each change would free.

In:  figures of the run; each loader's settings and their names in the user's own settings file.
Out: one ``Finding``.
Runs in: trainer; pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.findings import Finding
from penstock.monitor.figures import part
from penstock.units import GIB, MIB, format_bytes

CALM_BELOW = 0.05
"""How far below the threshold memory must fall before the next warning; the advice aims for that level."""
_WORTH_BYTES = 4 * MIB


@dataclass(frozen=True, kw_only=True)
class AdvisedLoader:
    """A loader whose memory could be lowered."""

    name: str
    is_only: bool
    configuration: Mapping[str, Any]
    keys: Mapping[str, str]
    """Argument -> its name in the user's own settings."""

    def key(self, argument: str) -> str:
        key = self.keys.get(argument, argument)
        return key if self.is_only else f"{key} of {self.name}"

    def size(self, argument: str, count: float) -> str:
        """As the user would write it under the argument's key: those that end in _GB are numbers of GiB."""
        in_gib = self.keys.get(argument, argument).upper().endswith("_GB")
        return f"{count / GIB:.3g}" if in_gib else format_bytes(count)


@dataclass(frozen=True, kw_only=True)
class Move:
    """One setting to lower."""

    what: str
    frees_bytes: float
    valve: str | None
    """The same change for ``penstock set``; None: a running loader cannot make it."""


def memory_full(
    figures: Mapping[str, float], loaders: Sequence[AdvisedLoader], *, warn_at: float, run_id: str | None
) -> Finding:
    """The finding for memory above ``warn_at``; ``warning_text`` is its form for the log."""
    used, limit = figures["used_bytes"], max(1.0, figures["limit_bytes"])
    excess = max(used - (warn_at - CALM_BELOW) * limit, 0.01 * limit)
    what = (
        f"memory is {used / limit:.1%} full ({format_bytes(used)} of {format_bytes(limit)}, warning at "
        f"{warn_at:.0%}); this training takes {format_bytes(figures.get('tree_bytes', 0.0))}"
    )
    found = [
        move for number, each in enumerate(loaders) for move in moves(each, part(figures, f"loader.{number}"), excess)
    ]
    found.sort(key=lambda move: -move.frees_bytes)
    if not found:
        trainer = format_bytes(figures.get("trainer_bytes", 0.0))
        what = f"{what}. The loaders hold little memory: the training process itself takes {trainer}"
        fix = "lower batch_size, keep fewer tensors between steps, or stop other programs"
        return Finding(id="memory-full", severity="warning", what=what, fix=fix)
    lines = [f"lower {move.what}: frees about {format_bytes(move.frees_bytes)}" for move in found]
    valve = next((move.valve for move in found if move.valve), None)
    if run_id is not None and valve is not None:
        lines.append(f"now, while the training runs: penstock set {run_id} {valve}")
    return Finding(id="memory-full", severity="warning", what=what, fix="\n".join(lines))


def warning_text(finding: Finding) -> str:
    """A finding for the log: the fact, and a line for each change."""
    lines = finding.fix.splitlines()
    if len(lines) < 2:
        return f"WARNING: {finding.what}; {finding.fix}"
    return "\n".join([f"WARNING: {finding.what}.", *(f"   {line}" for line in lines)])


def moves(loader: AdvisedLoader, figures: Mapping[str, float], excess_bytes: float) -> list[Move]:
    """The settings of one loader that could be lowered: each by as much as is needed, at most by half."""
    found = [
        _fewer_workers(loader, figures, excess_bytes),
        _less_ahead(loader, figures, excess_bytes),
        _smaller_cache(loader, figures, excess_bytes),
    ]
    return [move for move in found if move is not None and move.frees_bytes >= _WORTH_BYTES]


def _fewer_workers(loader: AdvisedLoader, figures: Mapping[str, float], excess_bytes: float) -> Move | None:
    workers = int(figures.get("workers", 0))
    each = figures.get("workers_private_bytes", 0.0) / max(1, workers)
    if workers < 2 or not each:
        return None
    fewer = max(1, workers // 2, workers - math.ceil(excess_bytes / each))
    return Move(
        what=f"{loader.key('num_workers')} from {workers} to {fewer}",
        frees_bytes=(workers - fewer) * each,
        valve=_valve(loader, f"workers={fewer}"),
    )


def _less_ahead(loader: AdvisedLoader, figures: Mapping[str, float], excess_bytes: float) -> Move | None:
    depth, workers = int(figures.get("depth", 0)), int(figures.get("workers", 0))
    batch = figures.get("in_flight_bytes", 0.0) / (depth + 1)
    if depth < 2 or not batch:
        return None
    less = max(1, depth // 2, depth - math.ceil(excess_bytes / batch))
    factor = loader.configuration.get("prefetch_factor")
    if loader.configuration.get("depth") is None and factor and workers and factor > 1:
        fewer = max(1, math.ceil(less / workers))
        if fewer < factor and fewer * workers < depth:
            return Move(
                what=f"{loader.key('prefetch_factor')} from {factor} to {fewer}",
                frees_bytes=(depth - fewer * workers) * batch,
                valve=_valve(loader, f"depth={fewer * workers}"),
            )
    return Move(
        what=f"depth (batches ahead{'' if loader.is_only else ' of ' + loader.name}) from {depth} to {less}",
        frees_bytes=(depth - less) * batch,
        valve=_valve(loader, f"depth={less}"),
    )


def _smaller_cache(loader: AdvisedLoader, figures: Mapping[str, float], excess_bytes: float) -> Move | None:
    has, limit = figures.get("cache_bytes", 0.0), figures.get("cache_limit_bytes", 0.0)
    if not has:
        return None
    smaller = max(has / 2, has - excess_bytes)
    return Move(
        what=f"{loader.key('cache')} from {loader.size('cache', limit)} to {loader.size('cache', smaller)}",
        frees_bytes=has - smaller,
        valve=None,
    )


def _valve(loader: AdvisedLoader, words: str) -> str:
    return words if loader.is_only else f"{words} loader={loader.name!r}"
