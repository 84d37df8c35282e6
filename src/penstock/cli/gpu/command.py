"""`penstock gpu`: GPU memory of a model by batch size, before it is trained.

In:  a MODEL or an example's name, batch sizes, a GPU's memory.
Out: a page or JSON; a picture; exit status 1 if MODEL fails, or if --find finds no batch size that fits.
Runs in: command line; imports torch when it loads a model. With or without a GPU.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.gpu.model import load_model, memory_here, training_options
from penstock.cli.options import check_bytes, echo, json_option, print_json, svg_option, write_text

if TYPE_CHECKING:
    from penstock.cli.gpu.model import Model
    from penstock.cli.gpu.view import Answer


def _sizes(ctx: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    try:
        sizes = [int(part) for part in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of batch sizes; write 8,16,24") from None
    if min(sizes) < 1:
        raise click.BadParameter(f"{min(sizes)} is not a batch size; write whole numbers from 1 up")
    return sorted(set(sizes))


@click.command(
    epilog="Exit status: 1 if MODEL fails or if --find finds no batch that fits, 2 for wrong usage, 0 otherwise."
)
@click.argument("model", required=False)
@click.option("--batch-size", "sizes", default="8,16,32", show_default=True, callback=_sizes, metavar="N,N,...",
              help="Batch sizes to estimate.")  # fmt: skip
@click.option("--memory", "memory_bytes", callback=check_bytes, metavar="SIZE",
              help="Memory of the GPU, such as 20GB.  [default: this machine's GPU]")  # fmt: skip
@training_options
@click.option("--calibrate", is_flag=True,
              help="Correct the estimates by real steps at two small batch sizes, on this machine's GPU.")  # fmt: skip
@click.option("--find", "finds", is_flag=True, help="Find the largest batch that leaves --margin of the memory free.")
@click.option("--margin", type=click.FloatRange(min=0, max=1, max_open=True), default=0.1, show_default=True,
              help="Share of the memory that --find leaves free.")  # fmt: skip
@click.option("--accumulate-to", type=click.IntRange(min=1), metavar="N",
              help="Samples in one optimizer step: --find then also finds how many batches to accumulate.")  # fmt: skip
@svg_option("Draw memory by batch size, stacked by component, into this file.")
@json_option
def command(
    model: str | None, sizes: list[int], memory_bytes: int | None, calibrate: bool, finds: bool, margin: float,
    accumulate_to: int | None, plot: Path | None, json_wanted: bool, **given: Any,
) -> int:  # fmt: skip
    """Estimate the GPU memory that training MODEL needs, by component and batch size, and what checkpointing,
    precision, optimizer and accumulation would change. The estimate needs no GPU and allocates no memory for the model.

    MODEL is module:attribute or file.py:attribute: a class or function that makes the model. Its batches come from a
    function make_batch(n): an attribute of MODEL or of its module, or the function that --batch names. MODEL can also
    be the name of an example; without MODEL, the examples are listed.
    """
    if model is None:
        _list_examples(json_wanted=json_wanted)
        return 0
    # Text that the user's code prints must not be part of the answer.
    with contextlib.redirect_stdout(sys.stderr):
        loaded = load_model(model, **given)
        answer = _answer(
            loaded, sizes, memory_bytes, calibrate=calibrate, finds=finds or accumulate_to is not None, margin=margin,
            accumulate_to=accumulate_to,
        )  # fmt: skip
    if plot is not None:
        write_text(plot, answer.chart().svg())
    if json_wanted:
        print_json(answer.as_json())
    else:
        from penstock.cli.console import make_console
        from penstock.cli.gpu.view import show_answer

        show_answer(make_console(), answer)
        if plot is not None:
            echo(f"Drawn: {plot}")
    return int(answer.found is not None and not answer.found.batch_size)


def _answer(
    model: Model, sizes: list[int], memory_bytes: int | None, *, calibrate: bool, finds: bool, margin: float,
    accumulate_to: int | None,
) -> Answer:  # fmt: skip
    from penstock import gpu
    from penstock.cli.console import make_console, make_progress
    from penstock.cli.gpu.view import Answer

    wanted, memory_bytes = memory_bytes, memory_bytes or memory_here()
    with make_progress(make_console(stderr=True)) as progress:
        task = progress.add_task("tracing", total=2 + finds)
        steps = iter((1, 2))

        def next_is(what: str) -> None:
            progress.update(task, description=what, completed=next(steps))
            progress.refresh()

        progress.refresh()
        estimates = gpu.estimate(**model.training, batch_sizes=sizes, device_memory=memory_bytes, calibrate=calibrate)
        next_is("other choices")

        def change_is(what: str, done: float) -> None:
            progress.update(task, description=f"other choices: {what}", completed=1 + done)

        what_ifs = gpu.what_if(**model.training, batch_size=sizes[-1], on_progress=change_is)
        found = None
        if finds:
            next_is("the largest batch")
            found = gpu.find_batch_size(**model.training, memory=wanted, margin=margin, effective_batch=accumulate_to)
    return Answer(model=model, estimates=estimates, what_ifs=what_ifs, found=found, memory_bytes=memory_bytes)


def _list_examples(*, json_wanted: bool) -> None:
    from penstock.gpu.examples import EXAMPLES

    if json_wanted:
        print_json({"examples": {name: example.what for name, example in EXAMPLES.items()}})
        return
    echo("Examples to try:")
    for name, example in EXAMPLES.items():
        echo(f"  penstock gpu {name:<12} {example.what}")
    echo("Your own model: penstock gpu train.py:make_model --batch-size 8,16,24 --memory 20GB --precision bf16")
