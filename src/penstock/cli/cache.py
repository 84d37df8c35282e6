"""`penstock cache`: this user's caches in this node's memory, and caches on disk.

In:  names of caches, folders of disk caches.
Out: a table or JSON; cleared caches, released memory.
Runs in: command line. Does not import torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from penstock.cli.options import echo
from penstock.errors import CacheError
from penstock.formatting import counted
from penstock.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class ListedCache:
    """One cache, live or stale."""

    name: str
    """The cache's name, or the folder of a cache on disk."""
    state: str
    """live, stale (its processes have ended), elsewhere (only processes of other containers have it open), or disk."""
    pids: list[int]
    figures: dict[str, int | float]
    """The figures of the cache; empty for a stale cache, whose memory ended with its processes."""


@click.group()
def command() -> None:
    """Show and clear caches: those in this node's memory, by name, and those on disk, by folder."""


@command.command("list")
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path))
@click.option("--json", "json_wanted", is_flag=True, help="Print one JSON array.")
def list_caches(folders: tuple[Path, ...], json_wanted: bool) -> None:
    """List this user's caches on this node, stale ones included, and the disk caches in FOLDERS."""
    _show([*_in_memory(), *(_on_disk(folder) for folder in folders)], json_wanted)


@command.command()
@click.argument("name")
@click.option("--json", "json_wanted", is_flag=True, help="Print one JSON object.")
def stats(name: str, json_wanted: bool) -> None:
    """Show the figures of the cache NAME, or of the disk cache in the folder NAME."""
    found = _find(name)
    if json_wanted:
        echo(json.dumps(asdict(found), indent=2))
        return
    echo(f"[{found.name}] {found.state}" + (f", processes {_joined(found.pids)}" if found.pids else ""))
    for word, value in found.figures.items():
        shown = f"{value:.2%}" if word == "hit_rate" else format_bytes(value) if word.endswith("bytes") else value
        echo(f"  - {word}: {shown}")


@command.command()
@click.argument("names", nargs=-1)
@click.option("--stale", is_flag=True, help="Remove the files that caches of ended processes left behind.")
def clear(names: tuple[str, ...], stale: bool) -> None:
    """Remove every value from the caches NAMES (or disk caches in folders NAMES); trainings that use them continue."""
    from penstock.cache import registry

    if not names and not stale:
        raise click.UsageError("give the names of caches to clear, or --stale")
    for name in names:
        found = _find(name)
        if found.state == "stale":
            stale = True
            continue
        if found.state == "elsewhere":
            raise CacheError(f"only processes of another container have {name!r} open; clear it in that container")
        _clear(found)
        echo(f"cleared {found.name}: {counted(found.figures['items'], 'item')}, {format_bytes(found.figures['bytes'])}")
    if stale:
        gone = registry.remove_stale()
        echo(f"removed {counted(len(gone), 'stale cache')}" + (f": {', '.join(gone)}" if gone else ""))


def _in_memory() -> list[ListedCache]:
    from penstock.cache import registry

    listed = []
    for name, members in registry.listed().items():
        here = [each for each in members if each.is_here]
        region = registry.visit(name, locks=False) if here else None
        figures = {} if region is None else _figures(region)
        if region is not None:
            region.close()
        state = "live" if here else "elsewhere" if members else "stale"
        listed.append(ListedCache(name=name, state=state, pids=sorted({each.pid for each in here}), figures=figures))
    return listed


def _on_disk(folder: Path) -> ListedCache:
    from penstock.cache.store import disk

    if not _is_disk_cache(folder):
        raise CacheError(f"there is no disk cache in {str(folder)!r}")
    with disk.visit(folder) as (region, _):
        return ListedCache(name=str(folder), state="disk", pids=[], figures=_figures(region))


def _is_disk_cache(folder: Path) -> bool:
    try:
        return (folder / "cache.index").exists()
    except OSError as refused:
        raise CacheError(f"{folder} cannot be read: {refused.strerror}") from None


def _find(name: str) -> ListedCache:
    found = next((each for each in _in_memory() if each.name == name), None)
    if found is not None:
        return found
    if _is_disk_cache(Path(name)):
        return _on_disk(Path(name))
    known = ", ".join(each.name for each in _in_memory()) or "none"
    raise CacheError(
        f"there is no cache called {name!r} on this node, and no disk cache in a folder of that name; "
        f"known caches: {known}"
    )


def _clear(found: ListedCache) -> None:
    from penstock.cache import registry
    from penstock.cache.store import disk
    from penstock.cache.store.store import Store

    if found.state == "disk":
        with disk.visit(Path(found.name)) as (region, is_alone):
            store = Store(region, {}, headroom_bytes=int)
            if is_alone:
                store.begin()
            store.clear()
        return
    region = registry.visit(found.name, locks=True)
    if region is not None:
        Store(region, {}, headroom_bytes=int).clear()
        region.close()


def _figures(region: Any) -> dict[str, int | float]:
    figures = region.counts()
    lookups = figures["hits"] + figures["misses"]
    return {**figures, "hit_rate": figures["hits"] / lookups if lookups else 0.0}


def _show(listed: list[ListedCache], json_wanted: bool) -> None:
    if json_wanted:
        echo(json.dumps([asdict(each) for each in listed], indent=2))
        return
    from penstock.cli.console import make_console, make_grid

    if not listed:
        from penstock.cache import registry

        echo(f"no caches on this node are listed in {registry.folder()}")
        return
    grid = make_grid("bold", "", "", "", "", "")
    grid.add_row("cache", "state", "items", "memory", "hit rate", "processes")
    for each in listed:
        figures = each.figures
        row = ["", "", ""]
        if figures:
            memory = f"{format_bytes(figures['bytes'])} of {format_bytes(figures['limit_bytes'])}"
            row = [str(figures["items"]), memory, f"{figures['hit_rate']:.2%}"]
        grid.add_row(each.name, each.state, *row, _joined(each.pids))
    make_console().print(grid)


def _joined(pids: list[int]) -> str:
    return ", ".join(map(str, pids))
