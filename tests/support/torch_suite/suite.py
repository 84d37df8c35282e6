"""Runs PyTorch's own tests of its DataLoader against penstock's, in three variants.

In:  the path of PyTorch's test/test_dataloader.py (it is not part of penstock: get it from PyTorch's sources,
     at the release that is installed, and `pip install expecttest`).
Out: an `Outcome` per variant: what passed, what failed, what was left out and why.
Runs in: a test process or a shell; the suite itself in a pytest process of its own per variant.

    python tests/support/torch_suite/suite.py --suite test_dataloader.py [worker] [batch] [shared] [-k NAME]

`--only-excluded` runs just the tests that are normally left out, to see which reasons still hold.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import penstock

VARIANTS = ("worker", "batch", "shared")
"""worker: torch's seeds and assignment; batch: the default; shared: the same with every batch split over the
workers and two slots, so that what is tested is the shared path."""

SUITE_SHA256 = {"80c293efeb85bb1a29d06ba7e38fa2dfb46882ee2e059b8cf2c83aba8d32bf5c": "2.13"}
"""Fingerprint of the suite -> the torch release it belongs to."""

EXCLUDED = "left out for penstock: "
TEST_TIMEOUT_S = 120
RUN_TIMEOUT_S = 1500

HERE = Path(__file__).resolve().parent

# --- what is left out, and why ------------------------------------------------------------------------------

_BOTH = ("TestDataLoader", "TestDataLoaderPersistentWorkers")
_PERSISTENT = ("TestDataLoaderPersistentWorkers",)


def _in(classes: Iterable[str], reasons: dict[str, str]) -> dict[str, str]:
    return {f"{cls}::{test}": reason for cls in classes for test, reason in reasons.items()}


EVERYWHERE: dict[str, str] = {
    **_in(
        _BOTH,
        {
            "test_get_worker_info": "reads the private it._workers to learn the workers' pids",
            "test_iterable_style_dataset": "joins the processes in the private it._workers",
            "test_partial_workers": "joins the processes in the private it._workers",
            "test_proper_exit": "asks the processes in the private it._workers whether they live",
        },
    ),
    "IntegrationTestDataLoaderDataPipe::test_shuffler_iterdatapipe": (
        "calls the private loader._iterator._shutdown_workers() after each persistent case"
    ),
    **_in(
        _PERSISTENT,
        {
            "test_persistent_workers_pin_memory_atexit_registered_once": (
                "replaces private names of torch.utils.data.dataloader (needs CUDA besides)"
            ),
            "test_persistent_workers_pin_memory_atexit_uses_iterator_shutdown": (
                "counts calls of the private it._shutdown_workers (needs CUDA besides)"
            ),
        },
    ),
}
"""Left out in every variant: these read private attributes. test_drop_in.py asks the same in public terms."""

_BATCH: dict[str, str] = {
    **_in(
        _BOTH,
        {
            "test_worker_init_fn": (
                "expects the seed that worker_init_fn set to be each sample's seed; under batch seeding a "
                "sample's seed depends on its place in the epoch"
            ),
        },
    ),
    "TestIndividualWorkerQueue::test_ind_worker_queue": "asserts which worker builds which batch",
    "TestOutOfOrderDataLoader::test_in_order_index_ds": "asserts which worker builds which batch",
    "TestOutOfOrderDataLoader::test_out_of_order_index_ds": (
        "asserts which worker builds which batch, and the order that follows from it"
    ),
}

_BARRIER = "each of six one-sample batches waits until all six are under way; two slots hold two"

PER_VARIANT: dict[str, dict[str, str]] = {
    "worker": {},
    "batch": _BATCH,
    "shared": {
        **_BATCH,
        **_in(_BOTH, {"test_worker_seed": _BARRIER, "test_worker_seed_reproducibility": _BARRIER}),
        "TestOutOfOrderDataLoader::test_out_of_order_iterable_ds": "two workers wait for each other with two batches "
        "each under way; two slots hold two in all",
    },
}


def exclusions(variant: str) -> dict[str, str]:
    """`Class::test` -> reason, for one variant."""
    return EVERYWHERE | PER_VARIANT[variant]


# --- the loader under test ----------------------------------------------------------------------------------


def loader_class(variant: str) -> type[penstock.DataLoader]:
    """penstock's DataLoader with the variant's defaults."""
    from typing import Any, TypeVar

    import penstock

    T = TypeVar("T")
    seeding = "worker" if variant == "worker" else "batch"

    class DataLoader(penstock.DataLoader[T]):
        suite_variant = variant

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.setdefault("seeding", seeding)
            super().__init__(*args, **kwargs)

    if variant == "shared":
        force_shared_batches(DataLoader)
    return DataLoader


def force_shared_batches(loader: type[penstock.DataLoader]) -> None:
    """The one place that knows the private knobs: every batch split over the workers, two slots in all."""
    import dataclasses

    loader._rules = dataclasses.replace(loader._rules, split_always=True, most_slots=2)


def replace_loader(variant: str) -> None:
    """Make `torch.utils.data.DataLoader` the variant, for whoever imports it from now on."""
    import torch.utils.data

    torch.utils.data.DataLoader = loader_class(variant)  # type: ignore[misc]


# --- the run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one variant did with the suite."""

    variant: str
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Test -> the last line of its error."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Test -> why the suite itself skips it here (no CUDA, mostly)."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Test -> why it does not apply to penstock."""
    output: str = ""
    """All that pytest printed."""
    finished: bool = True
    """False when the run crashed or was stopped: then the lists are incomplete."""

    @property
    def ok(self) -> bool:
        return self.finished and not self.failed and bool(self.passed)

    def __str__(self) -> str:
        lines = [
            f"{self.variant}: {len(self.passed)} passed, {len(self.failed)} failed, "
            f"{len(self.skipped)} skipped by the suite, {len(self.excluded)} left out"
        ]
        if not self.finished:
            lines.append("the run did not finish; the end of its output:")
            lines.append(self.output[-4000:])
        lines += [f"  FAILED {name}: {why}" for name, why in self.failed.items()]
        return "\n".join(lines)


def run(
    variant: str,
    suite: Path,
    *,
    jobs: int = 2,
    keyword: str | None = None,
    only_excluded: bool = False,
    timeout_s: float = RUN_TIMEOUT_S,
) -> Outcome:
    """Run the suite against one variant in a pytest process of its own."""
    with tempfile.TemporaryDirectory(prefix="penstock-suite-") as scratch:
        report = Path(scratch, "report.xml")
        command = [
            sys.executable, "-m", "pytest", str(suite),
            "-c", os.devnull, "--rootdir", str(suite.parent), "-p", "no:cacheprovider", "-p", "suite_plugin",
            "-q", "-ra", f"--timeout={TEST_TIMEOUT_S}", f"--junitxml={report}", "-o", "junit_family=xunit2",
        ]  # fmt: skip
        if jobs > 1:
            command += ["-n", str(jobs)]
        if keyword:
            command += ["-k", keyword]
        paths = [str(HERE / "site"), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PENSTOCK_SUITE_VARIANT": variant,
            "PENSTOCK_SUITE_ONLY_EXCLUDED": "1" if only_excluded else "",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        for inherited in [name for name in environment if name.startswith(("PYTEST_", "COV_"))]:
            del environment[inherited]
        process = subprocess.Popen(
            command,
            cwd=scratch,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
            finished = process.returncode in (0, 1)
        except subprocess.TimeoutExpired as expired:
            stop_session(process)
            partial = expired.stdout or b""
            output = partial.decode(errors="replace") if isinstance(partial, bytes) else partial
            output += f"\nstopped after {timeout_s:.0f} s"
            finished = False
        finally:
            stop_session(process)
        return read_report(variant, report, output, finished and report.exists())


def stop_session(process: subprocess.Popen[str]) -> None:
    """End pytest and whatever a failed test left running: they all are in the session started for it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def read_report(variant: str, report: Path, output: str, finished: bool) -> Outcome:
    outcome = Outcome(variant=variant, output=output, finished=finished)
    if not report.exists():
        return outcome
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        skip = case.find("skipped")
        wrong = case.find("failure") if case.find("failure") is not None else case.find("error")
        if wrong is not None:
            lines = (wrong.get("message") or wrong.text or "no message").strip().splitlines()
            outcome.failed[name] = lines[0][:300]
        elif skip is None:
            outcome.passed.append(name)
        elif (reason := skip.get("message") or "").startswith(EXCLUDED):
            outcome.excluded[name] = reason.removeprefix(EXCLUDED)
        else:
            outcome.skipped[name] = reason
    return outcome


