"""Plans in words: the reason for each, what it suits, its advantages and drawbacks, and further notes.

In:  plans, and the simulated settings that they were made from.
Out: sentences.
Runs in: anywhere; pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.formatting import milliseconds
from penstock.planner.choices import Tried, worker_counts
from penstock.planner.simulate.pipeline import Load
from penstock.units import MIB, format_bytes

if TYPE_CHECKING:
    from penstock.planner.plans import Plan, PlanTable

_WAITS, _COMPUTES = 0.6, 0.2
"""Shares of a sample's time spent waiting. A sample above the first share is bound by waiting; a sample below the
second share is bound by the processor."""
GIVE_COLLATE = (
    "give a function that makes a batch of these samples: --collate file.py:function, or collate_fn= in a program"
)
"""Advice where torch's own collate function refuses samples."""
_CONTAINERS_BYTES = 8 * MIB
_STARVED = 0.05
"""The share of the training's time spent waiting for data from which a note is given."""

REPEATED = (
    "It gives each worker the same samples, because it never asks which worker it is in "
    "(torch.utils.data.get_worker_info): with more workers every sample comes several times, and no sample comes "
    "sooner."
)
"""The drawback of a stream that every worker reads whole."""

_WORDS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "safe": (
        "a machine shared with others, or a first try",
        ("least memory", "room for other programs"),
        ("the GPU may wait for data",),
    ),
    "balanced": (
        "everyday training that runs unattended",
        ("most of the highest speed for little memory", "recovers from slow samples without using more memory"),
        ("a little slower than the fastest plan",),
    ),
    "fast": (
        "a machine of your own, with an occasional look at the monitor",
        ("as fast as any within the budget",),
        ("less memory left for other programs",),
    ),
    "extreme": (
        "experiments at the memory limit that you watch all the time",
        ("the most samples per second that this machine can load, whatever the budget",),
        ("more memory for the last few per cent of speed", "close other programs first"),
    ),
    "bigger batch": (
        "a GPU with memory to spare",
        ("fewer and larger steps keep the GPU busier", "gradient accumulation can fall by a third"),
        (
            "more GPU memory: leave 10-20% of it free",
            "convergence may change: scale the learning rate, or lower accumulation to keep the total batch",
            "a NaN spoils a larger step, and is harder to recover from",
        ),
    ),
}


