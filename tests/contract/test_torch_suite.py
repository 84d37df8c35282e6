"""PyTorch's own tests of its DataLoader, run against penstock's: needs a copy of them, see torch_suite.py."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from support.torch_suite import suite as torch_suite

HOW = (
    "PYTORCH'S OWN DATALOADER TESTS WERE NOT RUN: set PENSTOCK_TORCH_TESTS to the path of "
    "test/test_dataloader.py in PyTorch's sources, at the installed release, and `pip install expecttest`"
)


@pytest.fixture
def suite() -> Path:
    where = os.environ.get("PENSTOCK_TORCH_TESTS")
    if not where:
        pytest.skip(HOW)
    path = Path(where).resolve()
    assert path.is_file(), f"PENSTOCK_TORCH_TESTS={where} is not a file"
    assert importlib.util.find_spec("expecttest"), "PyTorch's tests need `pip install expecttest`"
    return path


@pytest.mark.timeout(torch_suite.RUN_TIMEOUT_S + 60)
@pytest.mark.xdist_group("torch-suite")
@pytest.mark.parametrize("variant", torch_suite.VARIANTS)
def test_pytorchs_own_tests_pass_with_penstock_in_its_place(variant: str, suite: Path) -> None:
    outcome = torch_suite.run(variant, suite, jobs=1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
    print(outcome)
    assert outcome.ok, str(outcome)


@pytest.mark.parametrize("variant", torch_suite.VARIANTS)
def test_every_test_that_is_left_out_has_a_reason_of_its_own(variant: str) -> None:
    for name, reason in torch_suite.exclusions(variant).items():
        assert name.count("::") == 1
        assert len(reason) > 20, name
    shared = torch_suite.EVERYWHERE.keys() & torch_suite.PER_VARIANT[variant].keys()
    assert not shared, "listed twice"
