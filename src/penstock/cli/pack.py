"""`penstock pack`: a dataset rewritten into tar shards or memory-mappable Arrow files.

In:  a TARGET, a folder of files, Parquet files, tar shards or Arrow files; a folder to write to.
Out: shards and a manifest; a summary as a line or JSON.
Runs in: command line; imports torch when it packs.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.options import check_bytes, echo, json_option
from penstock.cli.progress import measuring
from penstock.formatting import counted
from penstock.meter import Roots, limits
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.data.pack.packing import PackResult


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--to", type=click.Choice(["arrow", "tar"]), default="arrow", show_default=True, help="Format of the shards."
)
@click.option("--shard-size", default="256MB", show_default=True, callback=check_bytes, metavar="SIZE",
              help="Approximate size of a shard.")  # fmt: skip
@click.option(
    "--workers", type=click.IntRange(min=1), default=None, help="Number of processes.  [default: usable CPUs]"
)
@click.option("--force", is_flag=True, help="Discard what an earlier pack wrote into DST.")
@json_option
@click.pass_obj
def command(
    roots: Roots, source: str, destination: Path, to: str, shard_size: int, workers: int | None, force: bool,
    json_wanted: bool,
) -> None:  # fmt: skip
    """Rewrite SRC into shards in the folder DST.

    SRC is module:attribute or file.py:attribute (a dataset, or a function that returns one), a folder of files (files
    with the same name up to the first dot are one sample), or Parquet files, tar shards or Arrow files (one file, a
    glob, a name with braces such as shards-{000..009}.tar, a folder of them).

    If the command is stopped or killed, run it again: it continues where it stopped.
    """
    if workers is None:
        workers = max(1, int(limits(roots=roots).cpu_usable))
    try:
        packed = _pack(source, destination, to=to, shard_bytes=shard_size, workers=workers, force=force)
    except KeyboardInterrupt:
        echo(f"stopped; finished shards stay in {destination}, and the same command continues from here", err=True)
        raise click.Abort from None
    if json_wanted:
        echo(json.dumps({"destination": str(destination), "format": to, **asdict(packed)}, indent=2))
        return
    kept = f" ({packed.kept} of them from an earlier run)" if packed.kept else ""
    echo(
        f"{counted(packed.samples, 'sample')}, {format_bytes(packed.bytes)} in {counted(packed.shards, 'shard')}{kept} "
        f"in {destination}. All shards were read back and compared. This took {packed.seconds:.1f} s."
    )
    if packed.skipped:
        echo(
            f"left out: {counted(len(packed.skipped), 'file or folder', 'files and folders')} outside samples, such as "
            f"{', '.join(_examples(packed.skipped))}"
        )


def _pack(source: str, destination: Path, **arguments: Any) -> PackResult:
    with measuring() as show_progress:
        from penstock.cli.target import load_target
        from penstock.data.pack.packing import pack

        def on_progress(done: int, total: int) -> None:
            show_progress(f"packing {total:,} samples", done / max(1, total))

        def show(message: Warning | str, *_: object) -> None:
            echo(f"warning: {message}", err=True)

        given: Any = load_target(source) if _is_target(source) else source
        show_progress("packing", 0.0)
        with warnings.catch_warnings():
            # The line of penstock's code that warned is of no use on a terminal.
            warnings.showwarning = show
            return pack(given, destination, progress=on_progress, **arguments)


def _examples(skipped: list[str]) -> list[str]:
    """One folder and one file. The folder comes first, because it may hold many files."""
    folders = [name for name in skipped if name.endswith("/")]
    files = [name for name in skipped if not name.endswith("/")]
    return folders[:1] + files[:1]


def _is_target(source: str) -> bool:
    if ":" not in source or "://" in source:
        return False
    try:
        return not Path(source).exists()
    except OSError:
        # The name is too long for a file; reading it gives the error.
        return False
