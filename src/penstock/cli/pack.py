"""`penstock pack`: a dataset rewritten into tar shards or memory-mappable Arrow files.

In:  a TARGET, a folder of files, Parquet files, tar shards or Arrow files; a folder to write to.
Out: shards and a manifest; what was done, as a line or JSON.
Runs in: command line; imports torch once it runs.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.signals import ctrl_c_on_request
from penstock.errors import ConfigError
from penstock.meter import Roots, limits
from penstock.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from penstock.data.pack.packing import PackResult


def _size(ctx: click.Context, parameter: click.Parameter, value: str) -> int:
    try:
        return parse_bytes(value, name="--shard-size")
    except ConfigError as wrong:
        raise click.BadParameter(str(wrong)) from None


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST", type=click.Path(file_okay=False, path_type=Path))
@click.option("--to", type=click.Choice(["arrow", "tar"]), default="arrow", show_default=True, help="What to write.")
@click.option("--shard-size", default="256MB", show_default=True, callback=_size, metavar="SIZE",
              help="About how large a shard is.")  # fmt: skip
@click.option("--workers", type=click.IntRange(min=1), default=None, help="Processes.  [default: usable CPUs]")
@click.option("--force", is_flag=True, help="Start over what an earlier pack wrote into DST.")
@click.option("--json", "json_wanted", is_flag=True, help="Print what was done as one JSON object.")
@click.pass_obj
def command(
    roots: Roots, source: str, destination: Path, to: str, shard_size: int, workers: int | None, force: bool,
    json_wanted: bool,
) -> None:  # fmt: skip
    """Rewrite SRC into shards in the folder DST.

    SRC is module:attribute or file.py:attribute (a dataset, or a function that returns one), a folder of files (those
    that share a name up to its first dot are one sample), or Parquet files, tar shards or Arrow files (one, a glob, a
    name with braces such as shards-{000..009}.tar, a folder of them).

    Stopped or killed, the same command goes on where it was.
    """
    if workers is None:
        workers = max(1, int(limits(roots=roots).cpu_usable))
    try:
        packed = _pack(source, destination, to=to, shard_bytes=shard_size, workers=workers, force=force)
    except KeyboardInterrupt:
        click.echo(f"stopped; the same command goes on from here, {destination} keeps what is finished", err=True)
        raise click.Abort from None  # click writes an empty line after the other
    if json_wanted:
        click.echo(json.dumps({"destination": str(destination), "format": to, **asdict(packed)}, indent=2))
        return
    kept = f" ({packed.kept} of them were there already)" if packed.kept else ""
    click.echo(
        f"{packed.samples:,} samples, {format_bytes(packed.bytes)} in {packed.shards} shards{kept} in {destination}, "
        f"read again and compared, in {packed.seconds:.1f} s"
    )
    if packed.skipped:
        click.echo(
            f"{len(packed.skipped)} files and folders are no part of a sample and were left out, such as "
            f"{', '.join(_examples(packed.skipped))}"
        )


def _pack(source: str, destination: Path, **arguments: Any) -> PackResult:
    """With a bar, and an ear for Ctrl-C."""
    from penstock.cli.console import make_console, make_progress

    with ctrl_c_on_request() as raise_if_ctrl_c, make_progress(make_console(stderr=True)) as progress:
        task = progress.add_task("loading torch", total=None)
        progress.refresh()
        from penstock.cli.target import load_target
        from penstock.data.pack.packing import pack

        def on_progress(done: int, total: int) -> None:
            raise_if_ctrl_c()
            progress.update(task, description=f"packing {total:,} samples", completed=done, total=total)
            progress.refresh()

        def show(message: Warning | str, *_: object) -> None:
            progress.console.print(f"warning: {message}", soft_wrap=True)

        given: Any = load_target(source) if _is_target(source) else source
        raise_if_ctrl_c()
        with warnings.catch_warnings():
            # Where in penstock's code it was raised says nothing to somebody at a terminal.
            warnings.showwarning = show
            return pack(given, destination, progress=on_progress, **arguments)


def _examples(skipped: list[str]) -> list[str]:
    """A folder and a file, where both were left out: a whole folder is the more surprising."""
    folders = [name for name in skipped if name.endswith("/")]
    files = [name for name in skipped if not name.endswith("/")]
    return folders[:1] + files[:1]


def _is_target(source: str) -> bool:
    if ":" not in source or "://" in source:
        return False
    try:
        return not Path(source).exists()
    except OSError:
        # A name too long for a file; what reads the path tells of it.
        return False
