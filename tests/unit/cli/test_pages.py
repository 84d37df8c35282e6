"""Pages as people see them: 80 columns, no colour, nothing cut off."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from rich.color import ColorSystem
from rich.console import Console
from rich.live import Live
from rich.text import Text

from penstock.advice.machine import MachineFacts, find_in_machine
from penstock.cli.app import run
from penstock.cli.bench import show_bench
from penstock.cli.console import Visible, indented, make_console, make_progress, make_table
from penstock.cli.demo import show_comparison, show_machine
from penstock.cli.doctor.view import show_doctor
from penstock.cli.options import echo
from penstock.cli.plan.view import show_plans
from penstock.lab.comparison import LoaderComparison, LoaderResult, Round
from penstock.loader.rules import LoaderRules
from penstock.meter import GpuStatus
from penstock.planner.plans import Facts as PlannerFacts
from penstock.planner.plans import make_plans
from penstock.planner.profile import Profile, SeenSample

MIB, GIB = 1 << 20, 1 << 30

HEALTHY_PAGE = """\
What this machine allows
  memory limit      64.0 GiB  the host's memory
  memory available  48.0 GiB  75% of the limit; working set 16.0 GiB
  swap in use       0 B       of 8.00 GiB
  memory stalls     0.0%      of the last 10 s (host)
  memory kills      0         processes killed because memory ran out
  /dev/shm          32.0 GiB  0 B in use
  CPUs usable       16        16 online, this process may run on 16, no quota
  open files        65,536    may be raised to 1,048,576
  GPU 0             141 GiB   NVIDIA H200, 1.00 GiB in use, 7% busy
  cgroups           v2

Nothing here will hurt
"""

SMALL_SHM = """\
1 thing here will hurt
  hurts  shm-small: /dev/shm holds only 64.0 MiB: worker processes of torch's
         DataLoader pass batches through it and crash with a bus error when it
         is full
         fix: docker run --shm-size=8g (or --ipc=host); in Kubernetes mount an
         emptyDir with medium: Memory on /dev/shm; as root: mount -o
         remount,size=8g /dev/shm
  info   gpu-none: no GPU: no NVIDIA driver
         fix: if you expect a GPU: docker run --gpus all, nvidia.com/gpu in
         Kubernetes or --gres=gpu in Slurm; otherwise there is nothing to do
