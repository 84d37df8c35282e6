"""The program around the commands: it imports the command to run and ends with its exit status.

In:  arguments; the ``Roots`` to read the machine from.
Out: an exit status; errors as one line on stderr.
Runs in: command line.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches

import click

from penstock._version import __version__
from penstock.cli.options import echo
from penstock.cli.signals import INTERRUPTED
from penstock.errors import PenstockError
from penstock.meter import Roots

COMMANDS = {
    "bench": "Compare torch's DataLoader and penstock's on your own dataset.",
    "cache": "Show and clear the caches of this node.",
    "dash": "Show trainings live in a web browser, change their settings, compare runs.",
    "demo": "Compare torch's DataLoader and penstock's on this machine, on a built-in dataset.",
    "doctor": "Show what this machine or container allows, and what will hurt a training run.",
    "explain": "Show host and GPU memory by component, and whether loading is the bottleneck.",
    "gpu": "Estimate a model's GPU memory by batch size, and find the largest batch that fits.",
    "pack": "Rewrite a dataset into tar shards or memory-mappable Arrow files.",
    "plan": "Recommend workers, prefetch and memory for a dataset, before anything is trained.",
    "report": "Write a report on a run as one HTML file: bottleneck, headroom, what to change.",
    "runs": "List, compare and remove recorded runs.",
    "set": "Change workers, batches ahead and memory limit of a running training.",
    "settings": "Show how a team's own settings file maps to arguments, and which settings will hurt on this machine.",
    "top": "Show running trainings live in the terminal: memory, workers, speed, GPUs.",
    "tune": "Find the best number of workers and of batches ahead by measuring on one running loader.",
    "watch": "Alert when the memory of a machine or a training rises above a threshold.",
}
"""Command -> its purpose. The click command is called ``command``. It is in the file ``penstock.cli.<command>``, or in
the file ``command`` of the folder of that name."""

_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""Errors of a write to a stdout that cannot grow. An error of ``open`` may have the same number, but also has a file
name."""


class LazyCommands(click.Group):
    """Imports the file of a command when the command is called, so that no command waits for the imports of another."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        room = importlib.import_module(f"penstock.cli.{cmd_name}")
        if hasattr(room, "__path__"):
            room = importlib.import_module(f"{room.__name__}.command")
        return room.command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and (near := get_close_matches(args[0], COMMANDS, n=1)):
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{near[0]}'?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group(
    cls=LazyCommands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 done, 1 found a problem or failed, 2 wrong usage.",
)
@click.version_option(__version__, prog_name="penstock")
def program() -> None:
    """Feeds PyTorch training at full speed inside a memory budget."""


def run(arguments: Sequence[str] | None = None, *, roots: Roots | None = None) -> int:
    """Run one command and return its exit status; ``arguments`` defaults to the arguments of the process."""
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal cannot show, in a path for example, must not end the program.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = program.main(args=arguments, prog_name="penstock", standalone_mode=False, obj=roots or Roots())
        if sys.stdout is not None:
            # A write that fails at interpreter exit would print a traceback and end with status 120.
            sys.stdout.flush()
    except click.ClickException as wrong:
        shown = io.StringIO()
        wrong.show(shown)
        echo(shown.getvalue(), err=True, nl=False)
        return wrong.exit_code
    except PenstockError as failed:
        echo(f"penstock: {failed}", err=True)
        return 1
    except (click.Abort, KeyboardInterrupt):
        _drop_output()
        return INTERRUPTED
    except SystemExit as ended:
        # click and rich exit when a pipe is closed; text that is still buffered would raise again.
        _drop_output()
        return ended.code if isinstance(ended.code, int) else 1
    except OSError as refused:
        if isinstance(refused, BrokenPipeError):
            _drop_output()
            return 1
        if refused.errno not in _UNWRITABLE or refused.filename is not None:
            raise
        _drop_output()
        echo(f"penstock: cannot write the output: {refused.strerror}", err=True)
        return 1
    return status if isinstance(status, int) else 0


def _drop_output() -> None:
    """Redirect stdout to /dev/null: buffered text would end the interpreter with a traceback."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError, AttributeError):
        pass  # stdout is closed or is not a file
