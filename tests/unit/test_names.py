"""The names that the public modules export."""

from __future__ import annotations

import importlib

import pytest

EXPORTED = {
    "penstock": [
        "BudgetError", "Cache", "CacheError", "CacheStats", "ConfigError", "DataError", "DataLoader", "LRUCache",
        "LoaderStats", "Monitor", "PenstockError", "PlanTable", "WorkerError", "__version__", "data", "gpu",
        "integrations", "limits", "memory", "monitor", "plan", "precompute", "settings",
    ],
    "penstock.data": [
        "ArrowDataset", "BlockShuffleSampler", "LowMemDataset", "ParquetDataset", "SequenceSampler", "SharedList",
        "TarDataset", "WindowDataset",
    ],
    "penstock.gpu": [
        "BatchSize", "BatchTrial", "COMPONENTS", "Card", "Correction", "Estimate", "EstimateComparison", "Estimator",
        "Growth", "TrainingSetup", "WhatIf", "compare", "estimate", "find_batch_size", "what_if",
    ],
    "penstock.integrations": ["deepspeed"],
    "penstock.monitor": [
        "AlertRule", "Call", "Command", "GiveBack", "Log", "Monitor", "TensorBoard", "WandB", "Webhook",
    ],
    "penstock.settings": ["Settings", "SettingsEntry", "SettingsTable", "load", "write_like"],
}  # fmt: skip
"""Public module -> the names it exports. A change here is a change for users: CHANGELOG.md must mention it."""


@pytest.mark.parametrize("module", EXPORTED)
def test_a_public_module_exports_exactly_these_names(module: str) -> None:
    assert sorted(importlib.import_module(module).__all__) == EXPORTED[module]


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in EXPORTED.items() for name in names])
def test_every_exported_name_can_be_imported(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) is not None
