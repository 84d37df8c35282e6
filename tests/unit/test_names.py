"""The names and the size of the source: exported names, class names, folders and files."""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock

SOURCE = Path(penstock.__file__).parent
MOST_FILES_IN_A_FOLDER = 15
MOST_LINES_IN_A_FILE = 450

EXPORTED = {
    "penstock": [
        "BudgetError", "Cache", "CacheError", "CacheStats", "ConfigError", "DataError", "DataLoader", "LRUCache",
        "LoaderStats", "Monitor", "PenstockError", "PlanTable", "WorkerError", "__version__", "data", "empty",
        "empty_like", "gpu", "integrations", "limits", "memory", "monitor", "plan", "precompute", "settings",
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


def classes_in(file: Path) -> Iterator[tuple[str, str]]:
    """Name and place of every class in the file, private and nested ones included."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef):
            yield node.name, f"{file.relative_to(SOURCE)}:{node.lineno}"


def test_no_class_name_exists_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for file in sorted(SOURCE.rglob("*.py")):
        for name, place in classes_in(file):
            places[name].append(place)
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice, "\n".join(f"{name} is defined in {' and '.join(where)}" for name, where in twice.items())


def test_no_folder_has_more_files_than_a_reader_can_survey() -> None:
    counts = {folder: len(list(folder.glob("*.py"))) for folder in {file.parent for file in SOURCE.rglob("*.py")}}
    full = {str(folder): count for folder, count in counts.items() if count > MOST_FILES_IN_A_FOLDER}
    assert not full, f"more than {MOST_FILES_IN_A_FOLDER} Python files: {full}"


def test_no_file_is_longer_than_a_reader_can_survey() -> None:
    lines = {file: len(file.read_text().splitlines()) for file in SOURCE.rglob("*.py")}
    long = {str(file.relative_to(SOURCE)): count for file, count in lines.items() if count > MOST_LINES_IN_A_FILE}
    assert not long, f"more than {MOST_LINES_IN_A_FILE} lines: {long}"
