"""A loader for the monitor: its gauges, its settings, its valves.

In:  a ``penstock.DataLoader``, an object that has such a loader as ``dataloader``, or torch's own DataLoader.
Out: counters and memory now; the present configuration; valves turned, or refused with the reason.
Runs in: trainer, mostly in the monitor's thread.

The reference is weak: when the training drops the loader, its workers must end.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.loader import gauges
from penstock.units import format_bytes, parse_size

MOST_WORKERS = 256
MOST_DEPTH = 4096
_ARGUMENTS = ("batch_size", "num_workers", "prefetch_factor", "memory", "pin_memory", "persistent_workers", "drop_last",
              "seeding", "backend", "in_order", "timeout")  # fmt: skip
_VALVES = ("workers", "depth", "memory")


class LoaderSample(NamedTuple):
    """A loader at one moment. None means unknown, as for torch's DataLoader."""

    samples: int | None
    wait_s: float | None
    is_iterating: bool
    figures: dict[str, float]
    """The figures that ``figures.FIGURES`` calls ``loader.N.…``, without this prefix and without rates."""
    cache_key: str | None
    """The name of the loader's cache, which several loaders may share."""


_NOTHING = LoaderSample(None, None, False, {}, None)


class WatchedLoader:
    def __init__(self, loader: Any, number: int, *, is_only: bool) -> None:
        loader = _inner(loader)
        self._ref = weakref.ref(loader)
        self.is_penstock = hasattr(loader, "stats") and hasattr(loader, "resize")
        self.name = str(getattr(loader, "name", None) or ("loader" if is_only else f"loader {number}"))
        self.number = number
        self._last = _NOTHING
        self._restarts = 0

    @property
    def loader(self) -> Any:
        """The loader; None once it no longer exists."""
        return self._ref()

    # -- gauges -----------------------------------------------------------------------------

    def read(self) -> LoaderSample:
        loader = self.loader
        if loader is None:
            # The loader no longer exists: its counters stay, its memory is freed.
            gone = {name: value for name, value in self._last.figures.items() if not name.endswith("_bytes")}
            return self._last._replace(figures={**gone, "workers": 0.0, "depth": 0.0}, is_iterating=False)
        if not self.is_penstock:
            workers = float(getattr(loader, "num_workers", 0) or 0)
            depth = workers * (getattr(loader, "prefetch_factor", None) or 0)
            return LoaderSample(None, None, False, {"workers": workers, "depth": float(depth)}, None)
        try:
            stats = loader.stats()
        except RuntimeError:
            # An iteration began while its gauges were read.
            return self._last
        wait_s = gauges.waited_s(loader)
        figures = {
            "samples": stats.samples, "batches": stats.batches, "workers": stats.workers, "depth": stats.depth,
            "in_flight_bytes": stats.in_flight_bytes, "lent_bytes": stats.lent_bytes,
            "workers_private_bytes": stats.workers_private_bytes, "budget_bytes": stats.memory_bytes,
            "worker_restarts": stats.worker_restarts, "wait_s": wait_s, "fetch_s": stats.stages.fetch_s,
            "collate_s": stats.stages.collate_s,
        }  # fmt: skip
        if stats.device_ahead_bytes:
            figures["device_ahead_bytes"] = stats.device_ahead_bytes
        key = None
        if stats.cache is not None:
            key = gauges.cache_name(loader)
            figures |= {
                "cache_bytes": stats.cache.bytes, "cache_limit_bytes": stats.cache.limit_bytes,
                "cache_hits": stats.cache.hits, "cache_misses": stats.cache.misses,
            }  # fmt: skip
        as_floats = {name: float(value) for name, value in figures.items()}
        self._last = LoaderSample(stats.samples, wait_s, gauges.is_iterating(loader), as_floats, key)
        return self._last

    def workers(self) -> list[dict[str, Any]]:
        """Each worker and its present activity."""
        loader = self.loader
        return [asdict(each) for each in gauges.workers_now(loader)] if self.is_penstock and loader is not None else []

    def new_endings(self, restarts: int) -> list[str]:
        """How the workers that were replaced since the last call had ended; ``restarts`` is the number of all workers
        that were ever replaced."""
        new, self._restarts = restarts - self._restarts, restarts
        loader = self.loader
        if new <= 0 or loader is None:
            return []
        known = gauges.recent_crashes(loader, new)
        return [f"{new - len(known)} workers crashed", *known] if len(known) < new else known

    # -- settings ---------------------------------------------------------------------------

    @property
    def facts(self) -> dict[str, Any]:
        """Name and arguments, for the record."""
        loader = self.loader
        arguments = {name: _plain(getattr(loader, name)) for name in _ARGUMENTS if hasattr(loader, name)}
        dataset = getattr(loader, "dataset", None)
        kind = "penstock" if self.is_penstock else "torch"
        # The plan of num_workers="auto", which the report compares with the measurements.
        plan = gauges.plan_of(loader) if self.is_penstock and loader is not None else None
        return {
            "name": self.name,
            "kind": kind,
            "dataset": type(dataset).__name__,
            "dataset_length": _length_of(dataset),
            "arguments": arguments,
            "keys": dict(self.keys),
            "prediction": None if plan is None else asdict(plan),
        }

    @property
    def keys(self) -> Mapping[str, str]:
        """Argument -> its name in the user's own settings."""
        loader = self.loader
        keys = gauges.settings_keys(loader) if self.is_penstock and loader is not None else {}
        return {argument: key for argument, key in keys.items() if not key.startswith("(")}

    @property
    def configuration(self) -> dict[str, Any]:
        """Settings that affect speed and memory, as set by the user or a valve. None: unset."""
        loader = self.loader
        if loader is None:
            return {}
        return {
            "workers": getattr(loader, "num_workers", None),
            "depth": gauges.depth_as_set(loader) if self.is_penstock else None,
            "prefetch_factor": getattr(loader, "prefetch_factor", None),
            "memory": _plain(getattr(loader, "memory", None)),
            "batch_size": getattr(loader, "batch_size", None),
            "cache_bytes": int(self._last.figures.get("cache_limit_bytes", 0)) or None,
        }

    # -- valves -----------------------------------------------------------------------------

    def turn(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Set workers, depth and memory; if one value is refused, none is set. Returns the values now in force.

        Raises ConfigError with the reason.
        """
        loader = self.loader
        if loader is None:
            raise ConfigError(f"{self.name} no longer exists: the training has dropped it")
        if not self.is_penstock:
            raise ConfigError(f"{self.name} is torch's own DataLoader, which cannot be changed while it runs")
        unknown = [name for name in wanted if name not in _VALVES]
        if unknown or not wanted:
            raise ConfigError(f"{', '.join(unknown) or 'nothing'} cannot be set; write one of {', '.join(_VALVES)}")
        workers = _count(wanted, "workers", least=0, most=MOST_WORKERS)
        depth = _count(wanted, "depth", least=1, most=MOST_DEPTH)
        if "memory" in wanted:
            _check_memory(wanted["memory"])
        if workers is not None or depth is not None:
            loader.resize(workers=workers, depth=depth)
        if "memory" in wanted:
            loader.set_memory(wanted["memory"])
        stats = loader.stats()
        as_set, ceiling = gauges.depth_as_set(loader), gauges.depth_ceiling(loader)
        now = {
            "loader": self.name,
            "workers": stats.workers,
            "depth": stats.depth if as_set is None else min(as_set, ceiling or as_set),
            "memory_bytes": stats.memory_bytes,
        }
        if depth is not None and now["depth"] < depth:
            now["remark"] = f"prefetch_factor={loader.prefetch_factor} allows no more than {ceiling} batches ahead"
        if workers is not None and gauges.awaits_next_epoch(loader):
            now["remark"] = (
                "the workers change when the next epoch begins, because batches of this dataset belong to workers"
            )
        return now


def _check_memory(wanted: Any) -> None:
    from penstock.meter import limits

    size, allowed = parse_size(wanted), limits().memory_limit_bytes
    if size.fixed_bytes is not None and size.fixed_bytes > allowed:
        raise ConfigError(
            f"memory={wanted} is more than the {format_bytes(allowed)} available here; the training would be killed"
        )


def _count(wanted: Mapping[str, Any], name: str, *, least: int, most: int) -> int | None:
    if name not in wanted:
        return None
    value = wanted[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name}={value!r} is not a whole number from {least} to {most}")
    return value


def _inner(loader: Any) -> Any:
    """The penstock or torch loader, which an integration may wrap."""
    inner = getattr(loader, "dataloader", None)
    return inner if inner is not None and hasattr(inner, "num_workers") else loader


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:
        # The code of the user's dataset may raise anything; then the length is unknown.
        return None
