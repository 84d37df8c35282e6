"""What pytest itself needs while it runs the borrowed suite against one variant of penstock's loader.

In:  PENSTOCK_SUITE_VARIANT and PENSTOCK_SUITE_ONLY_EXCLUDED.
Out: excluded tests are skipped with their reason; a name that the suite no longer has stops the run.
Runs in: the suite's pytest processes (`-p suite_plugin`).
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator

import pytest
import torch.utils.data

from support.torch_suite import suite as torch_suite

VARIANT = os.environ["PENSTOCK_SUITE_VARIANT"]
ONLY_EXCLUDED = bool(os.environ.get("PENSTOCK_SUITE_ONLY_EXCLUDED"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    module = getattr(items[0], "module", None) if items else None
    loader = getattr(module, "DataLoader", None)
    if loader is not torch.utils.data.DataLoader or getattr(loader, "suite_variant", None) != VARIANT:
        raise pytest.UsageError(f"the suite would have tested {loader!r} instead of the variant {VARIANT!r}")
    reasons = torch_suite.exclusions(VARIANT)
    names = {name_of(item) for item in items}
    unknown = sorted(set(reasons) - names)
    if unknown:
        raise pytest.UsageError(f"excluded tests that this suite does not have: {', '.join(unknown)}")
    if ONLY_EXCLUDED:
        items[:] = [item for item in items if name_of(item) in reasons]
        return
    for item in items:
        reason = reasons.get(name_of(item))
        if reason:
            item.add_marker(pytest.mark.skip(reason=torch_suite.EXCLUDED + reason))


def name_of(item: pytest.Item) -> str:
    """`Class::test`, as the exclusions spell it."""
    return item.nodeid.split("::", 1)[1]


@pytest.fixture(autouse=True)
def start_method_is_left_as_found() -> Iterator[None]:
    """One test sets forkserver for the whole process; the tests after it would depend on their order."""
    found = multiprocessing.get_start_method(allow_none=True)
    yield
    multiprocessing.set_start_method(found, force=True)
