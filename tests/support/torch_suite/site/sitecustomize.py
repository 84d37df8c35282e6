"""Puts penstock's loader in torch's place in every Python process that the borrowed suite starts.

In:  PENSTOCK_SUITE_VARIANT, and this directory first in PYTHONPATH.
Out: once `import torch` is complete, `torch.utils.data.DataLoader` is the variant.
Runs in: the suite's pytest processes, the processes that its tests spawn, and their `python -c` scripts.

A plugin of pytest alone would not do: a spawned test process imports the suite's file anew and would quietly
test torch's own loader.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType


class AfterTorch(importlib.abc.MetaPathFinder):
    """Lets `import torch` happen, then replaces the loader; earlier, torch is only half imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            if "penstock" in sys.modules:
                return  # one of penstock's own workers, in the middle of its imports; it makes no loaders
            from support.torch_suite import suite as torch_suite

            torch_suite.replace_loader(os.environ["PENSTOCK_SUITE_VARIANT"])

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


if os.environ.get("PENSTOCK_SUITE_VARIANT"):
    sys.meta_path.insert(0, AfterTorch())
