"""A table of names: a team's name for a setting -> penstock's name for this setting.

In:  nothing.
Out: the ``Alias`` of each key, and the key that a misspelt key probably means.
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
"""How a value is read. "gib" is a number of GiB, for keys that end in _GB; "start" is a start method for processes."""
Where = Literal["anywhere", "loading", "loader"]
"""The sections in which a key counts. "loading" means the top level and sections about data or training, where a common
word such as "workers" belongs to the loader; "loader" means only sections with "loader" in their name."""


@dataclass(frozen=True, kw_only=True)
class Alias:
    """One key and its meaning."""

    key: str
    """The key as teams write it, in lower case."""
    target: str
    """The meaning of the key: an argument of ``penstock.DataLoader``, or one of ``FACTS``."""
    reads: Reads
    where: Where


ARGUMENTS = (
    "batch_size", "shuffle", "num_workers", "pin_memory", "drop_last", "timeout", "multiprocessing_context",
    "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order", "memory", "autotune", "device", "cache",
    "seeding", "backend", "name",
)  # fmt: skip
"""The arguments of ``penstock.DataLoader`` that a file can set, in the order in which the loader has them."""

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
"""Settings that are not arguments of a loader, but that decide an argument or are needed for planning."""

MISSPELT_FACTS = ("images_per_gpu", "use_cache")
"""The facts that decide an argument. Misspelt keys of these facts are refused, like misspelt keys of arguments."""

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
"""Abbreviations and mistakes that differ from a key by more than one letter but still have one clear meaning."""

_SHORTEST = 9
"""The least length of keys that are checked for misspellings: too many words differ from a shorter key by one
letter."""


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
    """The known key from which ``key`` differs by one inserted, missing, replaced or swapped letter; None if no known
    key is that close."""
    if key in ALIASES:
        return None
    if key in _ABBREVIATED:
        return _ABBREVIATED[key]
    if len(key) > 40:
        return None
    for near in (key, *_without_one_letter(key)):
        meant = _NEIGHBOURS.get(near)
        # The first letter is hardly ever mistyped: patch_size does not mean batch_size.
        if meant is not None and meant[0] == key[0] and abs(len(meant) - len(key)) <= 1:
            return meant
    return None
