"""Finds what a section of a settings file is about: training, evaluation, loading, or something else.

In:  the names of sections and keys, as written in the file.
Out: phases, and whether a common word such as "workers" is about the loader in a section.
Runs in: trainer, command line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from penstock.errors import ConfigError

Phase = Literal["train", "eval", "val", "test"]
Kind = Literal["loader", "loading", "foreign", "unknown"]
"""What a section is about. "loader": its name contains "loader"; "loading": it is about data or training; "foreign": it
is about something with workers and batches of its own, such as a tokenizer."""

_PHASES: dict[str, Phase] = {
    "train": "train", "training": "train", "fit": "train", "pretrain": "train", "pretraining": "train",
    "finetune": "train", "finetuning": "train", "sft": "train",
    "eval": "eval", "evaluation": "eval", "evaluate": "eval",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip

CHAINS: dict[Phase, tuple[Phase, ...]] = {
    "train": (),
    "eval": ("eval", "val", "test"),
    "val": ("val", "eval"),
    "test": ("test", "eval", "val"),
}
"""Requested phase -> the phases whose keys take precedence over keys for training, in this order."""

_LOADER = {"loader", "loaders", "dataloader", "dataloaders", "penstock"}
_LOADING = {"data", "dataset", "datasets", "ds", "datamodule", "dm", "loading", "input", "inputs", "trainer"}
_FOREIGN = {
    "model", "models", "network", "backbone", "optim", "optimizer", "scheduler", "tokenizer", "tokenization", "logging",
    "logger", "wandb", "checkpoint", "checkpointing", "inference", "infer", "predict", "prediction", "generation",
    "generate", "export", "deploy", "deployment", "server", "serving", "preprocess", "preprocessing", "metrics", "loss",
    "hydra", "ema", "lora", "launcher", "slurm",
}  # fmt: skip


@lru_cache(maxsize=4096)
def normal(name: str) -> str:
    """The name of a key or section in the form that the table of aliases uses."""
    return re.sub(r"[\s\-]+", "_", name.strip().lower())


def parts(path: Sequence[str]) -> tuple[str, ...]:
    """The path with dotted keys, such as ``data.train.num_workers``, split into their names."""
    return tuple(normal(part) for name in path for part in name.split(".")) if path else ()


def phase_of_key(key: str) -> tuple[str, Phase | None]:
    """``eval_batch_size`` -> ``batch_size`` and "eval". A key that names no phase or several phases is returned
    unchanged."""
    words = key.split("_")
    found = [word for word in words if word in _PHASES]
    if len(found) != 1 or len(words) == 1:
        return key, None
    words.remove(found[0])
    return "_".join(words), _PHASES[found[0]]


@lru_cache(maxsize=4096)
def _phase_of_section(section: str) -> Phase | None:
    found: list[Phase] = [_PHASES[word] for word in section.split("_") if word in _PHASES]
    return found[0] if len(set(found)) == 1 else None


@lru_cache(maxsize=4096)
def _kind_of_section(section: str) -> Kind:
    words = set(section.split("_"))
    if words & _FOREIGN:
        return "foreign"
    if words & _LOADER:
        return "loader"
    return "loading" if words & (_LOADING | _PHASES.keys()) else "unknown"


def phase_of(sections: Sequence[str]) -> Phase | None:
    """The phase of the innermost section that names a phase."""
    for name in reversed(sections):
        if (phase := _phase_of_section(name)) is not None:
            return phase
    return None


def kind_of(sections: Sequence[str]) -> Kind:
    """The kind of the innermost section whose kind is known; the top level of a file is about loading."""
    for name in reversed(sections):
        if (kind := _kind_of_section(name)) != "unknown":
            return kind
    return "unknown" if sections else "loading"


def phase_asked_for(section: str) -> Phase:
    phase = _phase_of_section(normal(section)) if isinstance(section, str) else None
    if phase is None:
        raise ConfigError(
            f'section={section!r} is neither training nor evaluation; write "train", "eval", "val" or "test"'
        )
    return phase
