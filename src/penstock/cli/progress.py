"""A progress bar on stderr while a command measures; it also checks for Ctrl-C.

In:  calls of ``on_progress`` from the measuring code.
Out: a drawn bar; KeyboardInterrupt at a point where it does no damage.
Runs in: command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.cli.signals import ctrl_c_on_request

OnProgress = Callable[[str, float], None]
"""Takes the current activity and the fraction that is done; raises KeyboardInterrupt if Ctrl-C was pressed."""


@contextmanager
def measuring(begins_with: str = "loading torch") -> Iterator[OnProgress]:
    """``begins_with``: the activity shown until the first call."""
    from penstock.cli.console import make_console, make_progress

    with ctrl_c_on_request() as raise_if_ctrl_c, make_progress(make_console(stderr=True)) as progress:
        task = progress.add_task(begins_with, total=1.0)
        progress.refresh()

        def on_progress(what: str, done: float) -> None:
            raise_if_ctrl_c()
            progress.update(task, description=what, completed=done)
            progress.refresh()

        yield on_progress
