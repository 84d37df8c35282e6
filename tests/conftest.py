"""For all tests: repeatable random input, folders of their own, any order, and nothing left at the end.

``support`` can be imported in every process that a test starts.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from support.isolation import Isolation
from support.ready_python import ReadyPython

# Slow examples are slow because of what is tested; no example fails for its time or its size.
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example]
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None, suppress_health_check=_SLOW)
settings.load_profile("repeatable")

# pytest's own ``pythonpath`` reaches this process and the workers it forks or spawns, not the scripts it runs.
_TESTS = str(Path(__file__).parent)
_INHERITED = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder and folder != _TESTS]
os.environ["PYTHONPATH"] = os.pathsep.join([*_INHERITED, _TESTS])

# Threads of torch's operations sleep while they wait. By default they spin, and take the cores from the workers.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Once an earlier test has used these threads, an operation that wants them in a forked process waits for ever.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))

_ISOLATION = pytest.StashKey[Isolation]()
_LEFT = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run modules, and tests of a module, in random order")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ISOLATION] = Isolation()
    config.stash[_LEFT] = []


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_ISOLATION].close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("shuffle") is None:
        return
    chance = random.Random(config.getoption("shuffle"))
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    for tests in (groups := list(modules.values())):
        chance.shuffle(tests)
    chance.shuffle(groups)
    items[:] = [item for tests in groups for item in tests]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Collected tests and imported libraries live as long as the process: collections, of which tests make many here
    and in forked workers, pass over them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_world(request: pytest.FixtureRequest) -> Iterator[None]:
    """Records, caches and settings of a test are its own, and so is the state of the random generators."""
    with request.config.stash[_ISOLATION].one_test():
        yield


@pytest.fixture(scope="session")
def python() -> Iterator[ReadyPython]:
    """Starts Python processes that have imported torch before."""
    with contextlib.closing(ReadyPython()) as made:
        yield made


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process, segment or file that is left fails the run; xdist's workers report theirs to the controller."""
    left = session.config.stash[_LEFT]
    left += session.config.stash[_ISOLATION].left()
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left"] = left
    elif left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    node.config.stash[_LEFT].extend(getattr(node, "workeroutput", {}).get("left", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash[_LEFT]:
        terminalreporter.section("LEFT BEHIND BY THE TESTS", red=True)
        for each in left:
            terminalreporter.line(each)
