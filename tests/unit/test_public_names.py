"""What `import penstock` promises: its names exist, it is quick, and it is quiet."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import penstock


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)


@pytest.mark.parametrize("name", penstock.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(penstock, name) is not None


def test_public_names_are_sorted_unique_and_listed_by_dir() -> None:
    assert list(penstock.__all__) == sorted(set(penstock.__all__))
    assert set(penstock.__all__) <= set(dir(penstock))


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = penstock.no_such_name  # type: ignore[attr-defined]


def test_the_version_is_one_that_packaging_tools_accept() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|(a|b|rc)\d+)?", penstock.__version__)


def test_import_does_not_bring_torch_or_anything_of_the_command_line() -> None:
    loaded = run_python("import penstock, sys; print(*sys.modules, sep='\\n')").stdout.splitlines()
    assert "penstock" in loaded
    assert not {"torch", "numpy", "click", "rich"} & set(loaded)


def test_limits_and_memory_do_not_bring_torch() -> None:
    code = "import penstock, sys; penstock.limits(); penstock.memory(); print('torch' in sys.modules)"
    assert run_python(code).stdout.strip() == "False"


def test_logging_is_quiet_until_the_user_asks_for_it() -> None:
    code = "import logging, penstock; logging.getLogger('penstock.meter').warning('careful')"
    assert run_python(code).stderr == ""


def test_logging_reaches_a_user_who_asks_for_it() -> None:
    code = "import logging, penstock; logging.basicConfig(); logging.getLogger('penstock').warning('careful')"
    assert "careful" in run_python(code).stderr