"""


def page_console(width: int = 80) -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(file=written, width=width, highlight=False, markup=False, emoji=False), written


def shown(facts: MachineFacts, width: int = 80) -> str:
    console, written = page_console(width)
    show_doctor(console, facts, find_in_machine(facts))
    return "".join(line.rstrip() + "\n" for line in written.getvalue().splitlines())


def in_trouble(healthy: MachineFacts) -> MachineFacts:
    return replace(
        healthy,
        limits=replace(healthy.limits, shm_size_bytes=64 * MIB),
        gpu=GpuStatus(gpu_library="no device", reason="no NVIDIA driver", gpus=()),
    )


def test_a_healthy_machine_fills_one_short_page(healthy: MachineFacts) -> None:
    assert shown(healthy).rstrip() == HEALTHY_PAGE.rstrip()


def test_findings_are_shown_worst_first_with_their_fixes(healthy: MachineFacts) -> None:
    assert shown(in_trouble(healthy)).endswith(SMALL_SHM)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_a_page_of_any_width_keeps_every_word(healthy: MachineFacts, width: int) -> None:
    text = shown(in_trouble(healthy), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\u2026" not in text
    squeezed = "".join(text.split())
    for words in ("memory", "64.0MiB", "shm-small"):
        assert words in squeezed or width == 20


def test_paths_with_brackets_are_printed_as_they_are(healthy: MachineFacts) -> None:
    source = "/box[bold]/memory.max"
    limits = replace(healthy.limits, memory_limit_bytes=60 * GIB, memory_limit_source=source)
    assert source in shown(replace(healthy, limits=limits))


def test_unknown_facts_are_listed_as_unknown(healthy: MachineFacts) -> None:
    limits = replace(
        healthy.limits,
        unknown=("cpu_quota: no cgroups on this platform",),
        swap_total_bytes=0,
        shm_size_bytes=None,
        shm_used_bytes=None,
        cpu_affinity=None,
        cpu_quota=0.5,
        open_files_soft=None,
        open_files_hard=None,
    )
    nothing = replace(healthy.pressure, full_avg10=None, some_avg10=None, oom_kills=None, stall_source=None)
    gpus = (replace(healthy.gpu.gpus[0], memory_total_bytes=None, memory_used_bytes=None, utilisation_percent=None),)
    text = shown(
        replace(
            healthy,
            platform="darwin",
            limits=limits,
            pressure=nothing,
            gpu=replace(healthy.gpu, gpus=gpus),
        )
    )
    assert "cpu_quota: no cgroups on this platform" in text
    assert "None" not in text
    assert "no known limit" in text
    assert "quota 0.5" in text


def make_comparison() -> LoaderComparison:
    def result(name: str, samples: int, growth_bytes: int | None) -> LoaderResult:
        order = tuple((index, 0) for index in range(samples))
        only = Round(
            samples=samples,
            delivered_bytes=samples * 10**8,
            elapsed_s=2.0,
            first_batch_s=0.25,
            peak_growth_bytes=growth_bytes,
            order=order,
        )
        return LoaderResult(name=name, rounds=(only,))

    return LoaderComparison(torch=result("torch", 200, 800 * MIB), penstock=result("penstock", 400, None))


def test_the_demos_table_shows_both_loaders_and_the_verdict() -> None:
    from penstock.lab.demo import DemoSettings

    console, written = page_console()
    show_comparison(console, DemoSettings(), make_comparison())
    lines = [" ".join(line.split()) for line in written.getvalue().splitlines()]
    assert "torch 100 0.25 s 800 MiB" in lines
    assert "penstock 200 0.25 s unknown" in lines
    assert "2 times the samples per second" in " ".join(lines)


@pytest.mark.parametrize("link", [None, 50e9])
def test_the_benchs_table_shows_both_loaders_and_the_link_where_there_is_one(link: float | None) -> None:
    from penstock.lab.bench import BenchResult, BenchSettings

    settings = BenchSettings(
        target="train.py:make",
        batch_size=4,
        workers=2,
        memory="auto",
        device=None if link is None else "cuda",
        shuffle=False,
        step_time=0.05,
        seconds=2.0,
        rounds=1,
    )
    console, written = page_console()
    show_bench(console, settings, BenchResult(comparison=make_comparison(), link_bytes_per_s=link))
    lines = [" ".join(line.split()) for line in written.getvalue().splitlines()]
    text = " ".join(lines)
    assert (
        "a step of 50 ms. The loaders take turns: 1 round of 2 s for each." in text
        and "2 times the samples per second" in text
    )
    assert ("torch 100 10 0.25 s 800 MiB" if link is None else "torch 100 10 20% 0.25 s 800 MiB") in lines
    assert ("The link to cuda carries 50.0 GB/s" in text) == (link is not None)


@pytest.mark.parametrize(("gpus", "words"), [(0, "no GPU"), (1, "1 GPU"), (2, "2 GPUs")])
def test_the_demo_describes_the_machine_in_one_line(healthy: MachineFacts, gpus: int, words: str) -> None:
    console, written = page_console(200)
    facts = replace(healthy, gpu=replace(healthy.gpu, gpus=healthy.gpu.gpus * gpus))
    show_machine(console, facts, find_in_machine(facts))
    assert f"48.0 GiB of 64.0 GiB memory available, 16 CPUs usable, /dev/shm 32.0 GiB, {words}." in written.getvalue()
    assert "Will hurt" not in written.getvalue()


def test_the_demo_names_what_needs_action(healthy: MachineFacts) -> None:
    console, written = page_console(200)
    facts = in_trouble(healthy)
    show_machine(console, facts, find_in_machine(facts))
    assert "Will hurt here: shm-small. penstock doctor shows the fixes." in written.getvalue()


def test_progress_is_not_drawn_without_a_terminal() -> None:
    console, written = page_console()
    with make_progress(console) as progress:
        task = progress.add_task("torch", total=1.0)
        progress.update(task, completed=0.5)
        progress.refresh()
    assert written.getvalue() == ""


@pytest.mark.parametrize(("budget_bytes", "batch_size"), [(100 * MIB, 16), (16 * GIB, 16), (100 * MIB, 12_000)])
def test_a_row_of_plans_fits_80_columns_without_folded_figures(budget_bytes: int, batch_size: int) -> None:
    profile = Profile(name="images", length=None, samples=(SeenSample(size_bytes=5 * MIB, wait_s=0.02, cpu_s=0.01),))
    facts = PlannerFacts(cores=4, available_bytes=500 * GIB)
    table = make_plans(profile, facts, batch_size, rules=LoaderRules(), budget_bytes=budget_bytes, step_s=0.02)
    console, written = page_console()
    show_plans(console, table, None, ())
    text = written.getvalue()
    assert max(len(line) for line in text.splitlines()) <= 80 and "…" not in text
    rows = text.partition("plan ")[2].partition("* recommended")[0]
    assert len(re.findall(r"[\d.]+-[\d.]+ [MG]iB +[\d.]+ [MG]iB ", rows)) == 5, rows


HOSTILE = "name\x1b]0;title\x07\x9b31m\x7f"


def test_escape_sequences_in_texts_reach_no_terminal_and_colours_do(capsys: pytest.CaptureFixture[str]) -> None:
    console, written = make_console(), io.StringIO()
    console.file, console._force_terminal, console._color_system = written, True, ColorSystem.STANDARD
    table = make_table("name", "figure", last="text")
    table.add_row(HOSTILE, "1", Text(HOSTILE, style="red"))
    console.print(HOSTILE, style="bold")
    console.print(table)
    console.print(indented(HOSTILE))
    with Live(console=console, auto_refresh=False) as live:
        live.update(Visible(Text(HOSTILE)), refresh=True)
    shown = written.getvalue()
    # rich itself leaves bells out.
    assert "\x1b[1mname" in shown and shown.count("\u241b]0;title\ufffd31m\u2421") == 5
    assert "\x1b]" not in shown and "\x07" not in shown and "\x9b" not in shown
    echo(f"{HOSTILE}\tend")
    assert capsys.readouterr().out == "name\u241b]0;title\u2407\ufffd31m\u2421\tend\n"


def test_errors_and_wrong_usage_that_quote_escape_sequences_are_harmless(capfd: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["settings", f"{HOSTILE}.yaml"],
        ["cache", "stats", HOSTILE],
        ["set", "last", HOSTILE],
        [HOSTILE],
    ):
        assert run(arguments) in (1, 2)
        shown = capfd.readouterr()
        assert "name" in shown.err and not set(shown.err + shown.out) & {"\x1b", "\x07", "\x9b", "\x7f"}