def words(
    name: str, risk: str, load: Load, *, fits: bool, is_fastest: bool
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """The situation that a plan suits, its advantages and its drawbacks."""
    suits, pros, cons = _WORDS[name]
    if is_fastest and name in ("safe", "balanced"):
        pros, cons = (*pros, "as fast as any plan here"), ()
    if load.workers > max(1, load.cores):
        cons = (*cons, f"more workers than the {load.cores:g} cores: useful only while samples wait")
    if not fits:
        cons = (*cons, "may take more memory than the limit")
    if risk != "low":
        cons = (*cons, "takes nearly all free memory: close other programs, and watch the memory")
    return suits, pros, cons


def reason(each: Tried, best: float, step_s: float | None) -> str:
    """The sentence with the arithmetic behind a plan."""
    load, outcome = each.load, each.outcome
    sample_s = load.profile.wait_s + load.profile.cpu_s
    if step_s:
        needed = sample_s * load.batch_size / load.step_s
        why = (
            f"{milliseconds(sample_s)} × {load.batch_size} samples / {milliseconds(load.step_s)} a step = "
            f"{needed:.1f} workers' work"
        )
    else:
        why = (
            f"a sample takes {milliseconds(load.profile.cpu_s)} of computing and {milliseconds(load.profile.wait_s)} "
            f"of waiting, on {_count(load.cores, 'core')}"
        )
    return (
        f"{why}; {_count(load.workers, 'worker')} with {_count(each.depth, 'batch', 'batches')} ahead "
        f"{'reach' if load.workers > 1 else 'reaches'} {outcome.samples_per_s / best:.0%} of the fastest plan's speed "
        f"with {format_bytes(outcome.growth_bytes)}."
    )


def describe(plan: Plan) -> Iterator[str]:
    """A few lines of text that describe a plan."""
    ranks = plan.workers_on_node // plan.workers
    yield f"Why: {plan.reason}"
    yield (
        f"Workers: {plan.workers} per rank, {plan.workers_on_node} on this node ({_count(ranks, 'rank')}). "
        f"Memory: {format_bytes(plan.memory.low)} to {format_bytes(plan.memory.high)} per rank, "
        f"{format_bytes(plan.memory.high * ranks)} at most on this node."
    )
    yield f"Suits: {plan.suits}."
    yield f"For it: {'; '.join(plan.pros)}."
    if plan.cons:
        yield f"Against it: {'; '.join(plan.cons)}."


def _settings(plan: Plan) -> tuple[int, int, int]:
    return plan.workers, plan.depth, plan.batch_size


def notes(table: PlanTable) -> tuple[str, ...]:
    """Further facts that matter to the user, the most important first."""
    return tuple(_notes(table))


def _notes(table: PlanTable) -> Iterator[str]:
    profile, facts, best = table.profile, table.facts, table.recommended
    if not best.fits:
        yield _what_would_fit(table)
    if profile.is_repeated:
        yield f"{REPEATED} Plans have one worker."
    if not profile.has_runs:
        yield (
            f"A sample takes {milliseconds(profile.wait_s + profile.cpu_s)}, too long to run the loaders as well: "
            "the memory of workers is assumed to be the usual. Give more time to measure it (--seconds, seconds=)."
        )
    if profile.length is not None and profile.length < best.batch_size:
        yield (
            f"A batch of {best.batch_size} is more than the {_count(profile.length, 'sample')} there are: an epoch is "
            "one smaller batch, or no batch with drop_last, and takes less memory than shown above. Lower the batch "
            "size."
        )
    same = [plan.name for plan in table.plans if _settings(plan) == _settings(best)]
    if best.fits and len(same) > 1:
        yield f"The plans {', '.join(same)} are the same settings here: {_why_no_more(table)}."
    if not profile.is_measured:
        yield "Nothing was measured: the figures and their range come from the stated figures."
    yield from _about_time(table)
    if not profile.is_splittable:
        sharing = "under the default collate function" if profile.has_collate else "of a map-style dataset"
        yield (
            "Batches of this dataset are built whole by one worker each, so memory grows with the number of workers; "
            f"workers {sharing} without __getitems__ would share each batch instead."
        )
    if profile.containers_bytes >= _CONTAINERS_BYTES:
        each, all_bytes = profile.containers_bytes, best.workers_on_node * profile.containers_bytes
        yield (
            f"The dataset has large Python containers: each worker copies {format_bytes(each)} of them in an epoch, "
            f"{format_bytes(all_bytes)} in all, which the figures above leave out; penstock doctor names them."
        )
    if profile.is_picklable is False:
        yield (
            "The dataset cannot be pickled: it works with forked workers, but not with workers of spawn or forkserver "
            "(macOS, Windows, Python 3.14)."
        )
    if profile.holds_gil is False:
        yield (
            'Two threads read the dataset faster than one: backend="thread" works here and saves the memory of worker '
            "processes."
        )
    if facts.ranks > 1:
        yield (
            f"Figures are for one rank; {facts.ranks} ranks on this machine take {facts.ranks} times as much memory, "
            f"and {facts.ranks} × {best.workers} = {best.workers_on_node} workers."
        )


def _what_would_fit(table: PlanTable) -> str:
    least, rows = table.least, table.recommended.batch_size
    allow = f"{-(-least.memory_bytes // MIB)}MiB"
    smaller = (
        "; no smaller batch fits the limit"
        if least.batch_size is None
        else f", or lower the batch size to {least.batch_size}"
    )
    return (
        f"No plan fits {format_bytes(table.budget_bytes)}. The smallest settings that work with batches of {rows}: "
        f"{_count(least.workers, 'worker')} with {_count(least.depth, 'batch', 'batches')} ahead, at "
        f"{least.speed:.0%} of the speed of the fastest. Allow {allow} for these settings (--memory, memory=){smaller}."
    )


def _why_no_more(table: PlanTable) -> str:
    most = worker_counts(table.profile, table.facts.cores)[-1]
    if table.recommended.workers < most or most <= max(1, table.facts.cores):
        return "more workers or batches ahead would not make loading faster"
    return (
        f"{_count(most, 'worker')} are the most that a plan has on {_count(table.facts.cores, 'core')}; penstock tune "
        "with --most-workers tries more"
    )


def _about_time(table: PlanTable) -> Iterator[str]:
    """Sentences about what takes a sample's time, and about how long the training waits for data."""
    profile, cores, best = table.profile, table.facts.cores, table.recommended
    sample_s = profile.wait_s + profile.cpu_s
    share = profile.wait_s / sample_s if sample_s else 0.0
    if share >= _WAITS:
        helps = "can" if profile.is_measured else "may"
        more = "" if profile.is_repeated else f"; more workers than cores {helps} help"
        yield f"Bound by waiting: {share:.0%} of a sample's time passes without computing (disks, networks){more}."
    elif share <= _COMPUTES:
        yield f"Bound by the processor: {1 - share:.0%} of a sample's time is computing, on {_count(cores, 'core')}."
    else:
        yield f"Bound by both: {share:.0%} of a sample's time is waiting and {1 - share:.0%} computing."
    if best.wait is not None and best.wait >= _STARVED:
        yield (
            f"The training would still wait {best.wait:.0%} of its time: cheaper samples, a cache or more cores would "
            "help, but more memory alone would not."
            if best.speed >= 0.95
            else f"The training would wait {best.wait:.0%} of its time with this plan, because memory is short."
        )


def _count(number: float, one: str, many: str = "") -> str:
    return f"{number:g} {one if number == 1 else many or one + 's'}"
