"""The table of names: a team's name for a setting -> penstock's name.

In:  nothing.
Out: ``Alias`` by key, and the key that a misspelt one probably means.
Runs in: trainer, command line.

Keys are in lower case with underscores; a file's keys are converted to that form before they are looked up. Words such
as "train" or "eval" are removed from a key first: ``per_device_eval_batch_size`` becomes ``per_device_batch_size``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reads = Literal[
    "workers", "count", "flag", "size", "gib", "seconds", "seeding", "backend", "device", "start", "text", "steps"
]  # fmt: skip
"""How a value is read. gib: a number of GiB, for keys that end in _GB. start: a start method for processes."""
Where = Literal["anywhere", "loading", "loader"]
"""In which sections a key counts. loading: at the top level and in sections about data or training, where a common word
means the loader's; loader: only in sections whose name says loader."""


@dataclass(frozen=True, kw_only=True)
class Alias:
    """One key and its meaning."""

    key: str
    """As teams write it, in lower case."""
    target: str
    """An argument of ``penstock.DataLoader``, or one of ``FACTS``."""
    reads: Reads
    where: Where


ARGUMENTS = (
    "batch_size", "shuffle", "num_workers", "pin_memory", "drop_last", "timeout", "multiprocessing_context",
    "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order", "memory", "autotune", "device", "cache",
    "seeding", "backend", "name",
)  # fmt: skip
"""Arguments of ``penstock.DataLoader`` that a file can set, in the loader's order."""

FACTS = {
    "images_per_gpu": "images per GPU in one step; divided by sequence_length it gives batch_size",
    "sequence_length": "images in one sample",
    "use_cache": "whether to use a cache",
    "accumulation_steps": "steps of gradient accumulation",
    "max_steps": "total training steps",
    "gpus_per_node": "training processes on one node",
    "keep_in_memory": "whether the whole dataset is read into memory",
    "ultra_low_mem": "whether the dataset keeps no file open between reads",
}
"""Settings that are not arguments of a loader, but decide one or are needed for planning."""

MISSPELT_FACTS = ("images_per_gpu", "use_cache")
"""Facts that decide an argument: their misspelt keys are refused, as those of arguments are."""

_TABLE: tuple[tuple[str, Reads, Where, str], ...] = (
    ("batch_size", "count", "anywhere",
     "batch_size batch_size_per_gpu batch_size_per_device per_gpu_batch_size per_device_batch_size micro_batch_size "
     "micro_batch_size_per_gpu samples_per_gpu"),
    ("shuffle", "flag", "anywhere", "shuffle"),
    ("num_workers", "workers", "anywhere",
     "num_workers num_dataloader_workers dataloader_num_workers dataloader_workers num_data_workers data_workers "
     "n_workers workers_per_gpu"),
    ("num_workers", "workers", "loading", "workers"),
    ("pin_memory", "flag", "anywhere", "pin_memory dataloader_pin_memory"),
    ("drop_last", "flag", "anywhere", "drop_last dataloader_drop_last"),
    ("timeout", "seconds", "loader", "timeout"),
    ("multiprocessing_context", "start", "anywhere", "multiprocessing_context"),
    ("prefetch_factor", "count", "anywhere",
     "prefetch_factor dataloader_prefetch_factor dataloader_prefetch_per_worker prefetch_batches_per_worker "
     "prefetch_per_worker"),
    ("persistent_workers", "flag", "anywhere", "persistent_workers dataloader_persistent_workers"),
    ("pin_memory_device", "device", "anywhere", "pin_memory_device"),
    ("in_order", "flag", "anywhere", "in_order"),
    ("memory", "size", "loading", "memory memory_budget loader_memory"),
    ("memory", "gib", "loading", "memory_gb memory_budget_gb loader_memory_gb"),
    ("autotune", "flag", "loading", "autotune"),
    ("device", "device", "loading", "device"),
    ("cache", "size", "loading", "cache"),
    ("cache", "gib", "anywhere", "cache_size_gb cache_gb ram_cache_gb ram_cache_size_gb"),
    ("seeding", "seeding", "loading", "seeding"),
    ("backend", "backend", "loading", "backend"),
    ("name", "text", "loader", "name"),
    ("name", "text", "anywhere", "loader_name"),
    ("images_per_gpu", "count", "anywhere", "max_img_per_gpu max_images_per_gpu"),
    ("sequence_length", "count", "anywhere", "sequence_length sequence_len seq_length seq_len img_per_seq"),
    ("use_cache", "flag", "anywhere", "use_ram_cache"),
    ("accumulation_steps", "count", "anywhere",
     "accum_steps accumulation_steps grad_accum_steps gradient_accumulation_steps accumulate_grad_batches"),
    ("max_steps", "steps", "anywhere", "max_steps max_train_steps total_steps"),
    ("gpus_per_node", "count", "anywhere", "num_gpus n_gpus gpus_per_node num_gpus_per_node nproc_per_node"),
    ("keep_in_memory", "flag", "anywhere", "keep_in_memory"),
    ("ultra_low_mem", "flag", "anywhere", "ultra_low_mem"),
)  # fmt: skip

ALIASES = {
    key: Alias(key=key, target=target, reads=reads, where=where)
    for target, reads, where, keys in _TABLE
    for key in keys.split()
}
"""Key -> its meaning."""

_ABBREVIATED = {
    "bs": "batch_size",
    "batch_sz": "batch_size",
    "num_wokers": "num_workers",
    "pin_mem": "pin_memory",
    "prefetch": "prefetch_factor",
    "cache_size": "cache_size_gb",
    "persistent": "persistent_workers",
}
"""Abbreviations and mistakes that differ by more than one letter and still have one clear meaning."""

_SHORTEST = 9
"""Shorter keys are not checked for misspellings: other words differ from them by one letter."""


def _without_one_letter(word: str) -> set[str]:
    return {word[:at] + word[at + 1 :] for at in range(len(word))}


_NEIGHBOURS = {
    near: key
    for key, alias in ALIASES.items()
    if alias.where == "anywhere" and len(key) >= _SHORTEST
    if alias.target in ARGUMENTS or alias.target in MISSPELT_FACTS
    for near in {key} | _without_one_letter(key)
}


def probably_meant(key: str) -> str | None:
    """The known key that ``key`` differs from by one inserted, missing, replaced or swapped letter; None otherwise."""
    if key in ALIASES:
        return None
    if key in _ABBREVIATED:
        return _ABBREVIATED[key]
    if len(key) > 40:
        return None
    for near in (key, *_without_one_letter(key)):
        meant = _NEIGHBOURS.get(near)
        # The first letter is hardly ever the mistyped one: patch_size does not mean batch_size.
        if meant is not None and meant[0] == key[0] and abs(len(meant) - len(key)) <= 1:
            return meant
    return None
