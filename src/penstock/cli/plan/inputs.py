"""Inputs of `penstock plan` other than a dataset: a machine, a profile, a settings file, answers.

In:  options of the command line, files, stdin.
Out: ``Facts`` and ``StartingMachine``, ``GivenProfile``, ``GivenSettings``, a plan's name.
Runs in: command line. Does not import torch.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from penstock.advice.machine import gather_facts
from penstock.cli.options import echo, write_text
from penstock.environment import local_ranks
from penstock.errors import ConfigError
from penstock.meter import Roots
from penstock.planner.plans import Facts
from penstock.planner.profile import Profile, is_amount, read_profile
from penstock.planner.questions import FIRST, QUESTIONS
from penstock.planner.starting_points import StartingMachine
from penstock.planner.stated_settings import Stated, read_stated
from penstock.settings.reader import read

_YOURS = "your settings"


@dataclass(frozen=True, kw_only=True)
class GivenProfile:
    """A dataset's profile, measured or from a file."""

    profile: Profile
    step_s: float | None
    """Length of a training step, if it is known."""
    stated: tuple[Stated, ...]
    """Settings to be compared with the plans."""


@dataclass(frozen=True, kw_only=True)
class GivenSettings:
    """The values of a settings file that a plan uses."""

    batch_size: int | None = None
    memory: Any = None
    ranks: int | None = None
    stated: tuple[Stated, ...] = ()


def find_machine(
    roots: Roots, *, cores: float | None, ram_bytes: int | None, gpu_bytes: int | None, ranks: int | None
) -> tuple[Facts, StartingMachine]:
    """This machine, or a machine with the given cores and memory."""
    here = gather_facts(roots)
    ranks = local_ranks(default=ranks)
    cores = here.limits.cpu_usable if cores is None else cores
    sizes = [gpu.memory_total_bytes for gpu in here.gpu.gpus if gpu.memory_total_bytes]
    gpu_bytes = min(sizes, default=None) if gpu_bytes is None else gpu_bytes
    free_bytes = here.limits.memory_available_bytes if ram_bytes is None else ram_bytes
    facts = Facts(cores=cores / ranks, available_bytes=free_bytes, gpu_bytes=gpu_bytes, ranks=ranks)
    return facts, StartingMachine(
        platform=here.platform,
        cores=cores,
        ram_bytes=here.limits.memory_limit_bytes if ram_bytes is None else ram_bytes,
        gpu_bytes=gpu_bytes,
        ranks=ranks,
    )


def read_given_profile(path: Path) -> GivenProfile:
    """A file written by ``--save-profile`` or by hand; it may also have ``step_s`` and ``beside``."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(f"{path} cannot be read: {problem.strerror or problem}") from None
    except (ValueError, RecursionError) as problem:  # numbers of thousands of digits raise ValueError
        raise ConfigError(f"{path} cannot be read as a profile: {problem}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{path} is not a profile: it holds {type(given).__name__}, not named figures")
    if "samples" not in given and "sample_bytes" not in given:
        raise ConfigError(
            f"{path} is not a profile: it has neither samples nor sample_bytes; "
            "penstock plan TARGET --save-profile FILE writes one"
        )
    step_s, beside = given.pop("step_s", None), given.pop("beside", {})
    if step_s is not None and not is_amount(step_s):
        raise ConfigError(f"{path}: step_s={str(step_s)[:60]} is not a length of time; write seconds")
    try:
        profile = read_profile(given)
        for sample in profile.samples:
            if not all(map(is_amount, (sample.size_bytes, sample.wait_s, sample.cpu_s))):
                raise ConfigError(f"the sample {sample} has a figure that is neither a size nor a time")
    except (ConfigError, AttributeError) as problem:
        raise ConfigError(f"{path}: {problem}") from None
    return GivenProfile(profile=profile, step_s=step_s, stated=read_stated(beside, str(path)))


def save_profile(path: Path, profile: Profile, step_s: float | None) -> None:
    """Write a file for ``--profile``."""
    content = profile.as_json() | ({} if step_s is None else {"step_s": step_s})
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_settings(path: str, section: str) -> GivenSettings:
    """A team's own file: its batch size, memory limit and ranks, and its workers for the comparison."""
    settings = read(path, section)
    given = settings.arguments
    workers, batch_size = given.get("num_workers"), given.get("batch_size")
    stated = ()
    if isinstance(workers, int):
        prefetch = given.get("prefetch_factor") or 2
        stated = (Stated(name=_YOURS, workers=workers, prefetch_factor=prefetch, batch_size=batch_size),)
    return GivenSettings(
        batch_size=batch_size,
        memory=given.get("memory"),
        ranks=settings.facts.get("gpus_per_node"),
        stated=stated,
    )


def ask() -> str:
    """The name of the plan that the answers lead to. The questions go to stderr; each answer is a line of stdin."""
    place = FIRST
    while place in QUESTIONS:
        question = QUESTIONS[place]
        echo(f"{question.text} [{'/'.join(question.answers)}] ", err=True, nl=False)
        line = sys.stdin.readline()
        if not line:
            echo(err=True)
            raise click.UsageError(
                "the answers ended before the questions did; give one line for each question, or leave out --ask"
            )
        found = question.leads_to(line)
        if found is None:
            echo(f"{line.strip()!r} is not one of {', '.join(question.answers)}.", err=True)
        else:
            place = found
    return place