def release_of(suite: Path) -> str | None:
    """The torch release that a suite belongs to, where its fingerprint is known."""
    return SUITE_SHA256.get(hashlib.sha256(suite.read_bytes()).hexdigest())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("variants", nargs="*", choices=[*VARIANTS, []], default=list(VARIANTS))
    parser.add_argument("--suite", type=Path, default=os.environ.get("PENSTOCK_TORCH_TESTS"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("-k", dest="keyword", help="run matching tests only, as pytest's -k")
    parser.add_argument("--only-excluded", action="store_true", help="run what is normally left out")
    parser.add_argument("--show", action="store_true", help="print all that pytest printed")
    arguments = parser.parse_args()
    if arguments.suite is None:
        parser.error("say where PyTorch's test/test_dataloader.py is: --suite PATH or PENSTOCK_TORCH_TESTS")
    suite = Path(arguments.suite).resolve()
    release = release_of(suite)
    print(f"suite of torch {release}" if release else "a suite with an unknown fingerprint")
    ok = True
    for variant in arguments.variants:
        outcome = run(
            variant,
            suite,
            jobs=arguments.jobs,
            keyword=arguments.keyword,
            only_excluded=arguments.only_excluded,
        )
        if arguments.show:
            print(outcome.output)
        print(outcome, flush=True)
        ok = ok and outcome.ok
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
